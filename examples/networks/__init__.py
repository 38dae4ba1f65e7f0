"""Real networks and real data for the examples, the tests marked ``real`` and the benchmarks.

Nothing here is vendored: weights, pictures and texts are read from the files of installed packages
(``examples/requirements.txt``). The networks are plain torch modules, written as one would write them for eager
quantization.
"""
