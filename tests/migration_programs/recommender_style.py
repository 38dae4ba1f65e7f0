"""In the style of recommendation libraries."""

import copy

import torch
import torch.quantization as quant
from torch import nn, quantization
from torch.ao.nn.quantized.dynamic.modules.linear import Linear as DynamicLinear
from torch.ao.quantization.observer import PlaceholderObserver as Placeholder


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 6))

    def forward(self, index):
        return self.weight[index]


class QuantTable(nn.Module):
    """The library's own quantized module."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, index):
        return self.weight.dequantize()[index]

    @classmethod
    def from_float(cls, module, use_precomputed_fake_quant=False):
        dtype = module.qconfig.weight().dtype
        assert dtype == torch.quint8
        low, high = module.weight.detach().aminmax(dim=1)
        scales = (high - low) / 255
        return cls(torch.quantize_per_channel(module.weight.detach(), scales, -low / scales, 0, dtype))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table()
        self.dense = nn.Linear(6, 4)
        self.over = nn.Linear(4, 1)

    def forward(self, index):
        return self.over(torch.relu(self.dense(self.table(index))))


def quantize_embeddings(module, dtype, inplace, output_dtype=torch.float):
    qconfig = quant.QConfig(
        activation=quant.PlaceholderObserver.with_args(dtype=output_dtype),
        weight=quant.PlaceholderObserver.with_args(dtype=dtype),
    )
    return quant.quantize_dynamic(
        module,
        qconfig_spec={Table: qconfig},
        mapping={Table: QuantTable},
        inplace=inplace,
    )


tower = quantize_embeddings(Tower().eval(), torch.quint8, inplace=False)
assert type(tower.table) is QuantTable
again = quantization.quantize_dynamic(
    copy.deepcopy(tower), qconfig_spec={nn.Linear}, mapping={nn.Linear: DynamicLinear}, inplace=True
)
assert Placeholder is quant.PlaceholderObserver
results = [again]
outputs = [again(torch.tensor([1, 9, 0]))]
