"""Measurements against the peers. ``python -m benchmarks --help`` lists the suites; ``harness`` says how we measure."""
