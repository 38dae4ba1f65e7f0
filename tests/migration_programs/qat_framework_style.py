"""In the style of frameworks for quantization-aware training."""

import torch
import torch.nn as nn
import torch.nn.intrinsic as nni
import torch.nn.quantized as nnq
from torch.ao.quantization import quantization_mappings
from torch.quantization import propagate_qconfig_
from torch.quantization.quantization_mappings import (
    DEFAULT_QAT_MODULE_MAPPINGS,
    DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
    get_default_qat_module_mappings,
    get_default_static_quant_module_mappings,
)
from torch.quantization.quantize import convert, prepare


class Wrapped(nn.Linear):
    """A layer of the framework's own."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant = torch.quantization.QuantStub()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Sequential(nn.Flatten(), Wrapped(16, 3))
        self.dequant = torch.quantization.DeQuantStub()

    def forward(self, x):
        return self.dequant(self.head(self.conv(self.quant(x))))


DEFAULT_QAT_MODULE_MAPPINGS[Wrapped] = torch.nn.qat.Linear
DEFAULT_STATIC_QUANT_MODULE_MAPPINGS[Wrapped] = nnq.Linear

model = Model().train()
model.qconfig = torch.quantization.get_default_qat_qconfig("fbgemm")
propagate_qconfig_(model)
mapping = get_default_qat_module_mappings()
mapping[nn.Linear] = torch.nn.qat.Linear
convert(model, mapping=mapping, inplace=True, remove_qconfig=False)
prepare(model, observer_non_leaf_module_list={nni.ConvReLU2d}, inplace=True)
model(torch.rand(2, 2, 4, 4)).sum().backward()
static = get_default_static_quant_module_mappings()
assert static.keys() <= quantization_mappings.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS.keys() | static.keys()
results = [convert(model.eval(), mapping=static, remove_qconfig=False)]
outputs = [results[0](torch.rand(2, 2, 4, 4))]
