"""QTensor: what is defined on it does what it says, and nothing else runs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint import QTensor
from zeropoint.tensor import same_grid


def per_tensor(*shape: int) -> QTensor:
    return zp.quantize_per_tensor(torch.randn(*shape), 0.05, 3, zp.quint8)


def per_channel(*shape: int, axis: int = 0) -> QTensor:
    channels = shape[axis]
    return zp.quantize_per_channel(
        torch.randn(*shape), torch.rand(channels) * 0.1 + 0.01, torch.arange(channels) - 1, axis, zp.qint8
    )


def float_zero(*shape: int) -> QTensor:
    return zp.quantize_per_channel(torch.randn(*shape), torch.rand(shape[0]) + 0.01, torch.rand(shape[0]), 0, zp.quint8)


ALL_GRIDS = pytest.mark.parametrize("make", [per_tensor, per_channel, float_zero], ids=lambda f: f.__name__)

# --- shape operations -----------------------------------------------------------------------------------------------

MOVES: dict[str, Callable[[Any], Any]] = {
    "view": lambda t: t.view(2, 12, 5),
    "reshape": lambda t: t.reshape(-1, 5),
    "flatten": lambda t: torch.flatten(t, 1),
    "unflatten": lambda t: t.unflatten(1, (3, 1)),
    "permute": lambda t: t.permute(0, 2, 3, 1),
    "transpose": lambda t: t.transpose(1, 3),
    "movedim": lambda t: torch.movedim(t, 0, 2),
    "squeeze": lambda t: t[:1].squeeze(0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand": lambda t: t[:1].expand(6, -1, -1, -1),
    "index": lambda t: t[1],
    "slice": lambda t: t[:, :, 1:3],
    "ellipsis": lambda t: t[..., ::2],
    "mask": lambda t: t[torch.tensor([True, False])],
    "index_select": lambda t: torch.index_select(t, 2, torch.tensor([3, 0])),
    "narrow": lambda t: t.narrow(3, 1, 2),
    "repeat": lambda t: t.repeat(1, 2, 1, 1),
    "flip": lambda t: t.flip(2),
    "roll": lambda t: torch.roll(t, 1, 3),
    "contiguous": lambda t: t.transpose(0, 1).contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "pixel_shuffle": lambda t: torch.pixel_shuffle(t.permute(0, 2, 1, 3), 2),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_shape_operations_move_codes_and_keep_the_grid(move: Callable[[Any], Any]) -> None:
    q = per_tensor(2, 3, 4, 5)
    moved = move(q)
    assert isinstance(moved, QTensor)
    assert same_grid(moved, q)
    expected = move(q.int_repr())
    assert torch.equal(moved.int_repr(), expected)
    assert moved.stride() == expected.stride()


def test_split_chunk_and_unbind_give_quantized_parts() -> None:
    q = per_tensor(4, 6)
    for parts in (q.split(2), torch.chunk(q, 2, 1), q.unbind(0), torch.tensor_split(q, 3, 1)):
        assert isinstance(parts, tuple)
        assert all(same_grid(part, q) for part in parts)
    assert torch.equal(torch.cat(q.split(2)), q)
    assert torch.equal(torch.stack(list(q)), q)


@pytest.mark.parametrize(
    ("move", "axis"),
    [
        (lambda t: t.permute(1, 2, 3, 0), 3),
        (lambda t: t.transpose(0, 1), 1),
        (lambda t: t.unsqueeze(0), 1),
        (lambda t: t[:, 0], 0),
        (lambda t: t[1:], 0),
        (lambda t: t.flip(0), 0),
        (lambda t: t.flatten(1), 0),
        (lambda t: t[torch.tensor([2, 0])], 0),
        (lambda t: t.reshape(4, -1, 5), 0),
    ],
)
def test_a_per_channel_grid_moves_along(move: Callable[[Any], Any], axis: int) -> None:
    q = per_channel(4, 3, 4, 5)
    moved = move(q)
    assert moved.q_per_channel_axis() == axis
    assert torch.equal(moved.dequantize(), move(q.dequantize()))


def test_mixing_channels_is_refused() -> None:
    with pytest.raises(TypeError, match="mix the channels of axis 0"):
        per_channel(4, 3, 2, 2).flatten()


def test_one_channel_keeps_its_per_channel_grid() -> None:
    q = per_channel(1, 3, 2, 2)
    assert q.transpose(0, 1).q_per_channel_scales().shape == (1,)


# --- what is not defined ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (torch.sin, "sin"),
        (torch.sum, "sum"),
        (torch.matmul, "matmul"),
        (nn.functional.linear, "linear"),
        (lambda q, *_: q + 1, "__add__"),
        (lambda q, *_: 1 - q, "__rsub__"),
        (lambda q, *_: q == q, "__eq__"),
        (lambda q, *_: q < 3, "__lt__"),
        (lambda q, *_: -q, "__neg__"),
        (lambda q, *_: q.float(), "float"),
        (lambda q, *_: q.numpy(), "numpy"),
        (lambda q, *_: q.tolist(), "tolist"),
        (lambda q, *_: q.item(), "item"),
        (lambda q, *_: q.data, "data"),
        (lambda q, *_: torch.einsum("ij->ji", q), "einsum"),
        (lambda q, *_: q.add_(1), "add_"),
        (lambda q, *_: torch.ones(3, 3) @ q, "matmul"),
        (lambda q, *_: q.to(torch.int8), "int8"),
        (lambda q, *_: nn.Linear(3, 3)(q), "linear"),
    ],
)
def test_everything_else_raises_and_names_the_operation(compute: Callable[..., Any], name: str) -> None:
    q = per_tensor(3, 3)
    arguments = (q, q) if compute in (torch.matmul, nn.functional.linear) else (q,)
    with pytest.raises(TypeError, match=name):
        compute(*arguments)


def test_in_place_add_names_float_functional() -> None:
    q = per_tensor(3)
    with pytest.raises(TypeError, match=r"FloatFunctional\(\)\.add"):
        q += per_tensor(3)


# --- accessors ------------------------------------------------------------------------------------------------------


def test_accessors_of_a_per_tensor_grid() -> None:
    q = zp.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.1, 5, zp.qint8)
    assert (q.q_scale(), q.q_zero_point(), q.qscheme(), q.dtype) == (0.1, 5, 0, zp.qint8)
    assert zp.is_quantized(q)
    assert q.is_quantized
    assert q.int_repr().tolist() == [5, 15]
    assert not zp.is_quantized(q.int_repr())
    assert (torch.q_scale(q), torch.q_zero_point(q)) == (0.1, 5)
    assert torch.equal(torch.int_repr(q), q.int_repr())
    with pytest.raises(RuntimeError, match="per-channel"):
        q.q_per_channel_scales()


def test_accessors_of_a_per_channel_grid() -> None:
    q = per_channel(4, 2)
    assert q.q_per_channel_scales().dtype == torch.float64
    assert q.q_per_channel_zero_points().dtype == torch.int64
    assert (q.q_per_channel_axis(), q.qscheme()) == (0, 1)
    assert float_zero(3, 2).qscheme() == zp.per_channel_affine_float_qparams
    with pytest.raises(RuntimeError, match="per-tensor"):
        q.q_scale()


def test_int_repr_is_a_copy_and_codes_share_storage() -> None:
    q = per_tensor(4)
    q.int_repr().fill_(0)
    before = q.int_repr()
    q.codes()[0] = 77
    assert q.int_repr()[0] == 77
    assert torch.equal(q.int_repr()[1:], before[1:])


@pytest.mark.parametrize("accessor", ["int_repr", "q_scale", "q_zero_point", "q_per_channel_axis", "qscheme"])
def test_accessors_refuse_plain_tensors(accessor: str) -> None:
    with pytest.raises(TypeError, match=f"{accessor} takes a quantized tensor"):
        getattr(zp, accessor)(torch.ones(2))


def test_from_codes_checks_the_grid() -> None:
    codes = torch.zeros(2, 3, dtype=torch.int8)
    assert QTensor.from_codes(codes, 0.5, 1).dequantize().tolist() == [[-0.5] * 3] * 2
    with pytest.raises(ValueError, match="scale"):
        QTensor.from_codes(codes, -1.0)
    with pytest.raises(ValueError, match="zero_point"):
        QTensor.from_codes(codes, 1.0, 300)
    with pytest.raises(ValueError, match="axis 5"):
        QTensor.from_codes(codes, torch.ones(2), torch.zeros(2), axis=5)
    with pytest.raises(ValueError, match="shape"):
        QTensor.from_codes(codes, torch.ones(2), torch.zeros(2), axis=1)
    with pytest.raises(TypeError, match="quantized dtype"):
        QTensor.from_codes(torch.zeros(2), 1.0)
    with pytest.raises(TypeError, match="from_codes"):
        QTensor(torch.zeros(2))


# --- copies, files, modules ---------------------------------------------------------------------------------------


@ALL_GRIDS
def test_copies_and_pickles_are_equal(make: Callable[..., QTensor]) -> None:
    q = make(4, 3)
    for twin in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.clone(), q.detach(), q.to("cpu")):
        assert torch.equal(twin, q)
    twin = copy.deepcopy(q)
    twin.codes().zero_()
    assert not torch.equal(twin, q)


def load_back(saved: Any, *, zip_format: bool) -> Any:
    buffer = io.BytesIO()
    torch.save(saved, buffer, _use_new_zipfile_serialization=zip_format)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
@ALL_GRIDS
def test_files_load_with_the_restricted_reader(make: Callable[..., QTensor], zip_format: bool) -> None:
    q = make(4, 3).transpose(0, 1)
    back = load_back(q, zip_format=zip_format)
    assert torch.equal(back, q)
    assert back.stride() == q.stride()


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_views_of_one_storage_still_share_it_after_loading(zip_format: bool) -> None:
    q = per_tensor(6, 3)
    whole, part = load_back([q, q[2:4]], zip_format=zip_format)
    part.codes().fill_(9)
    assert whole.int_repr()[2:4].unique().tolist() == [9]
    assert part.storage_offset() == 6


def test_a_module_holds_moves_and_loads_quantized_buffers() -> None:
    module = nn.Module()
    module.register_buffer("q", per_tensor(3))
    wanted = per_tensor(3)
    module.to("cpu").half().eval()
    assert module.q.dtype == zp.quint8
    other = nn.Module()
    other.register_buffer("q", zp.quantize_per_tensor(torch.ones(3), 0.7, 9, zp.quint8))
    module.q.copy_(wanted)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.q, wanted)
    assert torch.equal(copy.deepcopy(other).q, wanted)


def test_copy_refuses_mixed_kinds() -> None:
    with pytest.raises(TypeError, match="quantize the source first"):
        per_tensor(3).copy_(torch.ones(3))
    with pytest.raises(TypeError, match="dequantize"):
        torch.ones(3).copy_(per_tensor(3))


def test_writing_a_slice() -> None:
    q = per_tensor(4, 2)
    q[0] = q[1]
    assert torch.equal(q[0], q[1])
    with pytest.raises(ValueError, match="same per-tensor grid"):
        q[0] = zp.quantize_per_tensor(torch.ones(2), 0.9, 0, zp.quint8)
    with pytest.raises(TypeError, match="quantize the value"):
        q[0] = 1.0


def test_joining_needs_one_grid() -> None:
    a = per_tensor(2, 2)
    assert torch.equal(torch.cat([a, a])[:2], a)
    with pytest.raises(ValueError, match=r"FloatFunctional\(\)\.cat"):
        torch.cat([a, zp.quantize_per_tensor(torch.ones(2, 2), 0.9, 0, zp.quint8)])
    with pytest.raises(TypeError, match="plain"):
        torch.cat([a, torch.ones(2, 2)])


@ALL_GRIDS
def test_repr_shows_values_and_grid(make: Callable[..., QTensor]) -> None:
    text = repr(make(2, 2))
    assert text.startswith("QTensor(")
    assert "scale=" in text
    assert f"{make(2, 2)}".startswith("QTensor(")


def test_multiprocessing_hands_over_a_quantized_tensor() -> None:
    context = torch.multiprocessing.get_context("spawn")
    q = per_tensor(5)
    with context.Pool(1) as pool:
        assert pool.apply(_mean_of_codes, (q,)) == q.int_repr().float().mean().item()


def _mean_of_codes(q: QTensor) -> float:
    return q.int_repr().float().mean().item()


# --- tracing --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = zp.quantize_per_tensor(x, 0.05, 3, zp.quint8)
        return torch.relu(q.transpose(0, 1)).flatten(1).dequantize()


def test_quantized_tensors_compile_and_export_with_the_same_integers() -> None:
    net, x = Net(), torch.randn(3, 4, 2)
    expected = net(x)
    assert torch.equal(torch.compile(net, fullgraph=True, backend="aot_eager")(x), expected)
    assert torch.equal(torch.export.export(net, (x,)).module()(x), expected)


def test_a_quantized_tensor_may_enter_a_compiled_function() -> None:
    def function(q: QTensor) -> torch.Tensor:
        return torch.relu(q).dequantize()

    q = per_tensor(3, 4)
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(q), function(q))
