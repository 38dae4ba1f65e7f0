"""Dynamic convolutions: floats in, floats out, exact in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint import grid
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import quantize_dynamic
from zeropoint.ops.conv import conv_dynamic_reference
from zeropoint.ops.conv_transpose import conv_transpose_dynamic_reference

CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def example(kind: Any, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = kind(4, 6, 3, stride=2, padding=1, **options).eval()
    return layer, torch.randn(2, 4, *[7] * len(layer.kernel_size))


def twin_of(layer: nn.Module) -> Any:
    return quantize_dynamic(layer, {type(layer)})


@pytest.mark.parametrize("kind", CONVS + TRANSPOSED)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"bias": False}, {"dilation": 2}], ids=str)
def test_integers_between_are_exact(kind: Any, options: dict[str, Any]) -> None:
    layer, x = example(kind, **options)
    twin = twin_of(layer)
    assert twin._get_name() == f"DynamicQuantized{kind.__name__}"
    state = twin.state_dict()
    scale, zero_point = grid.choose_qparams(x.min(), x.max(), 0, 255)
    steps = grid.quantize(x, scale, zero_point, 0, 255).double() - zero_point
    exact = copy.deepcopy(layer).double()
    exact.bias = None
    with torch.no_grad():
        exact.weight.copy_(state["weight"].double())
        sums = exact(steps).float()
    column = (-1, *[1] * (x.dim() - 2))
    expected = sums * (scale * state["weight_scale"].double()).float().reshape(column)
    if layer.bias is not None:
        expected = expected + state["bias"].reshape(column)
    out = twin(x)
    assert torch.equal(out, expected)
    assert out.movedim(1, -1).is_contiguous()


@pytest.mark.parametrize("kind", CONVS + TRANSPOSED)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_native_gives_the_floats_of_the_reference(kind: Any, groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = kind(4, 4, 2, stride=3, groups=groups)
    rank = len(layer.kernel_size)
    twin, x = twin_of(layer), torch.randn(2, 4, *[5] * rank).to(dtype)
    state = twin.state_dict()
    weights = (state["weight"], state["weight_scale"], state["weight_zero_point"], state["bias"])
    zeros, ones = [0] * rank, [1] * rank
    if kind in CONVS:
        arguments = (x, *weights, [3] * rank, [0] * (2 * rank), ones, groups)
        operator, reference = torch.ops.zeropoint.conv_dynamic, conv_dynamic_reference
    else:
        arguments = (x, *weights, [3] * rank, zeros, [1] * rank, ones, groups)
        operator, reference = torch.ops.zeropoint.conv_transpose_dynamic, conv_transpose_dynamic_reference
    for reduce_range, relu in ((False, False), (True, True)):
        result = operator(*arguments, reduce_range, relu, None)
        expected = reference(*arguments, reduce_range, relu, None)
        assert result.dtype == dtype
        assert result.stride() == expected.stride()
        assert torch.equal(result, expected)
        planned = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments), reduce_range, relu, None)
        assert (planned.shape, planned.stride(), planned.dtype) == (result.shape, result.stride(), result.dtype)


def test_grids_of_single_channels_keep_what_one_grid_loses() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-3, 0, 8).reshape(-1, 1, 1, 1))
        layer.bias.zero_()
    x = torch.randn(2, 8, 8, 8)
    wanted = layer(x).detach()
    error = (twin_of(layer)(x) - wanted).pow(2).mean((0, 2, 3))
    assert bool((10 * torch.log10(wanted.pow(2).mean((0, 2, 3)) / error) > 35).all())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes(mode: str) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, padding="same", padding_mode=mode)
    x = torch.randn(1, 3, 6, 6)
    wanted = layer(x).detach()
    error = (twin_of(layer)(x) - wanted).pow(2).mean()
    assert float(10 * torch.log10(wanted.pow(2).mean() / error)) > 35


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_inputs_of_every_kind(kind: Any) -> None:
    layer, x = example(kind)
    twin = twin_of(layer)
    out = twin(x)
    assert torch.equal(twin(x.to(memory_format=torch.channels_last)), out)
    assert torch.equal(twin(x.transpose(2, 3).contiguous().transpose(2, 3)), out)
    assert torch.equal(twin(x[:1]), twin(x[0]).unsqueeze(0))
    assert twin(x[:0]).shape == (0, *out.shape[1:])
    codes = zp.quantize_per_tensor(x, 0.05, 100, zp.quint8)
    assert torch.equal(twin(codes), twin(codes.dequantize()))
    huge = x.clone()
    huge[0, 0, 0, 0] = 3e38
    assert bool(torch.isfinite(twin(huge)).all())


def test_convolutions_are_swapped_only_where_they_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    default = quantize_dynamic(model)
    assert type(default[0]) is nn.Conv2d
    assert type(default[2]) is nnqd.Linear
    named = quantize_dynamic(model, {nn.Conv2d})
    assert type(named[0]) is nnqd.Conv2d
    assert type(named[2]) is nn.Linear


def test_other_classes_are_refused() -> None:
    with pytest.raises(TypeError):
        nnqd.Conv2d.from_float(nn.Conv1d(3, 3, 3))
    with pytest.raises(TypeError):
        nnqd.ConvTranspose2d.from_float(nn.Conv2d(3, 3, 3))
    with pytest.raises(TypeError):
        nnqd.Conv2d(3, 3, 3)(torch.zeros(1, 3, 4, 4, dtype=torch.int32))
