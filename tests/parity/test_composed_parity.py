"""Static LSTM and attention: state dicts that torch.ao wrote load into ours and compute the same codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.nn import quantized as nnq

torch_quantization = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")


class Around(nn.Module):
    def __init__(self, layer: nn.Module, arity: int) -> None:
        super().__init__()
        self.quant, self.layer, self.arity = torch_quantization.QuantStub(), layer, arity

    def forward(self, x: Tensor) -> Any:
        return self.layer(*[self.quant(x)] * self.arity)[0]


CASES = [
    pytest.param("LSTM", (12, 16), {"num_layers": 2, "bidirectional": True}, 1, id="lstm-deep-both-ways"),
    pytest.param("LSTM", (16, 12), {"bias": False}, 1, id="lstm-no-bias"),
    pytest.param("MultiheadAttention", (16, 4), {}, 3, id="attention"),
]


@pytest.mark.parametrize(("name", "sizes", "options", "arity"), CASES)
def test_a_state_dict_of_torch_ao_computes_the_same(
    name: str, sizes: tuple[int, int], options: dict[str, Any], arity: int
) -> None:
    layer, ours = getattr(nn, name), getattr(nnq, name)(*sizes, **options)
    observed, twin = getattr(torch.ao.nn.quantizable, name), getattr(torch.ao.nn.quantized, name)
    model = Around(layer(*sizes, **options), arity).eval()
    model.qconfig = torch_quantization.default_qconfig  # seven bits: torch's kernels do not saturate
    prepared = torch_quantization.prepare(
        model, prepare_custom_config_dict={"float_to_observed_custom_module_class": {layer: observed}}
    )
    x = torch.randn(5, 3, sizes[0])
    prepared(x)
    old = torch_quantization.convert(
        prepared, convert_custom_config_dict={"observed_to_quantized_custom_module_class": {observed: twin}}
    )
    ours.load_state_dict(old.layer.state_dict())
    codes = zp.quantize_per_tensor(x, float(old.quant.scale), int(old.quant.zero_point), zp.quint8)
    known, made = old(x), ours(*[codes] * arity)[0]
    assert made.q_scale() == known.q_scale()
    # torch.ao adds in float without the three roundings of our contract, so a tie may fall to the other side.
    assert (known.int_repr().int() - made.int_repr().int()).abs().max() <= 1
