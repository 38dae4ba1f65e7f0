"""Float modules that simulate quantized weights while they train, under torch.ao's names."""

from zeropoint.ao.nn.qat import dynamic
from zeropoint.ao.nn.qat.conv import Conv1d, Conv2d, Conv3d
from zeropoint.ao.nn.qat.conv_transpose import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from zeropoint.ao.nn.qat.embedding_ops import Embedding, EmbeddingBag
from zeropoint.ao.nn.qat.linear import Linear

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "EmbeddingBag",
    "Linear",
    "dynamic",
]
