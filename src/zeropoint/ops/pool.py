"""Pooling, means, padding and clamping: operators whose output lies on the input's grid.

Each comes as an operator over plain codes; torch's own functions lead to them when they meet a quantized tensor.
A channels-last input gives a channels-last output.

May import: ``grid``, ``tensor``, ``ops.registry``, ``ops.conv`` (padding).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropoint import grid
from zeropoint.ops.conv import pad_codes, to_tuple
from zeropoint.ops.registry import operator
from zeropoint.tensor import QTensor, implements

__all__ = ["code_of"]


# --- shapes and windows -------------------------------------------------------------------------------------------


def _pool_sizes(
    name: str,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[int]:
    """Checks a pooling's arguments against the input, as the native kernel does.

    Returns:
        The output's spatial sizes: a window may hang over the end only in ``ceil_mode``, and must start before it.
    """
    rank = len(kernel_size)
    if rank not in (1, 2, 3) or x.dim() != rank + 2:
        raise RuntimeError(f"{name} over {rank} dimensions takes an input (N, C, spatial), got shape {tuple(x.shape)}")
    if len(stride) != rank or len(padding) != rank or len(dilation) != rank:
        raise RuntimeError(
            f"{name} with kernel_size {list(kernel_size)} takes {rank} strides, paddings and dilations, "
            f"got {list(stride)}, {list(padding)} and {list(dilation)}"
        )
    if min(kernel_size) < 1 or min(stride) < 1 or min(dilation) < 1:
        raise RuntimeError(
            f"{name} takes a kernel_size, stride and dilation of at least 1, "
            f"got {list(kernel_size)}, {list(stride)} and {list(dilation)}"
        )
    if min(x.shape[1:]) < 1:
        raise RuntimeError(f"{name} takes an input whose sizes, but for the batch, are above 0, got {tuple(x.shape)}")
    sizes = []
    for d in range(rank):
        extent = dilation[d] * (kernel_size[d] - 1) + 1
        if not 0 <= padding[d] <= extent // 2:
            raise RuntimeError(
                f"{name} takes a padding between 0 and half of the kernel's extent, got padding {list(padding)} "
                f"for kernel_size {list(kernel_size)}, dilation {list(dilation)}"
            )
        size = x.shape[2 + d]
        room = size + 2 * padding[d] - extent
        out = (room + (stride[d] - 1 if ceil_mode else 0)) // stride[d] + 1
        if ceil_mode and (out - 1) * stride[d] >= size + padding[d]:
            out -= 1
        if out < 1:
            raise RuntimeError(
                f"{name}: the kernel covers {extent} positions of spatial dimension {d}, "
                f"more than the {size + 2 * padding[d]} of the padded input (input {tuple(x.shape)})"
            )
        sizes.append(out)
    return sizes


def _is_channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def _empty(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """An output with ``x``'s batch, channels, dtype and memory order."""
    if _is_channels_last(x):
        return x.new_empty((x.shape[0], *sizes, x.shape[1])).movedim(-1, 1)
    return x.new_empty((x.shape[0], x.shape[1], *sizes))


def _like_format(result: Tensor, x: Tensor) -> Tensor:
    """``result`` as ``x``'s dtype in the memory order of :func:`_empty`."""
    return _empty(x, result.shape[2:]).copy_(result)


def _windows(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    sizes: Sequence[int],
    fill: int,
) -> Tensor:
    """All windows: (N, C, output sizes, kernel), with ``fill`` outside the input."""
    rank = len(kernel_size)
    pairs = []
    for d in range(rank):
        reach = (sizes[d] - 1) * stride[d] + dilation[d] * (kernel_size[d] - 1) + 1
        pairs += [padding[d], max(0, reach - x.shape[2 + d] - padding[d])]
    x = pad_codes(x, pairs, "constant", fill)
    for d in range(rank):
        extent = dilation[d] * (kernel_size[d] - 1) + 1
        x = x.unfold(2 + d, extent, stride[d])[..., :: dilation[d]].narrow(2 + d, 0, sizes[d])
    return x


def _outer(lengths: Sequence[Tensor]) -> Tensor:
    """The product of one length a dimension, for every output position."""
    total = lengths[0]
    for length in lengths[1:]:
        total = total.unsqueeze(-1) * length
    return total


def _average(total: Tensor, count: Tensor | int, zero_point: int, dtype: torch.dtype) -> Tensor:
    """The code of a mean; a divisor that is not the count may lead off the grid's ends."""
    limits = torch.iinfo(dtype)
    return (grid.round_mean(total, count) + zero_point).clamp(limits.min, limits.max)


# --- operators over plain tensors ---------------------------------------------------------------------------------


def _max_pool_meta(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    return _empty(x, _pool_sizes("max_pool", x, kernel_size, stride, padding, dilation, ceil_mode))


@operator(
    "max_pool(Tensor x, int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> Tensor",
    meta=_max_pool_meta,
)
def max_pool_reference(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """The largest code of each window; positions outside the input do not count."""
    sizes = _pool_sizes("max_pool", x, kernel_size, stride, padding, dilation, ceil_mode)
    windows = _windows(x, kernel_size, stride, padding, dilation, sizes, torch.iinfo(x.dtype).min)
    return _like_format(windows.amax(tuple(range(-len(kernel_size), 0))), x)


def _avg_pool_sizes(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    divisor_override: int | None,
) -> list[int]:
    if divisor_override == 0:
        raise RuntimeError("avg_pool takes a divisor_override other than 0")
    return _pool_sizes("avg_pool", x, kernel_size, stride, padding, [1] * len(kernel_size), ceil_mode)


def _avg_pool_meta(
    x: Tensor,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    return _empty(x, _avg_pool_sizes(x, kernel_size, stride, padding, ceil_mode, divisor_override))


@operator(
    "avg_pool(Tensor x, int zero_point, int[] kernel_size, int[] stride, int[] padding, bool ceil_mode,"
    " bool count_include_pad, int? divisor_override) -> Tensor",
    meta=_avg_pool_meta,
)
def avg_pool_reference(
    x: Tensor,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """The mean of each window, rounded to a code (``grid.round_mean``); padding is real zero.

    A window counts its positions inside the input, with ``count_include_pad`` also those in the padding, but never
    those behind it, where ``ceil_mode`` lets a window hang over.
    """
    sizes = _avg_pool_sizes(x, kernel_size, stride, padding, ceil_mode, divisor_override)
    rank = len(kernel_size)
    steps = x.to(torch.int64) - zero_point
    total = _windows(steps, kernel_size, stride, padding, [1] * rank, sizes, 0).sum(tuple(range(-rank, 0)))
    if divisor_override is not None:
        return _like_format(_average(total, divisor_override, zero_point, x.dtype), x)
    lengths = []
    for d in range(rank):
        size, pad = x.shape[2 + d], padding[d]
        start = torch.arange(sizes[d], device=x.device) * stride[d] - pad
        end = (start + kernel_size[d]).clamp(max=size + pad)
        lengths.append(end - start if count_include_pad else end.clamp(max=size) - start.clamp(min=0))
    return _like_format(_average(total, _outer(lengths), zero_point, x.dtype), x)


def _check_adaptive(x: Tensor, output_size: Sequence[int]) -> None:
    rank = len(output_size)
    if rank not in (1, 2, 3) or x.dim() != rank + 2:
        raise RuntimeError(
            f"adaptive pooling to {list(output_size)} takes an input (N, C, spatial), got shape {tuple(x.shape)}"
        )
    if min(output_size) < 0:
        raise RuntimeError(f"adaptive pooling takes output sizes of at least 0, got {list(output_size)}")
    if min(x.shape[1:]) < 1:
        raise RuntimeError(
            f"adaptive pooling takes an input whose sizes, but for the batch, are above 0, got {tuple(x.shape)}"
        )


def _adaptive_meta(x: Tensor, zero_point: int, output_size: Sequence[int]) -> Tensor:
    _check_adaptive(x, output_size)
    return _empty(x, output_size)


def _adaptive_bounds(size: int, out: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each output position's window begins, ``floor(o * L / O)``, and ends, ``ceil((o + 1) * L / O)``."""
    place = torch.arange(out, device=device)
    return place * size // max(out, 1), ((place + 1) * size + out - 1) // max(out, 1)


@operator("adaptive_avg_pool(Tensor x, int zero_point, int[] output_size) -> Tensor", meta=_adaptive_meta)
def adaptive_avg_pool_reference(x: Tensor, zero_point: int, output_size: Sequence[int]) -> Tensor:
    """Means over as many, nearly equal windows as the output has positions, rounded to codes (``grid.round_mean``)."""
    _check_adaptive(x, output_size)
    total = x.to(torch.int64) - zero_point
    lengths = []
    for d, out in enumerate(output_size):
        start, end = _adaptive_bounds(x.shape[2 + d], out, x.device)
        edge = torch.zeros_like(total.narrow(2 + d, 0, 1))
        running = torch.cat([edge, total.cumsum(2 + d)], 2 + d)
        total = running.index_select(2 + d, end) - running.index_select(2 + d, start)
        lengths.append(end - start)
    return _like_format(_average(total, _outer(lengths), zero_point, x.dtype), x)


def _mean_axes(x: Tensor, dim: Sequence[int]) -> list[int]:
    """The reduced dimensions, counted from the front; none means all."""
    for d in dim:
        if not -max(x.dim(), 1) <= d < max(x.dim(), 1):
            raise RuntimeError(f"mean: dimension {d} is out of range for a tensor of {x.dim()} dimensions")
    axes = [d % max(x.dim(), 1) for d in dim] if len(dim) else list(range(x.dim()))
    if len(set(axes)) != len(axes):
        raise RuntimeError(f"mean: a dimension appears twice in {list(dim)}")
    return [d for d in axes if d < x.dim()]


def _mean_meta(x: Tensor, zero_point: int, dim: Sequence[int], keepdim: bool) -> Tensor:
    axes = _mean_axes(x, dim)
    shape = [1 if d in axes else size for d, size in enumerate(x.shape) if keepdim or d not in axes]
    return x.new_empty(shape)


@operator("mean(Tensor x, int zero_point, int[] dim, bool keepdim) -> Tensor", meta=_mean_meta)
def mean_reference(x: Tensor, zero_point: int, dim: Sequence[int], keepdim: bool) -> Tensor:
    """The mean over some dimensions (none given: all), rounded to a code (``grid.round_mean``); of nothing, zero."""
    axes = _mean_axes(x, dim)
    total = x.to(torch.int64) - zero_point
    if axes:
        total = total.sum(axes, keepdim=keepdim)
    count = math.prod(x.shape[d] for d in axes)
    return _average(total, max(count, 1), zero_point, x.dtype).to(x.dtype).contiguous()


# --- torch's pooling functions on quantized tensors ---------------------------------------------------------------


def _batched(x: QTensor, rank: int, name: str) -> Tensor:
    """The codes with a batch dimension.

    Raises:
        RuntimeError: a per-channel grid, or an input of another rank.
    """
    x._require_per_tensor(name)
    codes = x._codes
    if codes.dim() not in (rank + 1, rank + 2):
        raise RuntimeError(
            f"{name} takes an input of {rank + 1} or {rank + 2} dimensions (a batch is optional), "
            f"got shape {tuple(codes.shape)}"
        )
    return codes if codes.dim() == rank + 2 else codes.unsqueeze(0)


def _wrap(x: QTensor, codes: Tensor, rank: int) -> QTensor:
    return x._with_codes(codes if x._codes.dim() == rank + 2 else codes.squeeze(0))


def _stride_of(stride: Any, kernel: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """torch reads a missing or empty stride as the kernel's size."""
    if stride is None or (isinstance(stride, (tuple, list)) and len(stride) == 0):
        return kernel
    return to_tuple(stride, rank, "stride")


def _max_pool(rank: int) -> Callable[..., QTensor]:
    name = f"max_pool{rank}d"

    def max_pool(
        func: Any,
        input: QTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> QTensor:
        if return_indices:
            raise ValueError(f"{name} on quantized tensors does not return indices: call dequantize() first")
        kernel = to_tuple(kernel_size, rank, "kernel_size")
        codes = torch.ops.zeropoint.max_pool.default(
            _batched(input, rank, name),
            kernel,
            _stride_of(stride, kernel, rank),
            to_tuple(padding, rank, "padding"),
            to_tuple(dilation, rank, "dilation"),
            ceil_mode,
        )
        return _wrap(input, codes, rank)

    return max_pool


def _with_indices(name: str) -> Callable[..., Any]:
    def refuse(func: Any, input: QTensor, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name} on quantized tensors does not return indices: call dequantize() first")

    return refuse


def _avg_pool(rank: int) -> Callable[..., QTensor]:
    name = f"avg_pool{rank}d"

    def avg_pool(
        func: Any,
        input: QTensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> QTensor:
        kernel = to_tuple(kernel_size, rank, "kernel_size")
        codes = torch.ops.zeropoint.avg_pool.default(
            _batched(input, rank, name),
            input.zero_point,
            kernel,
            _stride_of(stride, kernel, rank),
            to_tuple(padding, rank, "padding"),
            ceil_mode,
            count_include_pad,
            divisor_override,
        )
        return _wrap(input, codes, rank)

    return avg_pool


def _output_size(output_size: Any, codes: Tensor, rank: int) -> tuple[int, ...]:
    """One size a dimension; None keeps the input's."""
    wanted = (output_size,) * rank if output_size is None or isinstance(output_size, int) else tuple(output_size)
    sizes = [codes.shape[2 + d] if size is None else size for d, size in enumerate(wanted[:rank])]
    return to_tuple((*sizes, *wanted[rank:]), rank, "output_size")


def _adaptive_avg_pool(rank: int) -> Callable[..., QTensor]:
    def adaptive_avg_pool(func: Any, input: QTensor, output_size: Any) -> QTensor:
        codes = _batched(input, rank, f"adaptive_avg_pool{rank}d")
        sizes = _output_size(output_size, codes, rank)
        return _wrap(input, torch.ops.zeropoint.adaptive_avg_pool.default(codes, input.zero_point, sizes), rank)

    return adaptive_avg_pool


def _adaptive_max_pool(rank: int) -> Callable[..., QTensor]:
    name = f"adaptive_max_pool{rank}d"

    def adaptive_max_pool(func: Any, input: QTensor, output_size: Any, return_indices: bool = False) -> QTensor:
        if return_indices:
            raise ValueError(f"{name} on quantized tensors does not return indices: call dequantize() first")
        codes = _batched(input, rank, name)
        sizes = _output_size(output_size, codes, rank)
        _check_adaptive(codes, sizes)
        result = codes
        for d, out in enumerate(sizes):
            start, end = _adaptive_bounds(codes.shape[2 + d], out, torch.device("cpu"))
            parts = [
                result.narrow(2 + d, s, e - s).amax(2 + d) for s, e in zip(start.tolist(), end.tolist(), strict=True)
            ]
            result = torch.stack(parts, 2 + d) if parts else result.narrow(2 + d, 0, 0)
        return _wrap(input, _like_format(result, codes), rank)

    return adaptive_max_pool


for _rank in (1, 2, 3):
    _which = f"{_rank}d"
    implements(getattr(torch, f"max_pool{_which}"), getattr(F, f"max_pool{_which}"))(_max_pool(_rank))
    implements(getattr(F, f"max_pool{_which}_with_indices"))(_with_indices(f"max_pool{_which}"))
    implements(getattr(F, f"avg_pool{_which}"))(_avg_pool(_rank))
    implements(getattr(F, f"adaptive_avg_pool{_which}"))(_adaptive_avg_pool(_rank))
    implements(getattr(F, f"adaptive_max_pool{_which}"))(_adaptive_max_pool(_rank))
    implements(getattr(F, f"adaptive_max_pool{_which}_with_indices"))(_with_indices(f"adaptive_max_pool{_which}"))


@implements(torch.mean, Tensor.mean)
def _mean(func: Any, input: QTensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> QTensor:
    if dtype is not None:
        raise TypeError(f"mean(dtype={dtype}) is not defined on quantized tensors: call dequantize() first")
    input._require_per_tensor("mean")
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return input._with_codes(torch.ops.zeropoint.mean.default(input._codes, input.zero_point, dims, keepdim))


# --- padding and clamping -----------------------------------------------------------------------------------------


def code_of(x: QTensor, value: float) -> int:
    """The code of a real value on a tensor's per-tensor grid, saturated at its ends.

    Raises:
        ValueError: ``value`` is NaN. RuntimeError: a per-channel grid.
    """
    x._require_per_tensor("code_of")
    real = float(value)
    if math.isnan(real):
        raise ValueError("NaN has no place on a quantized tensor's grid")
    return grid.code_of(real, x.scale, x.zero_point, x.qdtype.qmin, x.qdtype.qmax)


@implements(F.pad)
def _pad(func: Any, input: QTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> QTensor:
    input._require_per_tensor("pad")
    rank = len(pad) // 2
    if len(pad) % 2 or rank > input._codes.dim():
        raise RuntimeError(
            f"pad takes up to {input._codes.dim()} (before, after) pairs for shape {tuple(input.shape)}, "
            f"got {list(pad)}"
        )
    pairs = [p for d in reversed(range(rank)) for p in pad[2 * d : 2 * d + 2]]
    if mode == "constant":
        fill = code_of(input, value) if value else input.zero_point
        return input._with_codes(pad_codes(input._codes, pairs, mode, fill))
    if value is not None and value != 0:
        raise ValueError(f"padding mode {mode!r} takes no value, got {value}")
    if rank not in (input._codes.dim() - 1, input._codes.dim() - 2):
        raise NotImplementedError(
            f"{mode} padding takes one pair a spatial dimension of (N, C, spatial) or (C, spatial), "
            f"got {list(pad)} for shape {tuple(input.shape)}"
        )
    return input._with_codes(pad_codes(input._codes, pairs, mode))


def _clamp_codes(x: QTensor, low: float | None, high: float | None, name: str, inplace: bool) -> QTensor:
    x._require_per_tensor(name)
    bounds = (None if low is None else code_of(x, low), None if high is None else code_of(x, high))
    if inplace:
        x._codes.clamp_(*bounds)
        return x
    return x._with_codes(torch.clamp(x._codes, *bounds))


def _bound(value: Any, name: str) -> float | None:
    if isinstance(value, Tensor):
        if isinstance(value, QTensor) or value.numel() != 1:
            raise TypeError(f"{name} of a quantized tensor takes numbers as bounds, got {value!r}")
        return float(value)
    return None if value is None else float(value)


@implements(
    *(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip, torch.clamp_, Tensor.clamp_, torch.clip_, Tensor.clip_)
)
def _clamp(func: Any, input: QTensor, min: Any = None, max: Any = None) -> QTensor:
    name = func.__name__
    if min is None and max is None:
        raise RuntimeError(f"{name} takes a min, a max, or both")
    return _clamp_codes(input, _bound(min, name), _bound(max, name), name, inplace=name.endswith("_"))


@implements(torch.clamp_min, Tensor.clamp_min, torch.clamp_min_, Tensor.clamp_min_)
def _clamp_min(func: Any, input: QTensor, min: Any) -> QTensor:
    name = func.__name__
    return _clamp_codes(input, _bound(min, name), None, name, inplace=name.endswith("_"))


@implements(torch.clamp_max, Tensor.clamp_max, torch.clamp_max_, Tensor.clamp_max_)
def _clamp_max(func: Any, input: QTensor, max: Any) -> QTensor:
    name = func.__name__
    return _clamp_codes(input, None, _bound(max, name), name, inplace=name.endswith("_"))


@implements(F.hardtanh)
def _hardtanh(func: Any, input: QTensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> QTensor:
    if min_val > max_val:
        raise ValueError(f"hardtanh takes min_val <= max_val, got {min_val} and {max_val}")
    return _clamp_codes(input, min_val, max_val, "hardtanh", inplace)


@implements(F.relu6)
def _relu6(func: Any, input: QTensor, inplace: bool = False) -> QTensor:
    return _clamp_codes(input, 0.0, 6.0, "relu6", inplace)
