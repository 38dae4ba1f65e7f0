"""The same codes as torch's own quantized tensors, while torch has them, where its rounding of ties does not differ."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zeropoint as zp
from zeropoint.ops import activation, arithmetic, norm

pytestmark = pytest.mark.skipif(
    not all(hasattr(torch, name) for name in ("quantize_per_tensor", "qint8", "quint8", "qint32")),
    reason="this torch has no quantized tensors of its own",
)

PAIRS = [(zp.qint8, "qint8"), (zp.quint8, "quint8")]
both_bytes = pytest.mark.parametrize(("ours", "name"), PAIRS, ids=["qint8", "quint8"])


@pytest.fixture(autouse=True)
def _no_deprecations() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def off_ties(shape: tuple[int, ...], scale: float) -> Tensor:
    """Values at least a hundredth of a step from every tie, where torch rounds after adding the zero point."""
    steps = torch.randint(-150, 150, shape) + (torch.rand(shape) - 0.5) * 0.98
    return (steps * scale).float()


def pair(ours: zp.QDtype, name: str, shape: tuple[int, ...], scale: float, zero_point: int) -> tuple[zp.QTensor, Any]:
    x = off_ties(shape, scale)
    return (
        zp.quantize_per_tensor(x, scale, zero_point, ours),
        torch.quantize_per_tensor(x, scale, zero_point, getattr(torch, name)),
    )


def within_one_code(ours: zp.QTensor, theirs: Any, share: float = 0.01) -> bool:
    """Equal but for a few neighbours: torch folds zero points and scales in float32, so near-ties may differ."""
    difference = (ours.int_repr().int() - theirs.int_repr().int()).abs()
    same_grid = ours.q_scale() == pytest.approx(theirs.q_scale()) and ours.q_zero_point() == theirs.q_zero_point()
    return bool(same_grid and difference.max() <= 1 and (difference > 0).float().mean() <= share)


class TestQuantize:
    @pytest.mark.parametrize(("ours", "name"), [*PAIRS, (zp.qint32, "qint32")], ids=["qint8", "quint8", "qint32"])
    @pytest.mark.parametrize(("scale", "zero_point"), [(1.0, 0), (0.1, 3), (0.037, 100), (2.5, 64)])
    def test_per_tensor(self, ours: zp.QDtype, name: str, scale: float, zero_point: int) -> None:
        q, theirs = pair(ours, name, (7, 131), scale, zero_point)
        assert torch.equal(q.int_repr(), theirs.int_repr())
        assert torch.equal(q.dequantize(), theirs.dequantize())

    @both_bytes
    @pytest.mark.parametrize("axis", [0, 1, 3])
    def test_per_channel(self, ours: zp.QDtype, name: str, axis: int) -> None:
        x = off_ties((4, 6, 5, 7), 1.0)
        scales = 2.0 ** torch.arange(x.shape[axis]).double()  # powers of two keep values off the ties
        zeros = torch.arange(x.shape[axis]) * 2
        layouts = [torch.contiguous_format] + [torch.channels_last] * (axis < 2)  # torch knows no other axes there
        for layout in layouts:
            steps = x * scales.float().reshape([-1 if d == axis else 1 for d in range(4)])
            steps = steps.to(memory_format=layout)
            q = zp.quantize_per_channel(steps, scales, zeros, axis, ours)
            theirs = torch.quantize_per_channel(steps, scales, zeros, axis, getattr(torch, name))
            assert torch.equal(q.int_repr(), theirs.int_repr())
            assert torch.equal(q.dequantize(), theirs.dequantize())

    @both_bytes
    def test_floating_zero_points(self, ours: zp.QDtype, name: str) -> None:
        x, scales, zeros = torch.randn(5, 40), torch.rand(5) / 20 + 0.01, torch.randn(5) * 5
        q = zp.quantize_per_channel(x, scales, zeros, 0, ours)
        theirs = torch.quantize_per_channel(x, scales, zeros, 0, getattr(torch, name))
        assert (q.int_repr().int() - theirs.int_repr().int()).abs().max() <= 1
        codes_agree = q.int_repr() == theirs.int_repr()
        torch.testing.assert_close(q.dequantize()[codes_agree], theirs.dequantize()[codes_agree])

    @both_bytes
    @pytest.mark.parametrize("reduce_range", [False, True])
    def test_dynamic(self, ours: zp.QDtype, name: str, reduce_range: bool) -> None:
        for x in (torch.randn(500), torch.randn(500).abs(), -torch.rand(500), torch.zeros(3), torch.rand(90) * 1e-6):
            q = zp.quantize_per_tensor_dynamic(x, ours, reduce_range)
            theirs = torch.quantize_per_tensor_dynamic(x, getattr(torch, name), reduce_range)
            assert within_one_code(q, theirs)


class TestArithmetic:
    @both_bytes
    def test_add_and_mul(self, ours: zp.QDtype, name: str) -> None:
        a, ta = pair(ours, name, (4, 6, 9, 9), 0.0513, 60)
        b, tb = pair(ours, name, (4, 6, 9, 9), 0.0317, 20)
        ops = torch.ops.quantized
        for function, theirs in (
            (lambda relu: arithmetic.add(a, b, 0.1, 50, relu), {False: ops.add, True: ops.add_relu}),
            (lambda relu: arithmetic.mul(a, b, 0.3, 50, relu), {False: ops.mul, True: ops.mul_relu}),
        ):
            for relu, op in theirs.items():
                assert within_one_code(function(relu), op(ta, tb, 0.1 if op in (ops.add, ops.add_relu) else 0.3, 50))

    @both_bytes
    @pytest.mark.parametrize("value", [0.0, 0.5, -0.7, 3.0, 40.0, -40.0])
    def test_scalars(self, ours: zp.QDtype, name: str, value: float) -> None:
        q, theirs = pair(ours, name, (300,), 0.0513, 60)
        assert within_one_code(arithmetic.add_scalar(q, value), torch.ops.quantized.add_scalar(theirs, value))
        assert within_one_code(arithmetic.mul_scalar(q, value), torch.ops.quantized.mul_scalar(theirs, value))

    @both_bytes
    def test_cat(self, ours: zp.QDtype, name: str) -> None:
        a, ta = pair(ours, name, (3, 40), 0.0513, 60)
        b, tb = pair(ours, name, (3, 50), 0.0317, 20)
        assert within_one_code(arithmetic.cat([a, b], 1, 0.1, 50), torch.ops.quantized.cat([ta, tb], 1, 0.1, 50))


class TestOneInput:
    @both_bytes
    @pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.hardsigmoid, F.gelu, F.leaky_relu])
    def test_torch_functions(self, ours: zp.QDtype, name: str, function: Any) -> None:
        q, theirs = pair(ours, name, (2000,), 0.0317, 70)
        assert within_one_code(function(q), function(theirs))

    @both_bytes
    def test_given_grids(self, ours: zp.QDtype, name: str) -> None:
        q, theirs = pair(ours, name, (2000,), 0.0317, 70)
        ops = torch.ops.quantized
        assert within_one_code(activation.hardswish(q, 0.02, 9), ops.hardswish(theirs, 0.02, 9))
        assert within_one_code(activation.leaky_relu(q, 0.02, 9, 0.2), ops.leaky_relu(theirs, 0.2, False, 0.02, 9))
        assert within_one_code(activation.elu(q, 0.02, 9, 0.7), ops.elu(theirs, 0.02, 9, 0.7))
        assert within_one_code(activation.sigmoid(q, 0.01, 9), ops.sigmoid(theirs, 0.01, 9))


class TestNorm:
    @both_bytes
    def test_batch_norm(self, ours: zp.QDtype, name: str) -> None:
        q, theirs = pair(ours, name, (3, 8, 6, 7), 0.05, 60)
        w, b, mean, var = torch.randn(8), torch.randn(8), torch.randn(8), torch.rand(8) + 0.5
        out = norm.batch_norm(q, w, b, mean, var, 1e-5, 0.1, 50)
        assert within_one_code(out, torch.ops.quantized.batch_norm2d(theirs, w, b, mean, var, 1e-5, 0.1, 50))

    @both_bytes
    def test_input_statistics(self, ours: zp.QDtype, name: str) -> None:
        q, theirs = pair(ours, name, (3, 8, 6, 7), 0.05, 60)
        w, b = torch.randn(8), torch.randn(8)
        ops = torch.ops.quantized
        out = norm.group_norm(q, 4, w, b, 1e-5, 0.05, 50)
        assert within_one_code(out, ops.group_norm(theirs, 4, w, b, 1e-5, 0.05, 50))
        out = norm.instance_norm(q, w, b, 1e-5, 0.05, 50)
        assert within_one_code(out, ops.instance_norm(theirs, w, b, 1e-5, 0.05, 50))
        w, b = torch.randn(6, 7), torch.randn(6, 7)
        out = norm.layer_norm(q, (6, 7), w, b, 1e-5, 0.05, 50)
        assert within_one_code(out, ops.layer_norm(theirs, (6, 7), w, b, 1e-5, 0.05, 50))
