"""Quantized layers beside their float twins: padding, activations, pooling, norms, arithmetic, borders."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import convert, default_per_channel_qconfig, prepare


def quantized_twin(layer: nn.Module, x: Tensor) -> nn.Module:
    layer.eval().qconfig = default_per_channel_qconfig
    prepared = prepare(layer)
    with torch.no_grad():
        prepared(x)
    return convert(prepared)


def on_grid(*shape: int, dtype: zp.QDtype = zp.quint8) -> zp.QTensor:
    return zp.quantize_per_tensor(torch.randn(*shape), 1 / 32, 100 if dtype is zp.quint8 else -20, dtype)


def assert_follows(layer: nn.Module, x: zp.QTensor, steps: float = 2.0) -> nn.Module:
    """The quantized twin is off by no more than some steps of its output grid."""
    real = x.dequantize()
    twin = quantized_twin(layer, real)
    with torch.no_grad():
        expected = layer(real)
    y = twin(x)
    assert y.shape == expected.shape
    assert (y.dequantize() - expected).abs().max() <= steps * y.q_scale()
    return twin


# --- convolution --------------------------------------------------------------------------------------------------

CONVS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "1d same, even kernel": (lambda: nn.Conv1d(2, 4, 4, padding="same"), (2, 2, 9)),
    "1d valid": (lambda: nn.Conv1d(2, 4, 4, padding="valid"), (2, 2, 9)),
    "2d strided, grouped, dilated": (lambda: nn.Conv2d(4, 8, 3, 2, (2, 1), (2, 1), groups=2), (2, 4, 9, 8)),
    "2d depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 6, 7)),
    "2d pointwise": (lambda: nn.Conv2d(8, 3, 1), (2, 8, 5, 5)),
    "2d same, dilated": (lambda: nn.Conv2d(2, 4, (2, 3), padding="same", dilation=(1, 2)), (2, 2, 7, 6)),
    "2d circular": (lambda: nn.Conv2d(2, 4, 3, padding=2, padding_mode="circular"), (2, 2, 5, 6)),
    "2d reflect": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (2, 2, 5, 6)),
    "2d replicate": (lambda: nn.Conv2d(2, 4, 3, padding=(0, 1), padding_mode="replicate"), (2, 2, 5, 6)),
    "2d same circular": (lambda: nn.Conv2d(2, 4, 2, padding="same", padding_mode="circular"), (2, 2, 5, 6)),
    "2d without batch": (lambda: nn.Conv2d(2, 4, 3), (2, 5, 6)),
    "2d one output": (lambda: nn.Conv2d(8, 1, 3), (2, 8, 5, 5)),
    "3d": (lambda: nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1)), (2, 2, 4, 5, 6)),
    "3d grouped": (lambda: nn.Conv3d(4, 4, 2, groups=4), (1, 4, 3, 3, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint8], ids=["quint8", "qint8"])
@pytest.mark.parametrize("name", list(CONVS))
def test_convolutions_follow_their_float_twins(name: str, dtype: zp.QDtype) -> None:
    make, shape = CONVS[name]
    assert_follows(make(), on_grid(*shape, dtype=dtype))


def test_a_channels_last_input_gives_the_same_codes() -> None:
    x = on_grid(2, 4, 6, 6)
    twin = assert_follows(nn.Conv2d(4, 4, 3, padding=1), x)
    moved = zp.QTensor.from_codes(x.int_repr().contiguous(memory_format=torch.channels_last), x.scale, x.zero_point)
    assert torch.equal(twin(moved), twin(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "does not divide"),
        ({"out_channels": 0}, "needs channels"),
        ({"padding_mode": "mirror"}, "padding_mode must be"),
        ({"padding": "some"}, "padding must be"),
        ({"stride": 2, "padding": "same"}, "strided"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size must be"),
    ],
)
def test_arguments_that_make_no_convolution_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nnq.Conv2d(**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **arguments})


# --- linear -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6)], ids=str)
def test_linear_takes_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    assert_follows(nn.Linear(6, 5), on_grid(*shape))


def test_linear_and_quantized_linear_are_one_class() -> None:
    assert nnq.QuantizedLinear is nnq.Linear


# --- fused --------------------------------------------------------------------------------------------------------

FUSED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LinearReLU": (lambda relu: nni.LinearReLU(nn.Linear(6, 5), relu), (8, 6)),
    "ConvReLU1d": (lambda relu: nni.ConvReLU1d(nn.Conv1d(3, 4, 3), relu), (4, 3, 9)),
    "ConvReLU2d": (lambda relu: nni.ConvReLU2d(nn.Conv2d(3, 4, 3), relu), (4, 3, 6, 6)),
    "ConvReLU3d": (lambda relu: nni.ConvReLU3d(nn.Conv3d(3, 4, 2), relu), (4, 3, 4, 4, 4)),
    "BNReLU2d": (lambda relu: nni.BNReLU2d(nn.BatchNorm2d(3), relu), (4, 3, 6, 6)),
    "BNReLU3d": (lambda relu: nni.BNReLU3d(nn.BatchNorm3d(3), relu), (4, 3, 4, 4, 4)),
}


@pytest.mark.parametrize("rectifier", [nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("name", list(FUSED))
def test_fused_modules_follow_their_float_twins(name: str, rectifier: type[nn.Module]) -> None:
    make, shape = FUSED[name]
    x = on_grid(*shape)
    twin = assert_follows(make(rectifier()), x)
    assert type(twin) is getattr(nni.quantized, name)
    assert int(twin(x).int_repr().min()) == twin.zero_point
    twin.scale, twin.zero_point = 0.5, 10
    top = 10 + 12 if rectifier is nn.ReLU6 else 255
    assert int(twin(zp.quantize_per_tensor(torch.full(shape, 60.0), 0.5, 0, zp.quint8)).int_repr().max()) <= top


def test_a_fused_module_is_the_layer_and_a_clamp_in_one() -> None:
    """Code for code: fused equals unfused followed by ReLU on the same output grid."""
    conv = nn.Conv2d(3, 4, 3)
    x = on_grid(4, 3, 6, 6)
    fused = quantized_twin(nni.ConvReLU2d(conv, nn.ReLU()), x.dequantize())
    plain = nnq.Conv2d(3, 4, 3)
    plain.load_state_dict(fused.state_dict())
    assert torch.equal(F.relu(plain(x)), fused(x))


def test_fused_float_modules_check_their_parts() -> None:
    with pytest.raises(TypeError, match=r"ConvReLU2d is made of \(Conv2d, ReLU or ReLU6\), got \(Conv1d, ReLU\)"):
        nni.ConvReLU2d(nn.Conv1d(1, 1, 1), nn.ReLU())


# --- activations, pooling, dropout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nnq.ReLU, nnq.ReLU6])
def test_rectifiers_keep_the_grid(kind: type[nn.Module]) -> None:
    x = zp.quantize_per_tensor(torch.tensor([-1.0, 0.5, 9.0]), 0.2, 30, zp.quint8)
    y = kind()(x)
    assert (y.q_scale(), y.q_zero_point()) == (0.2, 30)
    top = 6.0 if kind is nnq.ReLU6 else 9.0
    torch.testing.assert_close(y.dequantize(), torch.tensor([0.0, 0.4, top]))


def test_rectifiers_write_in_place_when_asked() -> None:
    x = zp.quantize_per_tensor(torch.tensor([-1.0, 0.5]), 0.5, 3, zp.quint8)
    assert nnq.ReLU(inplace=True)(x) is x
    assert x.int_repr().tolist() == [3, 4]


@pytest.mark.parametrize("module", [nnq.ReLU(), nnq.ReLU6(), nnq.MaxPool2d(2), nnq.Dropout()], ids=repr)
def test_modules_without_a_grid_serve_float_regions_too(module: nn.Module) -> None:
    assert module(torch.randn(1, 2, 4, 4)).dtype == torch.float32


ACTIVATIONS = [
    (nn.ELU(0.7), nnq.ELU),
    (nn.LeakyReLU(0.2), nnq.LeakyReLU),
    (nn.Mish(), nnq.Mish),
    (nn.Softplus(0.7, 5.0), nnq.Softplus),
    (nn.Hardswish(), nnq.Hardswish),
    (nn.Hardsigmoid(), nnq.Hardsigmoid),
    (nn.Sigmoid(), nnq.Sigmoid),
    (nn.Tanh(), nnq.Tanh),
]


@pytest.mark.parametrize(("layer", "kind"), ACTIVATIONS, ids=lambda v: getattr(v, "__name__", ""))
def test_activations_are_the_float_function_rounded_once(layer: nn.Module, kind: type[nn.Module]) -> None:
    x = on_grid(64, 5)
    twin = quantized_twin(copy.deepcopy(layer), x.dequantize())
    assert type(twin) is kind
    y = twin(x)
    expected = zp.quantize_per_tensor(layer(x.dequantize().double()), y.q_scale(), y.q_zero_point(), y.dtype)
    assert torch.equal(y.int_repr(), expected.int_repr())


def test_prelu_follows_its_float_twin() -> None:
    layer = nn.PReLU(4)
    nn.init.uniform_(layer.weight, -0.5, 1.5)
    twin = assert_follows(layer, on_grid(3, 4, 5), steps=0.51)
    assert torch.equal(twin.state_dict()["weight"], layer.weight)
    with pytest.raises(ValueError, match="takes 4 slopes"):
        twin.set_weight(torch.ones(3))


def test_softmax_has_a_fixed_grid() -> None:
    twin = assert_follows(nn.Softmax(-1), on_grid(3, 9), steps=0.51)
    assert (twin.scale, twin.zero_point) == (1 / 256, 0)
    with pytest.raises(ValueError, match="needs a dim"):
        nnq.Softmax()(on_grid(3))


def test_activations_take_torch_aos_arguments() -> None:
    assert nnq.Sigmoid(output_scale=0.5, output_zero_point=1).scale == 0.5
    assert nnq.LeakyReLU(0.5, 1, negative_slope=0.3, inplace=True).negative_slope == 0.3
    assert nnq.ELU(0.5, 1, 2.0).alpha == 2.0
    assert nnq.Softplus(0.5, 1, 2.0).threshold == 20.0
    with pytest.raises(ValueError, match="a beta other than 0"):
        nnq.Softplus(0.5, 1, 0.0)
    with pytest.raises(TypeError, match="takes a quantized tensor"):
        nnq.Tanh(0.1, 0)(torch.zeros(1))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda c: c.MaxPool1d(3, 2, 1), (2, 3, 9)),
        (lambda c: c.MaxPool2d((2, 3), padding=(1, 1), ceil_mode=True), (2, 3, 9, 8)),
        (lambda c: c.MaxPool2d(2, dilation=2), (2, 3, 9, 8)),
        (lambda c: c.MaxPool3d(2), (2, 3, 4, 5, 6)),
    ],
)
def test_max_pools_pick_the_same_elements(make: Any, shape: tuple[int, ...]) -> None:
    x = on_grid(*shape)
    assert torch.equal(make(nnq)(x).dequantize(), make(nn)(x.dequantize()))


def test_max_pools_check_their_arguments() -> None:
    with pytest.raises(ValueError, match="return indices"):
        nnq.MaxPool2d(2, return_indices=True)
    with pytest.raises(ValueError, match="kernel_size must be"):
        nnq.MaxPool2d((2, 2, 2))


# --- batch norm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "shape"), [(1, (8, 4)), (1, (8, 4, 5)), (2, (8, 4, 5, 5)), (3, (8, 4, 3, 3, 3))])
def test_batch_norms_follow_their_float_twins(rank: int, shape: tuple[int, ...]) -> None:
    layer = getattr(nn, f"BatchNorm{rank}d")(4)
    with torch.no_grad():
        layer.weight.uniform_(-2, 2)
        layer.bias.uniform_(-1, 1)
        layer(torch.randn(shape) * 3 + 1)
    twin = assert_follows(layer, on_grid(*shape))
    assert set(twin.state_dict()) == {*layer.state_dict(), "scale", "zero_point"}
    other = type(twin)(4)
    other.load_state_dict(twin.state_dict())
    x = on_grid(*shape)
    assert torch.equal(other(x), twin(x))


def test_batch_norm_checks_the_rank_and_the_channels() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        nnq.BatchNorm2d(3)(on_grid(2, 3, 4))
    with pytest.raises(ValueError, match="takes 3 channels"):
        nnq.BatchNorm2d(3)(on_grid(2, 4, 4, 4))


def test_batch_norm_without_statistics_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="no running statistics"):
        quantized_twin(nn.BatchNorm2d(3, track_running_stats=False), torch.randn(4, 3, 2, 2))


# --- layer, group and instance norm -------------------------------------------------------------------------------

NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm((4, 5)), (3, 4, 5)),
    "LayerNorm plain": (lambda: nn.LayerNorm(5, elementwise_affine=False), (5,)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 9)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4), (3, 4, 5, 5)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4, affine=True), (3, 4, 3, 3, 3)),
}


@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint32], ids=["quint8", "qint32"])
@pytest.mark.parametrize("name", list(NORMS))
def test_norms_follow_their_float_twins_and_keep_the_dtype(name: str, dtype: zp.QDtype) -> None:
    make, shape = NORMS[name]
    layer = make()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -2, 2)
    x = zp.quantize_per_tensor(torch.randn(shape) * 2 + 1, 1 / 32, 100, dtype)
    twin = assert_follows(layer, x)
    assert twin(x).dtype == dtype
    assert {"scale", "zero_point"} <= {name for name, _ in twin.named_buffers()}
    state = twin.state_dict()
    other = copy.deepcopy(twin)
    other.scale = 5.0
    other.load_state_dict(state)
    assert torch.equal(other(x), twin(x))


def test_norms_need_batches() -> None:
    for module in (nnq.GroupNorm(1, 3, None, None, 1.0, 0), nnq.InstanceNorm1d(3, None, None, 1.0, 0)):
        with pytest.raises(ValueError, match="batched"):
            module(on_grid(2, 3))
    with pytest.raises(TypeError, match="takes a quantized tensor"):
        nnq.LayerNorm(3, None, None, 1.0, 0)(torch.zeros(3))
    with pytest.raises(ValueError, match="does not divide"):
        nnq.GroupNorm(2, 3, None, None, 1.0, 0)


# --- borders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [zp.quint8, zp.qint8, zp.qint32])
def test_quantize_then_dequantize_is_off_by_half_a_step(dtype: zp.QDtype) -> None:
    x = torch.rand(50)
    quantize = nnq.Quantize(torch.tensor([1 / 64]), torch.tensor([5]), dtype)
    y = quantize(x)
    assert y.dtype == dtype
    assert (nnq.DeQuantize()(y) - x).abs().max() <= 1 / 128
    other = nnq.Quantize(1.0, 0, dtype)
    other.load_state_dict({"scale": torch.tensor([1 / 64]), "zero_point": torch.tensor([5])})
    assert torch.equal(other(x), y)


def test_quantize_takes_floats_only() -> None:
    quantize = nnq.Quantize(0.1, 0, zp.quint8)
    with pytest.raises(TypeError, match="second QuantStub"):
        quantize(quantize(torch.rand(3)))
    with pytest.raises(TypeError, match="takes a float tensor"):
        quantize(torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantize_takes_every_float_dtype(dtype: torch.dtype) -> None:
    assert nnq.Quantize(0.5, 0, zp.quint8)(torch.ones(2, dtype=dtype)).int_repr().tolist() == [2, 2]


# --- arithmetic ---------------------------------------------------------------------------------------------------


class Arithmetic(nn.Module):
    def __init__(self, name: str, *extra: Any) -> None:
        super().__init__()
        self.name, self.extra = name, extra
        self.op = nnq.FloatFunctional()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.name == "cat":
            return self.op.cat([x, y], *self.extra)
        return getattr(self.op, self.name)(x, y)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "add_relu", "matmul", "cat"])
def test_arithmetic_follows_float(name: str) -> None:
    x = zp.quantize_per_tensor(torch.rand(4, 4) + 0.5, 1 / 64, 3, zp.quint8)
    y = zp.quantize_per_tensor(torch.rand(4, 4) + 0.5, 1 / 100, 90, zp.quint8)
    model = Arithmetic(name)
    model.qconfig = default_per_channel_qconfig
    prepared = prepare(model)
    expected = prepared(x.dequantize(), y.dequantize())
    twin = convert(prepared)
    assert type(twin.op) is nnq.QFunctional
    z = twin(x, y)
    assert z.q_scale() == twin.op.scale
    assert (z.dequantize() - expected).abs().max() <= 0.51 * z.q_scale()


@pytest.mark.parametrize("value", [0.5, -2.0, 3])
def test_arithmetic_with_a_number_needs_no_grid(value: float) -> None:
    x = zp.quantize_per_tensor(torch.rand(8), 1 / 64, 60, zp.quint8)
    op = nnq.QFunctional()
    assert (op.mul_scalar(x, value).dequantize() - x.dequantize() * value).abs().max() < 1e-6
    assert (op.add_scalar(x, value).dequantize() - (x.dequantize() + value)).abs().max() <= 4 * x.q_scale()


def test_cat_relu_clamps_at_real_zero() -> None:
    x = zp.quantize_per_tensor(torch.tensor([-1.0, 2.0]), 0.5, 20, zp.quint8)
    assert nnq.QFunctional(0.5, 3).cat_relu([x, x]).dequantize().tolist() == [0.0, 2.0, 0.0, 2.0]


def test_functional_modules_are_not_called_themselves() -> None:
    for module in (nnq.FloatFunctional(), nnq.QFunctional(), nnq.FXFloatFunctional()):
        with pytest.raises(RuntimeError, match="is not called itself"):
            module(torch.ones(1))


def test_graph_captured_arithmetic_is_not_observed() -> None:
    module = nnq.FXFloatFunctional()
    assert not hasattr(module, "activation_post_process")
    assert module.add(torch.ones(1), torch.ones(1)).item() == 2


def test_a_float_operand_names_the_cure() -> None:
    x = on_grid(3)
    with pytest.raises(TypeError, match="QuantStub"):
        nnq.QFunctional().add(x, torch.ones(3))


def test_functional_state_holds_the_grid() -> None:
    op = nnq.QFunctional(0.25, 7)
    other = nnq.QFunctional()
    other.load_state_dict(op.state_dict())
    assert (other.scale, other.zero_point) == (0.25, 7)
