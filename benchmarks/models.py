"""ResNet-18 and MobileNetV2 with random weights, written for eager quantization. Only their speed is of interest.

K. He et al., "Deep residual learning", 2015; M. Sandler et al., "MobileNetV2", 2018. Convolutions start as in the
first: normally distributed, which is nearer to trained weights than PyTorch's own, uniform start.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

__all__ = ["MobileNetV2", "ResNet18"]


class Unit(nn.Sequential):
    """Convolution, batch norm and, if wanted, a ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        relu: type[nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        self.bn = nn.BatchNorm2d(outputs)
        if relu:
            self.relu = relu()


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to the input."""

    def __init__(self, inputs: int, outputs: int, stride: int, ao: ModuleType) -> None:
        super().__init__()
        self.first = Unit(inputs, outputs, 3, stride, relu=nn.ReLU)
        self.second = Unit(outputs, outputs, 3)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else Unit(inputs, outputs, 1, stride)
        self.add = ao.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        return self.add.add_relu(self.second(self.first(x)), self.shortcut(x))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; added to the input where the shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, ao: ModuleType) -> None:
        super().__init__()
        wide = inputs * expansion
        expand = [Unit(inputs, wide, 1, relu=nn.ReLU6)] if expansion > 1 else []
        self.units = nn.Sequential(
            *expand, Unit(wide, wide, 3, stride, groups=wide, relu=nn.ReLU6), Unit(wide, outputs, 1)
        )
        self.add = ao.nn.quantized.FloatFunctional() if stride == 1 and inputs == outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.units(x)
        return y if self.add is None else self.add.add(x, y)


class Network(nn.Module):
    """Stubs around features, pooling and a classifier."""

    def __init__(self, features: nn.Sequential, width: int, ao: ModuleType) -> None:
        super().__init__()
        self.quant, self.dequant = ao.quantization.QuantStub(), ao.quantization.DeQuantStub()
        self.features = features
        self.pool, self.flatten, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.fc(self.flatten(self.pool(self.features(self.quant(x))))))

    def fuse_lists(self, relu6: bool = True) -> list[list[str]]:
        """What ``fuse_modules`` is to make one."""
        return [
            [f"{name}.{part}" for part, layer in unit.named_children() if relu6 or not isinstance(layer, nn.ReLU6)]
            for name, unit in self.named_modules()
            if isinstance(unit, Unit)
        ]


def ResNet18(ao: ModuleType) -> Network:
    """11.7 M parameters."""
    torch.manual_seed(0)
    stages = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [BasicBlock(*stage, ao) for stage in [*stages, (512, 512, 1)]]
    stem = [Unit(3, 64, 7, 2, relu=nn.ReLU), nn.MaxPool2d(3, 2, 1)]
    return Network(nn.Sequential(*stem, *blocks), 512, ao).eval()


def MobileNetV2(ao: ModuleType) -> Network:
    """3.5 M parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [Unit(3, 32, 3, 2, relu=nn.ReLU6)]
    width = 32
    for expansion, outputs, repeats, first_stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for i in range(repeats):
            layers.append(InvertedResidual(width, outputs, first_stride if i == 0 else 1, expansion, ao))
            width = outputs
    layers.append(Unit(width, 1280, 1, relu=nn.ReLU6))
    return Network(nn.Sequential(*layers), 1280, ao).eval()
