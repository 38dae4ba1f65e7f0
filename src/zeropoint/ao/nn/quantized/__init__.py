"""Modules that compute on quantized tensors, under torch.ao's names."""

from zeropoint.ao.nn.quantized import dynamic, functional
from zeropoint.ao.nn.quantized.activation import (
    ELU,
    GELU,
    Hardsigmoid,
    Hardswish,
    LeakyReLU,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from zeropoint.ao.nn.quantized.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from zeropoint.ao.nn.quantized.composed import LSTM, MultiheadAttention
from zeropoint.ao.nn.quantized.conv import Conv1d, Conv2d, Conv3d
from zeropoint.ao.nn.quantized.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from zeropoint.ao.nn.quantized.embedding import Embedding, EmbeddingBag
from zeropoint.ao.nn.quantized.functional_modules import FloatFunctional, FXFloatFunctional, QFunctional
from zeropoint.ao.nn.quantized.linear import Linear, QuantizedLinear
from zeropoint.ao.nn.quantized.normalization import (
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
)
from zeropoint.ao.nn.quantized.pooling import Dropout, MaxPool1d, MaxPool2d, MaxPool3d
from zeropoint.ao.nn.quantized.quantize import DeQuantize, Quantize

__all__ = [
    "ELU",
    "GELU",
    "LSTM",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "DeQuantize",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "FXFloatFunctional",
    "FloatFunctional",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mish",
    "MultiheadAttention",
    "PReLU",
    "QFunctional",
    "Quantize",
    "QuantizedLinear",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "dynamic",
    "functional",
]
