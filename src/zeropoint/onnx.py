"""Models as ONNX files: fake quantizers and converted layers become ``QuantizeLinear`` and ``DequantizeLinear``.

``torch.onnx.export`` takes prepared and QAT models as they are; :func:`export` takes converted ones too. A converted
operator is written as runtimes look for it: its inputs and its weight dequantized, the float operator, its result
quantized. A runtime puts an integer kernel of its own in the place of the three.

Importing this module needs no onnx; :func:`export` needs the packages that ``torch.onnx.export`` needs.

May import: ``ops``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropoint.ops import qdq
from zeropoint.ops.activation import FUNCTIONS
from zeropoint.ops.fake_quantize import onnx_form
from zeropoint.ops.pool import _pool_sizes as pool_sizes

__all__ = ["export", "lower"]


def export(
    model: nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> Any:
    """``torch.onnx.export`` for prepared, QAT and converted models.

    Args:
        model: the model in eval mode, or what ``torch.export.export`` made of one.
        args, kwargs: example inputs.
        f: the file to write; None only returns the program.
        dynamic_shapes: which sizes may vary, as ``torch.export.export`` takes it.
        options: further arguments of ``torch.onnx.export``, such as ``opset_version`` or ``input_names``.

    Returns:
        A ``torch.onnx.ONNXProgram``.

    Raises:
        ValueError: the model is in training mode, or holds an operator that has no ONNX form; the text names module
            and operator.
        ImportError: ``onnx`` or ``onnxscript`` is not installed.
    """
    if not isinstance(model, torch.export.ExportedProgram):
        if model.training:
            raise ValueError("zeropoint.onnx.export takes a model in eval mode: call model.eval()")
        with qdq.captures(), torch.no_grad():
            model = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    return torch.onnx.export(lower(model), f=f, dynamo=True, **options)


def lower(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with ONNX nodes in place of the operators of this package, for ``torch.onnx.export``.

    Raises:
        ValueError: an operator has no ONNX form.
    """
    with torch.no_grad():
        lowered: torch.export.ExportedProgram = program.run_decompositions(_FORMS)
    left = {}
    for node in lowered.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "zeropoint":
            stack = node.meta.get("nn_module_stack") or {}
            left[target._schema.name] = list(stack.values())[-1][0] if stack else ""
    if left:
        found = ", ".join(f"{name} (in {where or 'the model'!r})" for name, where in left.items())
        raise ValueError(
            f"no ONNX form is known of {found}: keep that module in float (module.qconfig = None before prepare), or "
            "export the prepared model with fake quantizers instead of the converted one"
        )
    return lowered


# --- the forms ----------------------------------------------------------------------------------------------------

_FORMS: dict[Any, Callable[..., Any]] = {}
_Form = Callable[..., Any]


def _form(name: str) -> Callable[[_Form], _Form]:
    """The decorated function takes an operator's arguments and computes with ONNX nodes and float operators."""

    def register(function: _Form) -> _Form:
        _FORMS[getattr(torch.ops.zeropoint, name).default] = function
        return function

    return register


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    """Rectifiers of codes, as one node; other tensors are left to torch."""
    if x.dtype not in (torch.int8, torch.uint8):
        return NotImplemented
    ends = (None if end is None else torch.full((), int(end), dtype=x.dtype) for end in (low, high))
    return qdq.clip(x, *ends)


_FORMS[torch.ops.aten.clamp.default] = _clamp


def _scalar_grid(scale: float, zero_point: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"ONNX has no grid of {dtype} codes: use a quint8 or qint8 qconfig for this layer")
    return torch.full((), scale, dtype=torch.float32), torch.full((), zero_point, dtype=dtype)


def _real(codes: Tensor, scale: float, zero_point: int) -> Tensor:
    return qdq.dequantize(codes, *_scalar_grid(scale, zero_point, codes.dtype), None)


def _codes(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return qdq.quantize(x, *_scalar_grid(scale, zero_point, dtype), None, low, high)


def _whole(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Codes over the whole range of their dtype."""
    ends = torch.iinfo(dtype)
    return _codes(x, scale, zero_point, ends.min, ends.max, dtype)


def _weight(weight: Tensor, scale: Tensor, zero_point: Tensor, axis: int = 0) -> Tensor:
    lone = scale.numel() == 1
    shape = () if lone else (-1,)
    scale, zero_point = scale.to(torch.float32).reshape(shape), zero_point.to(weight.dtype)
    zero_point = zero_point.reshape(shape) if zero_point.numel() == scale.numel() else zero_point.expand(scale.shape)
    return qdq.dequantize(weight, scale, zero_point, None if lone else axis)


@_form("fake_quantize_per_tensor")
def _fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    return onnx_form(x, scale, zero_point, None, low, high), torch.ones_like(x, dtype=torch.bool)


@_form("fake_quantize_per_channel")
def _fake_quantize_channels(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, low: int, high: int
) -> tuple[Tensor, Tensor]:
    return onnx_form(x, scales, zero_points, axis % x.dim(), low, high), torch.ones_like(x, dtype=torch.bool)


@_form("quantize_per_tensor")
def _quantize(x: Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
    return _codes(x, scale, zero_point, low, high, dtype)


@_form("dequantize_per_tensor")
def _dequantize(codes: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    return _real(codes, scale, zero_point).to(dtype)


@_form("dequantize_per_channel")
def _dequantize_channels(codes: Tensor, scales: Tensor, zeros: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    return _weight(codes, scales, zeros, axis % codes.dim()).to(dtype)


@_form("requantize")
def _requantize(codes: Tensor, scale: float, zero_point: int, *out: Any) -> Tensor:
    return _codes(_real(codes, scale, zero_point), *out)


@_form("linear")
def _linear(
    x: Tensor, x_scale: float, x_zero: int, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, *out: Any
) -> Tensor:
    return _codes(F.linear(_real(x, x_scale, x_zero), _weight(weight, scale, zero), bias), *out[:-1])


_CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A float convolution; ``padding`` holds (before, after) pairs in dimension order."""
    before, after = padding[::2], padding[1::2]
    if list(before) != list(after):
        pairs = zip(reversed(before), reversed(after), strict=True)
        x, before = F.pad(x, [amount for pair in pairs for amount in pair]), [0] * len(stride)
    y: Tensor = _CONVOLUTIONS[len(stride) - 1](x, weight, bias, stride, before, dilation, groups)
    return y


@_form("conv")
def _conv(
    x: Tensor,
    x_scale: float,
    x_zero: int,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *out: Any,
) -> Tensor:
    real = _real(x, x_scale, x_zero)
    return _codes(_convolve(real, _weight(weight, scale, zero), bias, stride, padding, dilation, groups), *out[:-1])


@_form("conv_transpose")
def _conv_transpose(
    x: Tensor,
    x_scale: float,
    x_zero: int,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *out: Any,
) -> Tensor:
    real, kernel = _real(x, x_scale, x_zero), _transposed_weight(weight, scale, zero, groups)
    convolve = _TRANSPOSED[len(stride) - 1]
    return _codes(convolve(real, kernel, bias, stride, padding, output_padding, groups, dilation), *out[:-1])


def _transposed_weight(weight: Tensor, scale: Tensor, zero: Tensor, groups: int) -> Tensor:
    """One grid an output channel, group after group: each group has a node of its own."""
    if groups == 1 or scale.numel() == 1:
        return _weight(weight, scale, zero, axis=1)
    parts = []
    for group in range(groups):
        rows, channels = weight.shape[0] // groups, scale.numel() // groups
        scales, zeros = (t.narrow(0, group * channels, channels) for t in (scale, zero.expand(scale.shape)))
        parts.append(_weight(weight.narrow(0, group * rows, rows), scales, zeros, axis=1))
    return torch.cat(parts)


def _dynamic_codes(x: Tensor, reduce_range: bool) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 codes of the input on the grid of its own range, scale and zero point, all made in the runtime."""
    if reduce_range:
        raise ValueError("ONNX chooses grids of all 256 codes: use a dynamic qconfig with reduce_range=False")
    codes, scale, zero_point = torch.onnx.ops.symbolic_multi_out(
        "DynamicQuantizeLinear",
        (x.to(torch.float32),),
        dtypes=(torch.uint8, torch.float32, torch.uint8),
        shapes=(x.shape, (), ()),
    )
    return codes, scale, zero_point


@_form("linear_dynamic")
def _linear_dynamic(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, reduce_range: bool, relu: bool, _: Any
) -> Tensor:
    codes, x_scale, x_zero = _dynamic_codes(x, reduce_range)
    zero = zero.to(weight.dtype)
    inputs = (codes, weight.t(), x_zero, zero.reshape(()) if zero.numel() == 1 else zero)
    shape = (*x.shape[:-1], weight.shape[0])
    sums = torch.onnx.ops.symbolic("MatMulInteger", inputs, dtype=torch.int32, shape=shape)
    y = sums.to(torch.float32) * (x_scale * scale.to(torch.float32))
    if bias is not None:
        y = y + bias
    return (torch.relu(y) if relu else y).to(x.dtype)


@_form("conv_dynamic")
def _conv_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    _: Any,
) -> Tensor:
    real = qdq.dequantize(*_dynamic_codes(x, reduce_range), None)
    y = _convolve(real, _weight(weight, scale, zero), bias, stride, padding, dilation, groups)
    return (torch.relu(y) if relu else y).to(x.dtype)


@_form("conv_transpose_dynamic")
def _conv_transpose_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    _: Any,
) -> Tensor:
    real = qdq.dequantize(*_dynamic_codes(x, reduce_range), None)
    kernel = _transposed_weight(weight, scale, zero, groups)
    y = _TRANSPOSED[len(stride) - 1](real, kernel, bias, stride, padding, output_padding, groups, dilation)
    return (torch.relu(y) if relu else y).to(x.dtype)


def _binary(compute: Callable[[Tensor, Tensor], Tensor]) -> _Form:
    def form(a: Tensor, a_scale: float, a_zero: int, b: Tensor, b_scale: float, b_zero: int, *out: Any) -> Tensor:
        return _codes(compute(_real(a, a_scale, a_zero), _real(b, b_scale, b_zero)), *out)

    return form


for _name, _compute in (("add", torch.add), ("mul", torch.mul), ("div", torch.div), ("matmul", torch.matmul)):
    _form(_name)(_binary(_compute))


@_form("max_pool")
def _max_pool(x: Tensor, kernel_size: Sequence[int], *window: Any) -> Tensor:
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel_size) - 1]
    return _whole(pool(_real(x, 1.0, 0), kernel_size, *window), 1.0, 0, x.dtype)


_AVERAGES: tuple[Any, ...] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


@_form("avg_pool")
def _avg_pool(
    x: Tensor,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    real, pool = _real(x, 1.0, zero_point), _AVERAGES[len(kernel_size) - 1]
    if not ceil_mode and divisor_override is None:
        y = pool(real, kernel_size, stride, padding, False, count_include_pad)
        return _whole(y, 1.0, zero_point, x.dtype)
    # Runtimes count the positions of windows that hang over in different ways: here the graph counts them.
    sizes = pool_sizes("avg_pool", x, kernel_size, stride, padding, [1] * len(kernel_size), ceil_mode)
    steps = zip(sizes, stride, kernel_size, x.shape[2:], padding, strict=True)
    hang = [max((out - 1) * step + kernel - size - 2 * pad, 0) for out, step, kernel, size, pad in steps]
    both = [pad for pad in reversed(padding) for _ in range(2)]
    behind = [amount for over in reversed(hang) for amount in (0, over)]
    positions = math.prod(kernel_size)
    total = pool(F.pad(F.pad(real, both), behind), kernel_size, stride) * positions
    if divisor_override is not None:
        return _whole(total / divisor_override, 1.0, zero_point, x.dtype)
    counted = F.pad(torch.ones_like(real[:1, :1]), both, value=float(count_include_pad))
    return _whole(total / (pool(F.pad(counted, behind), kernel_size, stride) * positions), 1.0, zero_point, x.dtype)


@_form("adaptive_avg_pool")
def _adaptive_avg_pool(x: Tensor, zero_point: int, output_size: Sequence[int]) -> Tensor:
    real, spatial = _real(x, 1.0, zero_point), list(range(2, x.dim()))
    if set(output_size) == {1}:
        y = real.mean(spatial, keepdim=True)
    else:
        pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(output_size) - 1]
        y = pool(real, output_size)
    return _whole(y, 1.0, zero_point, x.dtype)


@_form("interpolate")
def _interpolate(
    x: Tensor, zero_point: int, size: Sequence[int], ratio: Sequence[float], mode: str, align_corners: bool
) -> Tensor:
    lengths = list(zip(x.shape[2:], size, ratio, strict=True))
    corners = align_corners and mode == "linear"
    if not corners and any(abs(r * out - n) > 1e-6 * n for n, out, r in lengths):
        raise ValueError("ONNX resizes to sizes: give Upsample or interpolate a size, or recompute_scale_factor=True")
    name = {"linear": ("linear", "bilinear", "trilinear")[len(size) - 1]}.get(mode, mode)
    y = F.interpolate(
        _real(x, 1.0, zero_point), list(size), mode=name, align_corners=corners if mode == "linear" else None
    )
    return _whole(y, 1.0, zero_point, x.dtype)


@_form("mean")
def _mean(x: Tensor, zero_point: int, dim: Sequence[int], keepdim: bool) -> Tensor:
    return _whole(_real(x, 1.0, zero_point).mean(list(dim) or None, keepdim), 1.0, zero_point, x.dtype)


@_form("activation")
def _activation(codes: Tensor, name: str, args: Sequence[float], scale: float, zero_point: int, *out: Any) -> Tensor:
    return _whole(FUNCTIONS[name](_real(codes, scale, zero_point), *args), *out)


@_form("softmax")
def _softmax(x: Tensor, x_scale: float, dim: int, *out: Any) -> Tensor:
    return _whole(torch.softmax(_real(x, x_scale, 0), dim), *out)


@_form("prelu")
def _prelu(x: Tensor, x_scale: float, x_zero: int, slope: Tensor, *out: Any) -> Tensor:
    return _codes(F.prelu(_real(x, x_scale, x_zero), slope), *out)


@_form("batch_norm")
def _batch_norm(
    x: Tensor,
    x_scale: float,
    x_zero: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    *out: Any,
) -> Tensor:
    real = _real(x, x_scale, x_zero)
    return _codes(F.batch_norm(real, mean, var, weight, bias, training=False, eps=eps), *out)


@_form("layer_norm")
def _layer_norm(
    x: Tensor,
    x_scale: float,
    x_zero: int,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *out: Any,
) -> Tensor:
    return _codes(F.layer_norm(_real(x, x_scale, x_zero), list(normalized_shape), weight, bias, eps), *out)


@_form("group_norm")
def _group_norm(
    x: Tensor,
    x_scale: float,
    x_zero: int,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *out: Any,
) -> Tensor:
    return _codes(F.group_norm(_real(x, x_scale, x_zero), num_groups, weight, bias, eps), *out)
