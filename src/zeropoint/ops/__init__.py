"""The operators, one file a family: schema, reference, output shape, and the function over quantized tensors."""

from zeropoint.ops import (
    activation,
    arithmetic,
    conv,
    conv_transpose,
    distributed,
    embedding,
    fake_quantize,
    histogram,
    interpolate,
    linear,
    norm,
    pool,
    qdq,
    quantize,
    rnn,
)

__all__ = [
    "activation",
    "arithmetic",
    "conv",
    "conv_transpose",
    "distributed",
    "embedding",
    "fake_quantize",
    "histogram",
    "interpolate",
    "linear",
    "norm",
    "pool",
    "qdq",
    "quantize",
    "rnn",
]
