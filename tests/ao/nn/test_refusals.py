"""What layers with weights refuse they refuse by name: the module, what was seen, and the cure."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.intrinsic import quantized as nniq
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import QuantStub, convert, get_default_qconfig, prepare, quantize_dynamic

RANKS = {"1d": 1, "2d": 2, "3d": 3}
LINEAR = [nnq.Linear, nniq.LinearReLU]
CONVS = [
    *(nnq.Conv1d, nnq.Conv2d, nnq.Conv3d, nniq.ConvReLU1d, nniq.ConvReLU2d, nniq.ConvReLU3d),
    *(nnq.ConvTranspose1d, nnq.ConvTranspose2d, nnq.ConvTranspose3d),
    *(nniq.ConvTransposeReLU1d, nniq.ConvTransposeReLU2d, nniq.ConvTransposeReLU3d),
]
DYNAMIC_CONVS = [
    *(nnqd.Conv1d, nnqd.Conv2d, nnqd.Conv3d, nnqd.ConvTranspose1d, nnqd.ConvTranspose2d, nnqd.ConvTranspose3d)
]
STATIC = [*LINEAR, *CONVS]
DYNAMIC = [nnqd.Linear, nniq.dynamic.LinearReLU, *DYNAMIC_CONVS]


def ident(kind: Any) -> str:
    return f"{'dynamic-' if kind in DYNAMIC else ''}{kind.__name__}"


def rank_of(kind: type) -> int:
    return RANKS.get(kind.__name__[-2:], 0)


def layer(kind: Any) -> nn.Module:
    made: nn.Module = kind(4, 6, 3) if rank_of(kind) else kind(4, 6)
    made.module_path = "body.0"
    return made


def real(kind: type, size: int = 4) -> Tensor:
    return torch.randn(2, size, *[5] * rank_of(kind))


def quantized(x: Tensor, dtype: Any = zp.quint8) -> zp.QTensor:
    return zp.quantize_per_tensor(x, 0.1, 0, dtype)


def refusal(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    text = str(caught.value)
    assert ".cpp" not in text
    assert "zeropoint::" not in text
    return text


@pytest.mark.parametrize("kind", STATIC, ids=ident)
def test_codes_of_32_bits(kind: type) -> None:
    text = refusal(TypeError, lambda: layer(kind)(quantized(real(kind), zp.qint32)))
    assert text.startswith(
        f"quantized {kind.__name__} 'body.0' takes qint8 or quint8 activations, got zeropoint.qint32"
    )
    assert "zeropoint.requantize(x, scale, zero_point, zeropoint.quint8)" in text


@pytest.mark.parametrize("kind", STATIC, ids=ident)
def test_a_grid_a_channel(kind: type) -> None:
    x = zp.quantize_per_channel(real(kind), torch.ones(4), torch.zeros(4, dtype=torch.int32), 1, zp.quint8)
    text = refusal(RuntimeError, lambda: layer(kind)(x))
    assert text.startswith(f"quantized {kind.__name__} 'body.0' takes activations on one grid per tensor, got ")
    assert "along axis 1: quantize them again with quantize_per_tensor(x.dequantize(), " in text


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC], ids=ident)
def test_another_number_of_channels(kind: type) -> None:
    x = real(kind, 5)
    text = refusal(RuntimeError, lambda: layer(kind)(x if kind in DYNAMIC else quantized(x)))
    word, name = (
        "dynamic quantized" if kind in DYNAMIC else "quantized",
        "in_channels" if rank_of(kind) else "in_features",
    )
    sizes = ", ".join(["4", *"DHW"[3 - rank_of(kind) :]])
    form = f"(N, {sizes}) or ({sizes})" if rank_of(kind) else "(..., 4)"
    assert text == (
        f"{word} {kind.__name__} 'body.0' with {name}=4 takes an input {form}, got shape {tuple(x.shape)}: "
        f"reshape or permute the input, or make the layer with {name}=5"
    )


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC], ids=ident)
def test_too_few_dimensions(kind: type) -> None:
    check_dimensions(kind, rank_of(kind))


@pytest.mark.parametrize("kind", [*CONVS, *DYNAMIC_CONVS], ids=ident)
def test_too_many_dimensions(kind: type) -> None:
    check_dimensions(kind, rank_of(kind) + 3)


def check_dimensions(kind: type, count: int) -> None:
    shape = (4,) * count
    x = torch.zeros(shape)
    text = refusal(RuntimeError, lambda: layer(kind)(x if kind in DYNAMIC else quantized(x)))
    assert f"got shape {shape}: reshape the input" in text


@pytest.mark.parametrize("kind", DYNAMIC, ids=ident)
def test_dynamic_layers_name_what_is_no_float_tensor(kind: type) -> None:
    name = f"dynamic quantized {kind.__name__} 'body.0' takes a float"
    text = refusal(TypeError, lambda: layer(kind)(real(kind).to(torch.int64)))
    assert text.startswith(name)
    assert text.endswith("got torch.int64: convert it with x.float()")
    text = refusal(TypeError, lambda: layer(kind)(real(kind).tolist()))
    assert text.startswith(name)
    assert "got list: make a tensor of it" in text


@pytest.mark.parametrize("kind", [*CONVS, *DYNAMIC_CONVS], ids=ident)
def test_outputs_without_a_position(kind: Any) -> None:
    made = kind(4, 6, 3, padding=3) if "Transpose" in kind.__name__ else kind(4, 6, 3)
    x = torch.zeros(1, 4, *[2] * rank_of(kind))
    text = refusal(RuntimeError, lambda: made(x if kind in DYNAMIC else quantized(x)))
    assert f"quantized {kind.__name__} refuses an input of shape {tuple(x.shape)}: conv" in text
    assert ": give it a" in text


@pytest.mark.parametrize("mode", ["reflect", "circular"])
@pytest.mark.parametrize("kind", [nnq.Conv2d, nnqd.Conv2d], ids=ident)
def test_padding_that_the_input_cannot_give(kind: Any, mode: str) -> None:
    x, made = torch.zeros(1, 4, 2, 2), kind(4, 6, 3, padding=3, padding_mode=mode)
    text = refusal(RuntimeError, lambda: made(x if kind in DYNAMIC else quantized(x)))
    assert f"{mode} padding of (3, 3) does not fit a dimension of size 2: give it a larger input" in text


@pytest.mark.parametrize("kind", [nnq.ConvTranspose2d, nnqd.ConvTranspose2d], ids=ident)
def test_an_output_size_for_an_input_of_other_dimensions(kind: Any) -> None:
    x = torch.zeros(5, 5)
    text = refusal(RuntimeError, lambda: layer(kind)(x if kind in DYNAMIC else quantized(x), output_size=(7, 7)))
    assert "takes an input (N, 4, H, W) or (4, H, W), got shape (5, 5): reshape the input" in text
    text = refusal(
        ValueError, lambda: layer(kind)(x.expand(1, 4, 5, 5) if kind in DYNAMIC else quantized(real(kind)), (9, 9))
    )
    assert "ConvTranspose2d 'body.0' refuses an input" in text
    assert "output_size (9, 9) cannot be reached from an input of (5, 5): dimension 0 can be 7 to 7" in text


def test_modules_in_a_model_are_named_with_their_path() -> None:
    model: Any = nn.Sequential(
        QuantStub(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    )
    model.eval().qconfig = get_default_qconfig()
    prepared = prepare(model)
    prepared(torch.randn(2, 3, 5, 5))
    converted: Any = convert(prepared)
    assert "quantized Conv2d '1.0' with in_channels=3" in refusal(
        RuntimeError, lambda: converted(torch.randn(2, 4, 5, 5))
    )
    assert "quantized Linear '1.3' with in_features=36" in refusal(
        RuntimeError, lambda: converted(torch.randn(2, 3, 6, 6))
    )
    dynamic = quantize_dynamic(nn.Sequential(nn.Linear(3, 2)))
    assert "dynamic quantized Linear '0'" in refusal(RuntimeError, lambda: dynamic(torch.randn(2, 4)))


def test_the_reason_stays_behind_the_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        layer(nnq.Linear)(quantized(torch.randn(2, 5)))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_errors_that_are_not_about_the_input_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(nnq.Linear)

    def no_memory() -> None:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(made, "_packed_weight", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory is left$"):
        made(quantized(torch.randn(2, 4)))


@pytest.mark.parametrize("kind", [nnq.Linear, nnq.Conv2d, nnq.ConvTranspose2d, nnqd.Linear, nnqd.Conv2d], ids=ident)
def test_layers_trace(kind: type) -> None:
    model = nn.Sequential(*([] if kind in DYNAMIC else [nnq.Quantize(0.1, 0, zp.quint8)]), layer(kind)).eval()
    x = real(kind)
    known = model(x)
    traced = torch.export.export(nn.Sequential(model, *([] if kind in DYNAMIC else [nnq.DeQuantize()])), (x,))
    assert torch.equal(traced.module()(x), known if kind in DYNAMIC else known.dequantize())


# --- what constructors and set_weight_bias refuse ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*CONVS, *DYNAMIC_CONVS], ids=ident)
@pytest.mark.parametrize("name", ["stride", "dilation"])
@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_strides_and_dilations_at_once(kind: Any, name: str, value: int) -> None:
    values = (value,) * rank_of(kind)
    text = refusal(ValueError, lambda: kind(4, 6, 3, **{name: value}))
    assert text.startswith(
        f"{kind.__name__} takes strides and dilations of at least 1 and paddings of at least 0, all below 2**31"
    )
    assert f"{name}={values}" in text


@pytest.mark.parametrize("kind", [*CONVS, *DYNAMIC_CONVS], ids=ident)
@pytest.mark.parametrize("value", [-1, 2**40])
def test_paddings_at_once(kind: Any, value: int) -> None:
    text = refusal(ValueError, lambda: kind(4, 6, 3, padding=value))
    assert f"paddings of at least 0, all below 2**31, got stride={(1,) * rank_of(kind)}" in text
    assert f"padding={(value,) * rank_of(kind)}" in text


def test_same_padding_with_a_dilation_of_0() -> None:
    text = refusal(ValueError, lambda: nnq.Conv2d(4, 6, 3, padding="same", dilation=0))
    assert text.endswith("got stride=(1, 1), dilation=(0, 0) and padding='same'")


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC], ids=ident)
def test_weights_of_another_dtype(kind: Any) -> None:
    made = layer(kind)
    before = pickle.dumps(made.state_dict())
    weight: Any = made.weight
    word = f"weights of {'dynamic ' if kind in DYNAMIC else ''}quantized {kind.__name__} 'body.0' must be"
    cure = f"quantize with quantize_per_channel(weight, scales, zero_points, {made.CHANNEL_AXIS}, zeropoint.qint8)"
    wrong = quantized(weight.dequantize(), zp.quint8)
    text = refusal(TypeError, lambda: made.set_weight_bias(wrong, None))
    assert text == f"{word} qint8, got zeropoint.quint8: {cure}"
    text = refusal(TypeError, lambda: made.set_weight_bias(weight.dequantize(), None))
    assert text == f"{word} a quantized tensor, got torch.float32: {cure}"
    assert pickle.dumps(made.state_dict()) == before


def test_weights_with_grids_along_another_axis() -> None:
    weight = zp.quantize_per_channel(torch.randn(6, 4), torch.ones(4), torch.zeros(4, dtype=torch.int32), 1, zp.qint8)
    text = refusal(ValueError, lambda: layer(nnq.Linear).set_weight_bias(weight, None))
    assert text.startswith("weights of quantized Linear 'body.0' must have integer zero points along axis 0, got ")
    assert "along axis 1: quantize with quantize_per_channel(weight, scales, zero_points, 0, zeropoint.qint8)" in text


def test_recurrent_weights_of_another_dtype() -> None:
    made = nnqd.LSTM(4, 8)
    wrong = quantized(torch.randn(32, 4), zp.quint8)
    text = refusal(TypeError, lambda: made.set_weight_bias({"weight_ih_l0": wrong}))
    assert text.startswith("weight_ih_l0 of dynamic quantized LSTM must be qint8, got zeropoint.quint8: quantize with")


@pytest.mark.parametrize("kind", [nnq.Embedding, nnq.EmbeddingBag], ids=ident)
def test_rows_of_another_dtype(kind: Any) -> None:
    made = kind(6, 4)
    made.module_path = "table"
    cure = "quantize_per_channel(weight, scales, zero_points, 0, zeropoint.quint8) makes them"
    text = refusal(TypeError, lambda: made.set_weight(quantized(torch.randn(6, 4), zp.qint8)))
    assert text == f"quantized {kind.__name__} 'table' takes quint8 rows, got zeropoint.qint8: {cure}"
    text = refusal(TypeError, lambda: made(torch.zeros(1, 2)))
    assert text.startswith(
        f"quantized {kind.__name__} 'table' takes int32 or int64 indices, got torch.float32: convert"
    )


def test_a_batch_norm_of_other_channels() -> None:
    made = nnq.BatchNorm2d(4)
    made.module_path = "bn"
    text = refusal(ValueError, lambda: made(quantized(torch.randn(1, 3, 5, 5))))
    assert text == (
        "quantized BatchNorm2d 'bn' takes 4 channels, got shape (1, 3, 5, 5): "
        "permute the input, or make the layer with num_features=3"
    )
