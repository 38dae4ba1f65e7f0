"""Transposed convolution of codes in one, two and three dimensions.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.registry``, ``ops.conv`` (tuples, dynamic grids).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import as_qdtype, qint8, quint8
from zeropoint.ops.conv import LARGEST, dynamic_codes, real_outputs, to_tuple
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["conv_transpose", "output_padding_for"]


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _pack_meta(weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    # How long the packed weights are is known only to the instruction set that will run.
    size = 0 if weight.device.type == "meta" else torch.library.get_ctx().new_dynamic_size()
    return weight.new_empty((size,), dtype=torch.uint8)


@operator("conv_transpose_pack(Tensor weight, int[] stride, int[] dilation, int groups) -> Tensor", meta=_pack_meta)
def conv_transpose_pack_reference(
    weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """The reference reads canonical weights, so it packs nothing: an empty byte tensor."""
    return weight.new_empty((0,), dtype=torch.uint8)


def _check(
    x: Tensor,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
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
        raise RuntimeError(f"conv_transpose takes weights of 3, 4 or 5 dimensions, got shape {tuple(weight.shape)}")
    if x.dtype not in (torch.int8, torch.uint8) or out_dtype not in (torch.int8, torch.uint8):
        raise RuntimeError(f"conv_transpose takes and gives int8 or uint8 codes, got {x.dtype} to {out_dtype}")
    if weight.dtype != torch.int8:
        raise RuntimeError(f"conv_transpose takes int8 weights, got {weight.dtype}")
    if min(weight.shape) < 1:
        raise RuntimeError(f"conv_transpose takes weights with at least one element, got shape {tuple(weight.shape)}")
    in_channels, out_channels = weight.shape[0], weight.shape[1] * groups
    if groups < 1 or in_channels % groups != 0:
        raise RuntimeError(f"conv_transpose cannot split {in_channels} input channels into {groups} groups")
    if x.dim() != weight.dim() or x.shape[1] != in_channels or min(x.shape[2:]) < 1:
        raise RuntimeError(
            f"conv_transpose with weights of shape {tuple(weight.shape)} takes an input of {weight.dim()} dimensions, "
            f"{in_channels} channels and spatial sizes above 0, got shape {tuple(x.shape)}"
        )
    lengths = [len(stride), len(padding), len(output_padding), len(dilation)]
    if (
        lengths != [rank] * 4
        or min(*stride, *dilation, 1 + min(padding)) < 1
        or max(*stride, *dilation, *padding) >= LARGEST
    ):
        raise RuntimeError(
            f"conv_transpose in {rank} dimensions takes {rank} strides and dilations of at least 1, and paddings and "
            f"output paddings of at least 0, all below 2**31, got {list(stride)}, {list(dilation)}, {list(padding)} "
            f"and {list(output_padding)}"
        )
    limits = torch.iinfo(out_dtype)
    if not limits.min <= out_min <= out_max <= limits.max or not limits.min <= out_zero_point <= limits.max:
        raise RuntimeError(
            f"conv_transpose to {out_dtype} takes codes in [{limits.min}, {limits.max}] as out_min <= out_max and "
            f"out_zero_point, got {out_min}, {out_max} and {out_zero_point}"
        )
    if not torch.iinfo(x.dtype).min <= x_zero_point <= torch.iinfo(x.dtype).max:
        raise RuntimeError(f"conv_transpose takes an x_zero_point that is a code of {x.dtype}, got {x_zero_point}")
    for name, parameter in (("weight_scale", weight_scale), ("weight_zero_point", weight_zero_point)):
        if parameter.numel() not in (1, out_channels):
            raise RuntimeError(
                f"conv_transpose with {out_channels} output channels takes 1 or {out_channels} entries of {name}, "
                f"got {parameter.numel()}"
            )
    if bias is not None and bias.numel() != out_channels:
        raise RuntimeError(
            f"conv_transpose with {out_channels} output channels takes as many biases, got {bias.numel()}"
        )
    sizes = []
    for d in range(rank):
        if not 0 <= output_padding[d] < max(stride[d], dilation[d]):
            raise RuntimeError(
                "conv_transpose takes output paddings below the stride or the dilation, got "
                f"{list(output_padding)} with stride {list(stride)} and dilation {list(dilation)}"
            )
        reach = dilation[d] * (weight.shape[2 + d] - 1) + output_padding[d] + 1
        size = (x.shape[2 + d] - 1) * stride[d] - 2 * padding[d] + reach
        if size < 1:
            raise RuntimeError(
                f"conv_transpose: the output would have size {size} in spatial dimension {d} "
                f"(input {tuple(x.shape)}, padding {list(padding)}): give it another input or padding"
            )
        sizes.append(size)
    return sizes


def _meta(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    sizes = _check(
        *(x, x_zero_point, weight, weight_scale, weight_zero_point, bias, stride, padding, output_padding, dilation),
        *(groups, out_zero_point, out_min, out_max, out_dtype),
    )
    return x.new_empty((x.shape[0], *sizes, weight.shape[1] * groups), dtype=out_dtype).movedim(-1, 1)


@operator(
    "conv_transpose(Tensor x, float x_scale, int x_zero_point, Tensor weight, Tensor weight_scale,"
    " Tensor weight_zero_point, Tensor? bias, int[] stride, int[] padding, int[] output_padding, int[] dilation,"
    " int groups, float out_scale, int out_zero_point, int out_min, int out_max, ScalarType out_dtype,"
    " Tensor? packed) -> Tensor",
    meta=_meta,
)
def conv_transpose_reference(
    x: Tensor,
    x_scale: float,
    x_zero_point: int,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_scale: float,
    out_zero_point: int,
    out_min: int,
    out_max: int,
    out_dtype: torch.dtype,
    packed: Tensor | None,
) -> Tensor:
    """Codes of a transposed convolution: exact sums as in ``ops.conv``, then ``grid.requantize``.

    ``weight`` is (in_channels, out_channels / groups, kernel); its scales, its zero points and the bias have one entry
    an output channel, group after group. A position that no input reaches has the sum 0.
    """
    _check(
        *(x, x_zero_point, weight, weight_scale, weight_zero_point, bias, stride, padding, output_padding, dilation),
        *(groups, out_zero_point, out_min, out_max, out_dtype),
    )
    grid.check_operator_scales("conv_transpose", x_scale, out_scale)
    total = _exact_sums(x, x_zero_point, weight, weight_zero_point, stride, padding, output_padding, dilation, groups)
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
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The sums (N, spatial, out_channels), as float64 that holds integers."""
    rank = weight.dim() - 2
    steps = x.to(torch.float64) - x_zero_point
    shift = weight_zero_point.to(torch.float64).reshape(-1).expand(weight.shape[1] * groups)
    blocks = weight.to(torch.float64).reshape(groups, -1, *weight.shape[1:])
    taps = (blocks - shift.reshape(groups, 1, -1, *[1] * rank)).reshape(weight.shape)
    functional = torch.nn.functional
    convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    total = convolve(steps, taps, None, list(stride), list(padding), list(output_padding), groups, list(dilation))
    return total.movedim(1, -1)


def _dynamic_meta(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    sizes = _check(
        x.new_empty(x.shape, dtype=torch.uint8),
        0,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        *(0, 0, 255),
        out_dtype=torch.uint8,
    )
    return x.new_empty((x.shape[0], *sizes, weight.shape[1] * groups)).movedim(-1, 1)


@operator(
    "conv_transpose_dynamic(Tensor x, Tensor weight, Tensor weight_scale, Tensor weight_zero_point, Tensor? bias,"
    " int[] stride, int[] padding, int[] output_padding, int[] dilation, int groups, bool reduce_range, bool relu,"
    " Tensor? packed) -> Tensor",
    meta=_dynamic_meta,
)
def conv_transpose_dynamic_reference(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    reduce_range: bool,
    relu: bool,
    packed: Tensor | None,
) -> Tensor:
    """Floats from floats: the input on the quint8 grid of its own range, exact sums, then as ``linear_dynamic``."""
    codes, scale, zero_point = dynamic_codes(x, reduce_range)
    _check(
        codes,
        0,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        stride,
        padding,
        output_padding,
        dilation,
        groups,
        *(0, 0, 255),
        out_dtype=torch.uint8,
    )
    total = _exact_sums(codes, zero_point, weight, weight_zero_point, stride, padding, output_padding, dilation, groups)
    return real_outputs(total, scale, weight_scale, bias, relu, x.dtype)


# --- function over quantized tensors ------------------------------------------------------------------------------


def output_padding_for(
    output_size: Sequence[int] | None,
    input_size: Sequence[int],
    default: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """The output padding that gives an output of ``output_size``; ``default`` where no size is asked for.

    Args:
        output_size: the wanted spatial sizes, with or without batch and channels in front, or None.
        input_size: the input's spatial sizes.
        default, kernel_size, stride, padding, dilation: one int a spatial dimension.

    Raises:
        ValueError: another number of sizes, or one that no output padding gives.
    """
    if output_size is None:
        return tuple(default)
    rank = len(kernel_size)
    if len(output_size) not in (rank, rank + 1, rank + 2):
        raise ValueError(f"output_size must have {rank} sizes, or the output's whole shape, got {tuple(output_size)}")
    wanted = tuple(output_size)[len(output_size) - rank :]
    result = []
    for d in range(rank):
        least = (input_size[d] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (kernel_size[d] - 1) + 1
        if not least <= wanted[d] < least + max(stride[d], dilation[d]):
            raise ValueError(
                f"output_size {tuple(wanted)} cannot be reached from an input of {tuple(input_size)}: "
                f"dimension {d} can be {least} to {least + max(stride[d], dilation[d]) - 1}"
            )
        result.append(wanted[d] - least)
    return tuple(result)


def conv_transpose(
    x: QTensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out_scale: float,
    out_zero_point: int,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    out_min: int | None = None,
    out_max: int | None = None,
    out_dtype: Any = None,
    packed: Tensor | None = None,
) -> QTensor:
    """Transposed convolution of a quantized tensor with int8 weights, on a given output grid.

    Args:
        x: per-tensor quint8 or qint8, (N, C, spatial) or (C, spatial), with one to three spatial dimensions.
        weight: int8 codes (in_channels, out_channels / groups, kernel).
        weight_scale: float32, one entry or one an output channel.
        weight_zero_point: int32, one entry or one an output channel.
        bias: float, one an output channel, or None.
        out_scale, out_zero_point: the output grid.
        stride, padding, output_padding, dilation: an int or one a spatial dimension.
        out_min, out_max: the ends of the output codes; a fused ReLU is ``out_min=out_zero_point``.
        out_dtype: the output's quantized dtype; None keeps ``x``'s.
        packed: what ``torch.ops.zeropoint.conv_transpose_pack(weight, stride, dilation, groups)`` gave, or None.

    Returns:
        Quantized tensor (N, out_channels, spatial), channels-last in memory.

    Raises:
        TypeError: ``x`` is not quantized to 8 bits. RuntimeError: a per-channel grid, or sizes that do not fit.
        ValueError: a scale that makes no grid.
    """
    if not isinstance(x, QTensor) or x.qdtype not in (qint8, quint8):
        seen = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"conv_transpose takes a qint8 or quint8 tensor, got {seen}: quantize the input first")
    x._require_per_tensor("conv_transpose")
    qdtype = x.qdtype if out_dtype is None else as_qdtype(out_dtype)
    if qdtype not in (qint8, quint8):
        raise TypeError(f"conv_transpose gives qint8 or quint8, got out_dtype={qdtype}")
    out_scale = grid.check_scale(out_scale, "conv_transpose: out_scale")
    rank = weight.dim() - 2
    batched = x._codes.dim() != rank + 1
    out = torch.ops.zeropoint.conv_transpose.default(
        x._codes if batched else x._codes.unsqueeze(0),
        x.scale,
        x.zero_point,
        weight,
        weight_scale,
        weight_zero_point,
        bias,
        to_tuple(stride, rank, "stride"),
        to_tuple(padding, rank, "padding"),
        to_tuple(output_padding, rank, "output_padding"),
        to_tuple(dilation, rank, "dilation"),
        groups,
        out_scale,
        out_zero_point,
        qdtype.qmin if out_min is None else out_min,
        qdtype.qmax if out_max is None else out_max,
        qdtype.storage,
        packed,
    )
    return make_qtensor(out if batched else out.squeeze(0), qdtype, out_scale, out_zero_point)
