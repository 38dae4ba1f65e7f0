"""In the style of torchvision's quantizable models."""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.ao.quantization import DeQuantStub, QuantStub
from torch.quantization import (
    QConfig,  # activation and weight
    default_observer,
    default_per_channel_weight_observer,
)


def _fuse_modules(model: nn.Module, modules_to_fuse: Any, is_qat: bool | None, **kwargs: Any) -> nn.Module:
    if is_qat is None:
        is_qat = model.training
    method = torch.ao.quantization.fuse_modules_qat if is_qat else torch.ao.quantization.fuse_modules
    return method(model, modules_to_fuse, **kwargs)


class Block(nn.Module):
    def __init__(self, planes: int, norm_layer: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = norm_layer(planes)
        self.relu = nn.ReLU(inplace=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = norm_layer(planes)
        self.add_relu = torch.nn.quantized.FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.add_relu.add_relu(out, x)

    def fuse_model(self, is_qat: bool | None = None) -> None:
        _fuse_modules(self, [["conv1", "bn1", "relu"], ["conv2", "bn2"]], is_qat, inplace=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.block = Block(4, partial(nn.BatchNorm2d, eps=1e-3))
        self.fc = nn.Linear(4, 2)
        self.quant = QuantStub()
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.stem(self.quant(x)))
        return self.dequant(self.fc(x.mean([2, 3])))


def quantize_model(model: nn.Module, backend: str) -> None:
    _dummy_input_data = torch.rand(1, 3, 16, 16)
    if backend not in torch.backends.quantized.supported_engines:
        backend = "none"
    model.eval()
    if backend == "fbgemm":
        model.qconfig = torch.ao.quantization.QConfig(
            activation=torch.ao.quantization.default_observer,
            weight=torch.ao.quantization.default_per_channel_weight_observer,
        )
    else:
        model.qconfig = QConfig(activation=default_observer, weight=default_per_channel_weight_observer)
    model.block.fuse_model()
    torch.ao.quantization.prepare(model, inplace=True)
    model(_dummy_input_data)
    torch.ao.quantization.convert(model, inplace=True)


def train_quantized(model: nn.Module) -> nn.Module:
    model.train()
    model.block.fuse_model(is_qat=True)
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(model, inplace=True)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    model.apply(torch.ao.quantization.disable_observer)
    model.apply(torch.nn.intrinsic.qat.freeze_bn_stats)
    return torch.ao.quantization.convert(model.eval(), inplace=False)


model = Net()
quantize_model(model, "fbgemm")
results = [model, train_quantized(Net())]
outputs = [result(torch.rand(2, 3, 8, 8)) for result in results]
