"""Convolution of codes in one, two and three dimensions.

The operator takes explicit (before, after) padding and lays its output out channels-last in memory; the function over
quantized tensors adds torch's ways to say padding, the padding modes, and inputs without a batch.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``, ``ops.quantize`` (dynamic grids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import as_qdtype, qint8, quint8
from zeropoint.ops.quantize import dynamic_range_reference, reduced_range
from zeropoint.ops.registry import native_operator, operator
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["LARGEST", "check_steps", "conv", "dynamic_codes", "pad_codes", "padding_pairs", "real_outputs", "to_tuple"]

PADDING_MODES = ("zeros", "constant", "reflect", "replicate", "circular")
LARGEST = 2**31
"""Strides, dilations and paddings lie below it, so that the products of sizes fit 64 bits."""


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _conv_pack_meta(weight: Tensor, groups: int) -> Tensor:
    # How long the packed weights are is known only to the instruction set that will run.
    size = 0 if weight.device.type == "meta" else torch.library.get_ctx().new_dynamic_size()
    return weight.new_empty((size,), dtype=torch.uint8)


@operator("conv_pack(Tensor weight, int groups) -> Tensor", meta=_conv_pack_meta)
def conv_pack_reference(weight: Tensor, groups: int) -> Tensor:
    """The reference reads canonical weights, so it packs nothing: an empty byte tensor."""
    return weight.new_empty((0,), dtype=torch.uint8)


def _check_conv(
    x: Tensor,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
) -> list[int]:
    """Checks every argument against the others, as the native kernel does.

    Returns:
        The output's spatial sizes.
    """
    rank = weight.dim() - 2
    if rank not in (1, 2, 3):
        raise RuntimeError(f"conv takes weights of 3, 4 or 5 dimensions, got shape {tuple(weight.shape)}")
    if x.dim() != weight.dim():
        raise RuntimeError(
            f"conv with weights of shape {tuple(weight.shape)} takes an input of {weight.dim()} dimensions "
            f"(N, C, spatial), got shape {tuple(x.shape)}"
        )
    if x.dtype not in (torch.int8, torch.uint8) or out_dtype not in (torch.int8, torch.uint8):
        raise RuntimeError(f"conv takes and gives int8 or uint8 codes, got {x.dtype} to {out_dtype}")
    if weight.dtype != torch.int8:
        raise RuntimeError(f"conv takes int8 weights, got {weight.dtype}")
    if len(stride) != rank or len(dilation) != rank or len(padding) != 2 * rank:
        raise RuntimeError(
            f"conv in {rank} dimensions takes {rank} strides, {rank} dilations and {2 * rank} paddings, "
            f"got {list(stride)}, {list(dilation)} and {list(padding)}"
        )
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or max(*stride, *dilation, *padding) >= LARGEST:
        raise RuntimeError(
            "conv takes strides and dilations of at least 1 and paddings of at least 0, all below 2**31, "
            f"got {list(stride)}, {list(dilation)} and {list(padding)}"
        )
    limits = torch.iinfo(out_dtype)
    if not limits.min <= out_min <= out_max <= limits.max or not limits.min <= out_zero_point <= limits.max:
        raise RuntimeError(
            f"conv to {out_dtype} takes codes in [{limits.min}, {limits.max}] as out_min <= out_max and "
            f"out_zero_point, got {out_min}, {out_max} and {out_zero_point}"
        )
    if not torch.iinfo(x.dtype).min <= x_zero_point <= torch.iinfo(x.dtype).max:
        raise RuntimeError(f"conv takes an x_zero_point that is a code of {x.dtype}, got {x_zero_point}")
    out_channels, group_channels = weight.shape[:2]
    if out_channels < 1 or group_channels < 1 or min(weight.shape[2:]) < 1:
        raise RuntimeError(f"conv takes weights with at least one element, got shape {tuple(weight.shape)}")
    if groups < 1 or out_channels % groups != 0:
        raise RuntimeError(f"conv cannot split {out_channels} output channels into {groups} groups")
    if x.shape[1] != group_channels * groups:
        raise RuntimeError(
            f"conv with weights of shape {tuple(weight.shape)} and {groups} groups takes an input of "
            f"{group_channels * groups} channels, got shape {tuple(x.shape)}"
        )
    for name, parameter in (("weight_scale", weight_scale), ("weight_zero_point", weight_zero_point)):
        if parameter.numel() not in (1, out_channels):
            raise RuntimeError(
                f"conv with {out_channels} output channels takes 1 or {out_channels} entries of {name}, "
                f"got {parameter.numel()}"
            )
    if bias is not None and bias.numel() != out_channels:
        raise RuntimeError(f"conv with {out_channels} output channels takes as many biases, got {bias.numel()}")
    sizes = []
    for d in range(rank):
        padded = x.shape[2 + d] + padding[2 * d] + padding[2 * d + 1]
        extent = dilation[d] * (weight.shape[2 + d] - 1) + 1
        if padded < extent:
            raise RuntimeError(
                f"conv: the kernel covers {extent} positions of spatial dimension {d}, "
                f"more than the {padded} of the padded input (input {tuple(x.shape)}, padding {list(padding)}): "
                "give it a larger input or more padding"
            )
        sizes.append((padded - extent) // stride[d] + 1)
    return sizes


def _conv_meta(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    sizes = _check_conv(
        *(x, x_zero_point, weight, weight_scale, weight_zero_point, bias, stride, padding, dilation, groups),
        *(out_zero_point, out_min, out_max, out_dtype),
    )
    return x.new_empty((x.shape[0], *sizes, weight.shape[0]), dtype=out_dtype).movedim(-1, 1)


@operator(
    "conv(Tensor x, float x_scale, int x_zero_point, Tensor weight, Tensor weight_scale, Tensor weight_zero_point,"
    " Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, float out_scale, int out_zero_point,"
    " int out_min, int out_max, ScalarType out_dtype, Tensor? packed) -> Tensor",
    meta=_conv_meta,
)
def conv_reference(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    """Codes of a convolution: exact sums of ``(x - x_zero_point) * (w - w_zero_point)``, then ``grid.requantize``.

    The sums are float64 convolutions of integers: exact as long as they stay below 2**53, that is for kernels of up
    to 2**37 weights.
    """
    _check_conv(
        *(x, x_zero_point, weight, weight_scale, weight_zero_point, bias, stride, padding, dilation, groups),
        *(out_zero_point, out_min, out_max, out_dtype),
    )
    grid.check_operator_scales("conv", x_scale, out_scale)
    total = _exact_sums(x, x_zero_point, weight, weight_zero_point, stride, padding, dilation, groups)
    factor = grid.multiplier(x_scale * weight_scale.to(torch.float64).reshape(-1), out_scale)
    offset = None if bias is None else grid.multiplier(bias.reshape(-1), out_scale)
    codes = grid.requantize(total, factor, offset, out_zero_point, out_min, out_max)
    return x.new_empty(codes.shape, dtype=out_dtype).copy_(codes).movedim(-1, 1)


def _exact_sums(
    x: Tensor,
    x_zero_point: int | Tensor,
    weight: Tensor,
    weight_zero_point: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The sums (N, spatial, out_channels), as float64 that holds integers."""
    rank = weight.dim() - 2
    steps = x.to(torch.float64) - x_zero_point
    pairs = [p for d in reversed(range(rank)) for p in padding[2 * d : 2 * d + 2]]
    steps = torch.nn.functional.pad(steps, pairs)
    taps = weight.to(torch.float64) - weight_zero_point.to(torch.float64).reshape(-1, *[1] * (rank + 1))
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[rank - 1]
    return convolve(steps, taps, None, list(stride), 0, list(dilation), groups).movedim(1, -1)


def dynamic_codes(x: Tensor, reduce_range: bool) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 codes of a float input on the grid of its own finite range, and that grid's scale and zero point."""
    if not x.is_floating_point():
        raise RuntimeError(f"dynamic convolution takes a float16, bfloat16, float32 or float64 tensor, got {x.dtype}")
    values = x.to(torch.float32)
    scale, zero_point = grid.choose_qparams(*dynamic_range_reference(values), *reduced_range(quint8, reduce_range))
    return grid.quantize(values, scale, zero_point, quint8.qmin, quint8.qmax).to(torch.uint8), scale, zero_point


def real_outputs(
    total: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, relu: bool, dtype: torch.dtype
) -> Tensor:
    """Exact sums (N, spatial, channels) as floats (N, channels, spatial): the last step of dynamic layers."""
    y = total.to(torch.float32) * (scale * weight_scale.to(torch.float64).reshape(-1)).to(torch.float32)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return (torch.relu(y) if relu else y).to(dtype).contiguous().movedim(-1, 1)


def _conv_dynamic_meta(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    sizes = _check_conv(
        x.new_empty(x.shape, dtype=torch.uint8),
        0,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        dilation,
        groups,
        *(0, 0, 255),
        out_dtype=torch.uint8,
    )
    return x.new_empty((x.shape[0], *sizes, weight.shape[0])).movedim(-1, 1)


native_operator(
    "conv_bind(ScalarType x_dtype, float x_scale, int x_zero_point, Tensor weight, Tensor weight_scale,"
    " Tensor weight_zero_point, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, float out_scale,"
    " int out_zero_point, int out_min, int out_max, ScalarType out_dtype) -> Tensor"
)
native_operator("conv_bound(Tensor x, Tensor weight, Tensor packed, Tensor bound) -> Tensor")


@operator(
    "conv_dynamic(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_zero_point, Tensor? bias, int[] stride,"
    " int[] padding, int[] dilation, int groups, bool reduce_range, bool relu, Tensor? packed) -> Tensor",
    meta=_conv_dynamic_meta,
)
def conv_dynamic_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    """Floats from floats: the input on the quint8 grid of its own range, exact sums, then as ``linear_dynamic``."""
    codes, scale, zero_point = dynamic_codes(x, reduce_range)
    _check_conv(
        codes,
        0,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        dilation,
        groups,
        *(0, 0, 255),
        out_dtype=torch.uint8,
    )
    total = _exact_sums(codes, zero_point, weight, weight_zero_point, stride, padding, dilation, groups)
    return real_outputs(total, scale, weight_scale, bias, relu, x.dtype)


# --- padding ------------------------------------------------------------------------------------------------------


def to_tuple(value: Any, rank: int, name: str) -> tuple[int, ...]:
    """``value`` as ``rank`` ints: one int is repeated.

    Raises:
        TypeError: neither an int nor a sequence of ints. ValueError: a sequence of another length.
    """
    if isinstance(value, (int, torch.SymInt)):
        return (cast(int, value),) * rank
    if not isinstance(value, (tuple, list, torch.Size)) or not all(isinstance(v, (int, torch.SymInt)) for v in value):
        raise TypeError(f"{name} must be an int or a tuple of {rank} ints, got {value!r}")
    if len(value) == 1:
        return tuple(value) * rank
    if len(value) != rank:
        raise ValueError(f"{name} must be an int or a tuple of {rank} ints, got {value!r}")
    return tuple(value)


def check_steps(name: str, stride: Sequence[int], dilation: Sequence[int], padding: str | Sequence[int]) -> None:
    """Raises ValueError unless a layer's strides, dilations and paddings are ones that the operators take."""
    numbers = () if isinstance(padding, str) else padding
    if min(*stride, *dilation, *(p + 1 for p in numbers)) < 1 or max(*stride, *dilation, *numbers) >= LARGEST:
        raise ValueError(
            f"{name} takes strides and dilations of at least 1 and paddings of at least 0, all below 2**31, got "
            f"stride={stride}, dilation={dilation} and padding={padding!r}"
        )


def padding_pairs(
    padding: int | str | Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """(before, after) pairs in dimension order of what torch's convolutions call ``padding``.

    Args:
        padding: an int, one int a dimension, ``"valid"`` for none, or ``"same"`` for an output of the input's size;
            an even kernel then pads one more position behind than before.
        kernel_size, stride, dilation: one int a spatial dimension.

    Raises:
        ValueError: another word, ``"same"`` with a stride, negative padding, or a wrong length.
    """
    rank = len(kernel_size)
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"padding must be 'same', 'valid' or numbers, got {padding!r}")
        if padding == "valid":
            return [0] * (2 * rank)
        if any(s != 1 for s in stride):
            raise ValueError(f"padding='same' is not supported for strided convolutions, got stride {tuple(stride)}")
        totals = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
        return [part for total in totals for part in (total // 2, total - total // 2)]
    sizes = to_tuple(padding, rank, "padding")
    if min(sizes) < 0:
        raise ValueError(f"padding must not be negative, got {padding!r}")
    return [part for size in sizes for part in (size, size)]


def pad_codes(codes: Tensor, pairs: Sequence[int], mode: str, fill: int = 0) -> Tensor:
    """Pads the spatial dimensions of ``codes``; a channels-last input gives a channels-last output.

    Args:
        codes: (N, C, spatial) integer tensor.
        pairs: (before, after) pairs in dimension order, one for each of the last ``len(pairs) // 2`` dimensions;
            negative numbers crop.
        mode: ``"zeros"`` or ``"constant"`` (``fill`` outside), ``"reflect"``, ``"replicate"`` or ``"circular"``.
        fill: the code of a constant border.

    Raises:
        ValueError: another mode. RuntimeError: more padding than the mode can take from the input.
    """
    if mode not in PADDING_MODES:
        raise ValueError(f"padding mode must be one of {PADDING_MODES}, got {mode!r}")
    rank = len(pairs) // 2
    if mode in ("zeros", "constant"):
        reverse = [p for d in reversed(range(rank)) for p in pairs[2 * d : 2 * d + 2]]
        return torch.nn.functional.pad(codes, reverse, value=fill)
    for d in range(rank):
        before, after = pairs[2 * d], pairs[2 * d + 1]
        axis = codes.dim() - rank + d
        if before == 0 and after == 0:
            continue
        index = _border_index(codes.shape[axis], before, after, mode, codes.device)
        if codes.dim() == rank + 2:  # gather in memory order, so that channels-last codes stay so
            codes = codes.movedim(1, -1).index_select(axis - 1, index).movedim(-1, 1)
        else:
            codes = codes.index_select(axis, index)
    return codes


def _border_index(size: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    """Which input position each padded position reads."""
    limit = {"reflect": size - 1, "circular": size, "replicate": max(before, after) if size else 0}[mode]
    if max(before, after) > limit or size + before + after < 1:
        raise RuntimeError(
            f"{mode} padding of ({before}, {after}) does not fit a dimension of size {size}: give it a larger "
            "input or less padding"
        )
    place = torch.arange(-before, size + after, device=device)
    if mode == "replicate":
        return place.clamp(0, size - 1)
    if mode == "circular":
        return place % size
    place = place.abs()
    return torch.where(place >= size, 2 * (size - 1) - place, place)


# --- function over quantized tensors ------------------------------------------------------------------------------


def conv(
    x: QTensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out_scale: float,
    out_zero_point: int,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    out_min: int | None = None,
    out_max: int | None = None,
    out_dtype: Any = None,
    packed: Tensor | None = None,
) -> QTensor:
    """Convolution of a quantized tensor with int8 weights, on a given output grid.

    Args:
        x: per-tensor quint8 or qint8, (N, C, spatial) or (C, spatial), with one to three spatial dimensions.
        weight: int8 codes (out_channels, C / groups, kernel).
        weight_scale: float32, one entry or one an output channel.
        weight_zero_point: int32, one entry or one an output channel.
        bias: float, one an output channel, or None.
        out_scale, out_zero_point: the output grid.
        stride, dilation: an int or one a spatial dimension.
        padding: an int, one a spatial dimension, ``"same"`` or ``"valid"``.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        out_min, out_max: the ends of the output codes; a fused ReLU is ``out_min=out_zero_point``.
        out_dtype: the output's quantized dtype; None keeps ``x``'s.
        packed: what ``torch.ops.zeropoint.conv_pack(weight, groups)`` gave, or None.

    Returns:
        Quantized tensor (N, out_channels, spatial), channels-last in memory.

    Raises:
        TypeError: ``x`` is not quantized to 8 bits. RuntimeError: a per-channel grid, or sizes that do not fit.
        ValueError: a padding that cannot be read, or a scale that makes no grid.
    """
    if not isinstance(x, QTensor) or x.qdtype not in (qint8, quint8):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"conv takes a qint8 or quint8 tensor, got {seen}: quantize the input first")
    x._require_per_tensor("conv")
    qdtype = x.qdtype if out_dtype is None else as_qdtype(out_dtype)
    if qdtype not in (qint8, quint8):
        raise TypeError(f"conv gives qint8 or quint8, got out_dtype={qdtype}")
    out_scale = grid.check_scale(out_scale, "conv: out_scale")
    rank = weight.dim() - 2
    codes = x._codes
    if codes.dim() not in (rank + 1, rank + 2):
        raise RuntimeError(
            f"conv{rank}d takes an input of {rank + 1} or {rank + 2} dimensions, got shape {tuple(codes.shape)}"
        )
    batched = codes.dim() == rank + 2
    if not batched:
        codes = codes.unsqueeze(0)
    strides, dilations = to_tuple(stride, rank, "stride"), to_tuple(dilation, rank, "dilation")
    pairs = padding_pairs(padding, weight.shape[2:], strides, dilations)
    if padding_mode != "zeros":
        codes = pad_codes(codes, pairs, padding_mode, x.zero_point)
        pairs = [0] * (2 * rank)
    out = torch.ops.zeropoint.conv.default(
        codes,
        x.scale,
        x.zero_point,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        strides,
        pairs,
        dilations,
        groups,
        out_scale,
        out_zero_point,
        qdtype.qmin if out_min is None else out_min,
        qdtype.qmax if out_max is None else out_max,
        qdtype.storage,
        packed,
    )
    return make_qtensor(out if batched else out.squeeze(0), qdtype, out_scale, out_zero_point)
