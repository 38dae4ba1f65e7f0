"""What Linear and the convolutions share: weights, grids, state, copies, moves."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint import backends
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.quantized import dynamic as nnqd
from zeropoint.ao.quantization import convert, default_per_channel_qconfig, default_qconfig, prepare

MAKERS = {
    "linear": lambda **kw: nn.Linear(6, 4, **kw),
    "conv1d": lambda **kw: nn.Conv1d(6, 4, 3, padding=1, **kw),
    "conv2d": lambda **kw: nn.Conv2d(6, 4, 3, stride=2, groups=2, **kw),
    "conv3d": lambda **kw: nn.Conv3d(6, 4, 2, **kw),
}
INPUTS = {"linear": (5, 6), "conv1d": (2, 6, 7), "conv2d": (2, 6, 7, 8), "conv3d": (2, 6, 4, 5, 3)}


def quantized_twin(layer: nn.Module, x: Tensor, qconfig: Any = default_per_channel_qconfig) -> nn.Module:
    layer.qconfig = qconfig
    prepared = prepare(layer)
    with torch.no_grad():
        prepared(x)
    return convert(prepared)


def codes(x: Tensor) -> Tensor:
    return zp.quantize_per_tensor(x, 0.03, 120, zp.quint8)


@pytest.fixture(params=list(MAKERS))
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Tensor]:
    """Float layer, quantized twin, quantized input. The twin has met that input often enough to have bound its call."""
    layer, x = MAKERS[request.param](), torch.randn(*INPUTS[request.param])
    twin = quantized_twin(layer, x)
    for _ in range(3):
        twin(codes(x))
    return layer, twin, codes(x)


def fresh(twin: nn.Module) -> nn.Module:
    """A new module of the same sizes, as one makes before loading a state dict."""
    if isinstance(twin, nnq.Linear):
        return type(twin)(twin.in_features, twin.out_features)
    return type(twin)(
        twin.in_channels, twin.out_channels, twin.kernel_size, twin.stride, twin.padding, twin.dilation, twin.groups
    )


# --- weights ------------------------------------------------------------------------------------------------------


def test_weight_and_bias_read_as_tensors_and_may_be_called(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    layer, twin, _ = case
    assert isinstance(twin.weight, zp.QTensor)
    assert twin.weight.shape == layer.weight.shape
    assert twin.weight.qscheme() == zp.per_channel_affine
    assert torch.equal(twin.weight(), twin.weight)
    assert twin.weight().dtype == zp.qint8
    assert twin.bias.shape == layer.bias.shape
    assert torch.equal(twin.bias(), layer.bias)
    assert type(twin.bias() + 1) is Tensor
    step = twin.weight.q_per_channel_scales().reshape(-1, *[1] * (layer.weight.dim() - 1))
    assert ((twin.weight().dequantize() - layer.weight).abs() <= step / 2 * 1.0001).all()


def test_weight_dtype_answers_code_written_for_float_models() -> None:
    """T5 casts its activations to weight.dtype, unless that is torch.int8."""
    weight = nnq.Linear(2, 2).weight
    assert weight.dtype == torch.int8
    assert weight.dtype == zp.qint8
    assert (weight.dtype != torch.int8) is False
    assert weight.dtype != torch.float32
    assert hash(weight.dtype) == hash(zp.qint8)


@pytest.mark.parametrize("name", list(MAKERS))
def test_no_bias_reads_as_none(name: str) -> None:
    layer, x = MAKERS[name](bias=False), torch.randn(*INPUTS[name])
    twin = quantized_twin(layer, x)
    assert twin.bias is None
    assert "bias" not in twin.state_dict()
    assert twin(codes(x)).shape == layer(x).shape


@pytest.mark.parametrize("name", list(MAKERS))
def test_one_grid_for_all_output_channels(name: str) -> None:
    layer, x = MAKERS[name](), torch.randn(*INPUTS[name])
    twin = quantized_twin(layer, x, default_qconfig)
    assert twin.weight.qscheme() == zp.per_tensor_affine
    assert twin.weight.q_scale() > 0
    assert twin.state_dict()["weight_scale"].shape == ()
    assert (twin(codes(x)).dequantize() - layer(x)).abs().max() < 0.1


def test_a_single_output_channel_keeps_the_kind_of_its_grid() -> None:
    x = torch.randn(4, 8, 5, 5)
    per_channel = quantized_twin(nn.Conv2d(8, 1, 3), x)
    assert per_channel.weight.qscheme() == zp.per_channel_affine
    assert per_channel.state_dict()["weight_scale"].shape == (1,)
    per_tensor = quantized_twin(nn.Conv2d(8, 1, 3), x, default_qconfig)
    assert per_tensor.weight.q_scale() > 0
    for twin in (per_channel, per_tensor):
        other = fresh(twin)
        other.load_state_dict(twin.state_dict())
        assert torch.equal(other.weight, twin.weight)


def test_set_weight_bias_takes_effect_at_once(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    twin(x)
    weight = zp.quantize_per_tensor(torch.randn(twin.weight.shape), 0.03125, 3, zp.qint8)
    twin.set_weight_bias(weight, None)
    other = fresh(twin)
    other.set_weight_bias(weight, None)
    other.scale, other.zero_point = twin.scale, twin.zero_point
    assert twin.bias is None
    assert torch.equal(twin.weight(), weight)
    assert torch.equal(twin(x), other(x))


def test_writing_into_the_codes_takes_effect_at_once(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    """The packed weights cannot be stale."""
    _, twin, x = case
    twin(x)
    twin.state_dict()["weight"].zero_()
    twin.state_dict()["bias"].zero_()
    expected = torch.full_like(twin(x).int_repr(), twin.zero_point)
    assert torch.equal(twin(x).int_repr(), expected)


def test_set_weight_bias_checks_before_it_changes(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    before = twin(x)
    good = twin.weight()
    with pytest.raises(ValueError, match="takes a weight of shape"):
        twin.set_weight_bias(zp.quantize_per_tensor(torch.zeros(2, 2), 1.0, 0, zp.qint8), None)
    with pytest.raises(ValueError, match=r"takes a bias of shape \(4,\)"):
        twin.set_weight_bias(good, torch.zeros(3))
    with pytest.raises(TypeError, match="must be qint8"):
        twin.set_weight_bias(zp.quantize_per_tensor(torch.zeros(good.shape), 1.0, 0, zp.quint8), None)
    with pytest.raises(TypeError, match="must be a quantized tensor"):
        twin.set_weight_bias(torch.zeros(good.shape), None)
    assert torch.equal(twin(x), before)


def test_the_module_owns_its_weights() -> None:
    weight = zp.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, zp.qint8)
    twin = nnq.Linear(2, 2, bias_=False)
    twin.set_weight_bias(weight, None)
    weight.codes().zero_()
    assert torch.equal(twin.weight.int_repr(), torch.ones(2, 2, dtype=torch.int8))


# --- grids --------------------------------------------------------------------------------------------------------


def test_scale_and_zero_point_are_numbers_that_may_be_assigned(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    assert type(twin.scale) is float
    assert type(twin.zero_point) is int
    twin.scale, twin.zero_point = 0.1, 7
    assert (twin.scale, twin.zero_point) == (0.1, 7)
    assert (twin(x).q_scale(), twin(x).q_zero_point()) == (0.1, 7)
    with pytest.raises(ValueError, match="scale must be"):
        twin.scale = -1.0
    with pytest.raises(ValueError, match="zero_point must lie"):
        twin.zero_point = 256
    assert (twin.scale, twin.zero_point) == (0.1, 7)


def test_writing_into_the_grid_buffers_takes_effect_at_once(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    twin(x)
    twin.state_dict()["scale"].fill_(0.25)
    assert twin(x).q_scale() == 0.25
    twin._buffers["zero_point"] = torch.tensor(9, dtype=torch.uint8)  # as loaders that bypass the module do
    assert twin(x).q_zero_point() == 9


def test_the_input_brings_its_own_grid(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    layer, twin, _ = case
    x = torch.randn(2, *[6] * (layer.weight.dim() - 1)) if layer.weight.dim() > 2 else torch.randn(3, 6)
    twin.scale = 4 * twin.scale
    for scale, zero_point, dtype in ((0.03, 120, zp.quint8), (0.05, -10, zp.qint8)):
        q = zp.quantize_per_tensor(x, scale, zero_point, dtype)
        assert (twin(q).dequantize() - layer(q.dequantize())).abs().max() < twin.scale


def test_inputs_that_make_no_sense_are_named(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    with pytest.raises(TypeError, match=r"takes a quantized tensor, got a torch\.float32 tensor"):
        twin(x.dequantize())
    n = x.shape[1]
    per_channel = zp.quantize_per_channel(
        x.dequantize(), torch.ones(n), torch.zeros(n, dtype=torch.int64), 1, zp.quint8
    )
    with pytest.raises(RuntimeError, match="one grid per tensor"):
        twin(per_channel)
    with pytest.raises(RuntimeError):
        twin(zp.quantize_per_tensor(torch.zeros(1, 3, *x.shape[2:]), 1.0, 0, zp.quint8))


def test_a_zero_batch_gives_a_zero_batch(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    y = twin(x[:0])
    assert y.shape == (0, *twin(x).shape[1:])


# --- state --------------------------------------------------------------------------------------------------------


def test_state_is_flat_plain_tensors(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, _ = case
    state = twin.state_dict()
    assert set(state) == {"weight", "weight_scale", "weight_zero_point", "bias", "scale", "zero_point"}
    assert all(type(value) is Tensor for value in state.values())
    assert state["weight"].dtype == torch.int8
    assert state["weight_scale"].dtype == torch.float32
    assert state["weight_zero_point"].dtype == torch.int32


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_loads_into_a_new_module_with_the_restricted_reader(
    case: tuple[nn.Module, nn.Module, Tensor], assign: bool
) -> None:
    _, twin, x = case
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = fresh(twin)
    other(x)  # packs the weights that are about to be replaced
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(x), twin(x))
    assert other.output_dtype == twin.output_dtype


def test_state_loads_without_metadata_and_not_strictly(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    state = dict(twin.state_dict())
    other = fresh(twin)
    other.load_state_dict(state)
    assert torch.equal(other(x), twin(x))
    missing, unexpected = other.load_state_dict({"weight": state["weight"], "more": state["bias"]}, strict=False)
    assert set(missing) == {"weight_scale", "weight_zero_point", "bias", "scale", "zero_point"}
    assert unexpected == ["more"]


def test_state_of_other_sizes_is_an_error_that_changes_nothing_else(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    before = twin(x)
    state = dict(twin.state_dict())
    state["weight"] = state["weight"][:2]
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        twin.load_state_dict(state)
    assert torch.equal(twin(x), before)


def test_a_module_made_on_the_meta_device_loads(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    with torch.device("meta"):
        other = fresh(twin)
    other.load_state_dict(twin.state_dict(), assign=True)
    assert torch.equal(other(x), twin(x))


def test_tied_modules_stay_tied() -> None:
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1] = model[0]
    model.qconfig = default_qconfig
    prepared = prepare(model)
    prepared(x)
    twin = convert(prepared)
    assert twin[0] is twin[1]
    other = copy.deepcopy(twin)
    other.load_state_dict(twin.state_dict())
    assert other[0] is other[1]


# --- copies and moves ---------------------------------------------------------------------------------------------


def test_copies_compute_the_same_on_their_own(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    before = twin(x)
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert torch.equal(other(x), before)
        other.state_dict()["weight"].zero_()
        assert torch.equal(twin(x), before)


def test_a_saved_module_holds_no_packed_weights(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    twin(x)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other(x), twin(x))
    assert twin.__getstate__()["_buffers"]["_packed"] is None
    assert "_packed" not in twin.state_dict()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casting_the_model_keeps_grids_and_bias(case: tuple[nn.Module, nn.Module, Tensor], dtype: torch.dtype) -> None:
    _, twin, x = case
    before, state = twin(x), {k: v.clone() for k, v in twin.state_dict().items()}
    twin.to(dtype)
    assert all(torch.equal(v, state[k]) and v.dtype == state[k].dtype for k, v in twin.state_dict().items())
    assert torch.equal(twin(x), before)


def test_a_module_moves_to_the_meta_device_and_is_filled_again(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    expected, state = twin(x), copy.deepcopy(twin.state_dict())
    other = copy.deepcopy(twin).to("meta").to_empty(device="cpu")
    other.load_state_dict(state)
    assert torch.equal(other(x), expected)


def test_modules_work_under_inference_mode(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    with torch.inference_mode():
        other = fresh(twin)
        other.load_state_dict(twin.state_dict(), assign=True)
        copied = copy.deepcopy(twin)
        assert torch.equal(copied(x), twin(x))
        assert torch.equal(other(x), twin(x))


def test_loading_reaches_a_compiled_module(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    torch._dynamo.reset()
    scale, zero_point = x.q_scale(), x.q_zero_point()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.inner = nnq.Quantize(scale, zero_point, zp.quint8), twin

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.quant(x)).dequantize()

    model, values = Around(), x.dequantize()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(values), model(values))
    other = fresh(twin)
    other.set_weight_bias(zp.quantize_per_tensor(torch.randn(twin.weight.shape), 0.02, 0, zp.qint8), torch.ones(4))
    other.scale, other.zero_point = 0.07, 30
    twin.load_state_dict(other.state_dict())
    assert torch.equal(compiled(values), other(x).dequantize())
    twin.scale = 0.5
    assert torch.equal(compiled(values), model(values))


# --- bound calls --------------------------------------------------------------------------------------------------


def in_full(twin: nn.Module, x: Tensor) -> Tensor:
    """What the module gives when it hands over all arguments, as it does the first time that it meets a grid."""
    twin._met, twin._bound = (), {}
    return twin(x)


def assert_follows(twin: nn.Module, x: Tensor) -> None:
    """What is bound gives what a call in full gives, and it is not the code of zero everywhere."""
    seen = [twin(x) for _ in range(3)]
    if backends.is_native():
        assert (x.codes().dtype, x.scale, x.zero_point) in twin._bound
    expected = in_full(twin, x)
    assert expected.int_repr().unique().numel() > 1
    for y in seen:
        assert torch.equal(y, expected)


def test_a_bound_call_gives_what_a_call_in_full_gives(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    assert_follows(twin, x)
    values = x.dequantize()
    for _ in range(3):  # more grids than are kept, each of them met again
        for i in range(twin.MOST_BOUND + 3):
            q = zp.quantize_per_tensor(values, 0.02 + 0.01 * i, i - 5, zp.qint8)
            assert_follows(twin, q)
            assert len(twin._bound) <= twin.MOST_BOUND


def test_grids_that_are_met_in_turn_are_bound(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    twin.scale = twin.scale  # nothing is bound
    grids = [(0.03, 120, zp.quint8), (0.05, -10, zp.qint8), (0.05, -11, zp.qint8)]
    inputs = [zp.quantize_per_tensor(x.dequantize(), *grid) for grid in grids]
    expected = [in_full(twin, q) for q in inputs]
    for _ in range(3):
        for q, y in zip(inputs, expected, strict=True):
            assert torch.equal(twin(q), y)
    if backends.is_native():
        assert len(twin._bound) == len(grids)


def test_a_grid_that_is_met_once_is_not_bound(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    before = dict(twin._bound)
    for i in range(5):
        twin(zp.quantize_per_tensor(x.dequantize(), 0.1 + 0.01 * i, 7, zp.quint8))
    assert twin._bound == before


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_zero_point", "bias", "scale", "zero_point"])
def test_a_bound_call_follows_every_buffer(case: tuple[nn.Module, nn.Module, Tensor], name: str) -> None:
    _, twin, x = case
    before, buffer = twin(x), twin._buffers[name]
    step = buffer / 2 if name.endswith("scale") else torch.full_like(buffer, 4 * twin.scale if name == "bias" else 2)
    buffer.add_(step)  # written to
    written = twin(x)
    assert_follows(twin, x)
    assert not torch.equal(written, before)
    twin._buffers[name] = buffer + step  # replaced
    replaced = twin(x)
    assert_follows(twin, x)
    assert not torch.equal(replaced, written)
    twin._buffers["bias"] = None
    assert_follows(twin, x)


def test_a_bound_convolution_follows_its_attributes() -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 9, 9)
    twin, q = quantized_twin(layer, x), codes(x)
    assert_follows(twin, q)
    twin.stride = (2, 2)
    assert twin(q).shape == (1, 4, 4, 4)
    assert_follows(twin, q)


def test_a_bound_call_in_many_threads_while_the_weights_change() -> None:
    layer, x = nn.Linear(64, 48), torch.randn(4, 64)
    twin, q = quantized_twin(layer, x), codes(x)
    weights = [zp.quantize_per_tensor(torch.randn(48, 64), 0.02, 0, zp.qint8) for _ in range(2)]
    wanted = []
    for weight in weights:
        twin.set_weight_bias(weight, None)
        wanted.append(in_full(twin, q))

    def call(_: int) -> bool:
        y = twin(q)
        return any(torch.equal(y, want) for want in wanted)

    with ThreadPoolExecutor(8) as pool:
        results = []
        for i in range(50):
            results += [pool.submit(call, i) for _ in range(16)]
            twin._buffers["weight"] = weights[i % 2].int_repr()
        assert all(result.result() for result in results)
    assert torch.equal(twin(q), wanted[1])


@pytest.mark.skipif(not backends.is_native(), reason="only native calls are bound")
@pytest.mark.parametrize("change", ["bias", "scale", "stride"])
def test_what_another_thread_changes_while_a_call_is_bound_is_followed(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 9, 9)
    twin = quantized_twin(layer, x)
    first, second = (zp.quantize_per_tensor(x, 0.03, zero, zp.quint8) for zero in (120, 90))
    for q in (first, first, second):
        twin(q)
    assert len(twin._bound) == 1
    bind = type(twin)._bind

    def bind_late(self: Any, *args: Any) -> Tensor:
        """What is bound is made, and then another thread is faster."""
        arguments = bind(self, *args)
        if change == "bias":
            self._buffers["bias"].add_(1.0)
        elif change == "scale":
            self.scale = 2 * self.scale
        else:
            self.stride = (2, 2)
        return arguments

    with monkeypatch.context() as patch:
        patch.setattr(type(twin), "_bind", bind_late)
        twin(second)
    for q in (first, second):
        seen = twin(q)
        assert torch.equal(seen, in_full(twin, q))


def test_a_grid_that_the_output_cannot_have_is_named_once_in_every_call(
    case: tuple[nn.Module, nn.Module, Tensor],
) -> None:
    _, twin, x = case
    twin._init_grid(0.1, 300)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^quantized \w+ has zero_point 300, which is no code of"):
            twin(x)


def test_an_input_on_another_device_is_no_bound_call(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    shape = twin(x).shape
    elsewhere = zp.QTensor.from_codes(x.codes().to("meta"), x.scale, x.zero_point)
    y = twin(elsewhere)
    assert (y.shape, y.device.type) == (shape, "meta")


def test_parameters_load_by_assignment(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case
    state = {name: nn.Parameter(value, requires_grad=False) for name, value in twin.state_dict().items()}
    other = fresh(twin)
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(x), twin(x))
    assert not list(other.parameters())


def test_a_traced_module_calls_the_operator_that_every_backend_has(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    _, twin, x = case

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.inner = nnq.Quantize(x.scale, x.zero_point, zp.quint8), twin

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.quant(x)).dequantize()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated
        traced = torch.jit.trace(Around(), x.dequantize())
    assert "_bound" not in str(traced.inlined_graph)
    assert torch.equal(traced(x.dequantize()), twin(x).dequantize())


# --- printing -----------------------------------------------------------------------------------------------------


def test_repr_reads_as_in_torch() -> None:
    assert repr(nnq.Linear(3, 4)) == (
        "QuantizedLinear(in_features=3, out_features=4, scale=1.0, zero_point=0, qscheme=zeropoint.per_tensor_affine)"
    )
    assert repr(nnq.Conv2d(2, 4, 3, padding=1, groups=2, bias=False)) == (
        "QuantizedConv2d(2, 4, kernel_size=(3, 3), stride=(1, 1), scale=1.0, zero_point=0, padding=(1, 1), groups=2, "
        "bias=False)"
    )
    assert repr(nnqd.Linear(3, 4)).startswith("DynamicQuantizedLinear(in_features=3, out_features=4")
    assert repr(nni.quantized.ConvReLU2d(1, 1, 1)).startswith("QuantizedConvReLU2d(")


@pytest.mark.parametrize("kind", [nnq.Linear, nnqd.Linear])
def test_weights_are_qint8(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="takes qint8 weights"):
        kind(2, 2, dtype=zp.quint8)


def test_from_float_names_the_class_it_takes() -> None:
    with pytest.raises(TypeError, match=r"Linear.from_float takes torch.nn.*Linear, got Conv1d"):
        nnq.Linear.from_float(nn.Conv1d(1, 1, 1))


# --- torch.ao's layouts -------------------------------------------------------------------------------------------


def test_a_packed_pair_loads(case: tuple[nn.Module, nn.Module, Tensor]) -> None:
    """The layout of torch.ao's Linear: a (weight, bias) pair; with this package's tensors in it."""
    _, twin, x = case
    state = {
        "scale": torch.tensor(twin.scale),
        "zero_point": torch.tensor(twin.zero_point),
        "_packed_params.dtype": torch.qint8 if hasattr(torch, "qint8") else None,
        "_packed_params._packed_params": (twin.weight(), twin.bias()),
    }
    other = fresh(twin)
    other.load_state_dict(state)
    assert torch.equal(other.weight, twin.weight)
    assert (other(x).int_repr().int() - twin(x).int_repr().int()).abs().max() <= 1
    state["_packed_params._packed_params"] = (twin.weight(), None)
    other.load_state_dict(state)
    assert other.bias is None
