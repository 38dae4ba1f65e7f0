"""QTensor: integer codes that carry their grid.

A :class:`QTensor` is a direct ``torch.Tensor`` subclass over plain integer storage. What is defined on it stands in
one table, :data:`HANDLERS`; everything else raises ``TypeError``, so codes are never computed on as if they were
values. This file registers what needs no kernel (metadata, shape operations, copies, accessors); the operators with
integer kernels register themselves from ``zeropoint.ops``.

Three ways to make one: quantize a float tensor (``zeropoint.quantize_per_tensor``), wrap codes
(:meth:`QTensor.from_codes`), load one.

May import: ``dtypes``, ``grid``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zeropoint import grid
from zeropoint.dtypes import QDtype, QScheme, as_qdtype

__all__ = ["HANDLERS", "QTensor", "implements", "make_qtensor", "same_grid"]

Handler = Callable[..., Any]
HANDLERS: dict[Any, Handler] = {}
"""What is defined on quantized tensors: torch function → handler called as ``handler(func, *args, **kwargs)``."""

_PlainTorch = torch._C.DisableTorchFunctionSubclass
_H = TypeVar("_H", bound=Handler)


def implements(*functions: Any) -> Callable[[_H], _H]:
    """Registers a handler for torch functions: ``handler(func, *args, **kwargs)`` runs when one meets a QTensor."""

    def register(handler: _H) -> _H:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


def _is_being_faked() -> bool:
    """Whether torch.compile is making its stand-in for an input: that must see the plain storage.

    Code that is itself compiled sees the quantized tensor, as eager code does.
    """
    return not torch.compiler.is_dynamo_compiling() and torch._guards.TracingContext.try_get() is not None


class QTensor(Tensor):
    """A tensor of integer codes on an affine grid: ``real = (code - zero_point) * scale``.

    Attributes:
        qdtype: :class:`~zeropoint.dtypes.QDtype`; ``dtype`` reads the same.
        scale: a float, or a 1-D tensor with one entry a channel.
        zero_point: an int, or a 1-D tensor (integers, or floats for a grid whose zero need not be a code).
        axis: the channel dimension, or None for one grid over the whole tensor.

    Example:
        >>> import torch, zeropoint as zp
        >>> q = zp.quantize_per_tensor(torch.tensor([0.0, 1.0, 2.0]), 0.5, 10, zp.quint8)
        >>> q.int_repr()
        tensor([10, 12, 14], dtype=torch.uint8)
        >>> q.dequantize()
        tensor([0., 1., 2.])
    """

    qdtype: QDtype
    scale: Any
    zero_point: Any
    axis: int | None
    _codes: Tensor

    __hash__ = Tensor.__hash__

    def __new__(cls, *args: Any, **kwargs: Any) -> QTensor:
        raise TypeError("QTensor is made by quantizing a tensor, or from codes with QTensor.from_codes(...)")

    @staticmethod
    def from_codes(
        codes: Tensor, scale: float | Tensor, zero_point: int | Tensor = 0, *, axis: int | None = None
    ) -> QTensor:
        """A quantized tensor over existing codes; the storage is shared, not copied.

        Args:
            codes: int8, uint8 or int32 tensor of any shape and strides.
            scale: a float, or with ``axis`` a 1-D tensor of ``codes.size(axis)`` floats.
            zero_point: an int, or with ``axis`` a 1-D tensor of the same length, of integers or floats.
            axis: the channel dimension of a per-channel grid; negative values count from the end.

        Raises:
            TypeError: codes of another dtype.
            ValueError: a scale or zero point that makes no grid, or lengths that do not fit.
        """
        if isinstance(codes, QTensor):
            raise TypeError("codes must be a plain integer tensor, got a QTensor: pass codes.int_repr()")
        if not isinstance(codes, Tensor):
            raise TypeError(f"codes must be an int8, uint8 or int32 tensor, got {type(codes).__name__}")
        qdtype = as_qdtype(codes.dtype)
        if axis is None:
            if isinstance(scale, Tensor) and scale.numel() != 1:
                raise ValueError(f"a scale of shape {tuple(scale.shape)} needs an axis")
            step = grid.check_scale(scale)  # type: ignore[arg-type]
            zero = grid.check_zero_point(zero_point, qdtype.qmin, qdtype.qmax)  # type: ignore[arg-type]
            return make_qtensor(codes, qdtype, step, zero)
        scales, zero_points, axis = check_channel_grid(codes, scale, zero_point, axis, qdtype)
        return make_qtensor(codes, qdtype, scales, zero_points, axis)

    # --- accessors ---

    @property
    def dtype(self) -> QDtype:  # type: ignore[override]
        """The quantized dtype; :meth:`int_repr` has the plain one."""
        return self._codes.dtype if _is_being_faked() else self.qdtype  # type: ignore[return-value]

    @property
    def is_quantized(self) -> bool:  # type: ignore[override]
        """Always True."""
        return not _is_being_faked()

    def codes(self) -> Tensor:
        """The plain integer tensor that this one wraps: the same storage, so writes show in both."""
        return self._codes

    def int_repr(self) -> Tensor:
        """A copy of the codes as a plain int8, uint8 or int32 tensor."""
        return self._codes.clone()

    def qscheme(self) -> QScheme:  # type: ignore[override]
        """The scheme of the grid, an int that prints as a name."""
        if self.axis is None:
            return QScheme.per_tensor_affine
        if self.zero_point.is_floating_point():
            return QScheme.per_channel_affine_float_qparams
        return QScheme.per_channel_affine

    def q_scale(self) -> float:
        """The scale of a per-tensor grid. Raises RuntimeError for a per-channel one."""
        self._require_per_tensor("q_scale")
        return cast(float, self.scale)

    def q_zero_point(self) -> int:
        """The zero point of a per-tensor grid. Raises RuntimeError for a per-channel one."""
        self._require_per_tensor("q_zero_point")
        return cast(int, self.zero_point)

    def q_per_channel_scales(self) -> Tensor:
        """The scales of a per-channel grid, float64 (float32 with floating zero points)."""
        self._require_per_channel("q_per_channel_scales")
        return cast(Tensor, self.scale)

    def q_per_channel_zero_points(self) -> Tensor:
        """The zero points of a per-channel grid, int64 (float32 where they are floating)."""
        self._require_per_channel("q_per_channel_zero_points")
        return cast(Tensor, self.zero_point)

    def q_per_channel_axis(self) -> int:
        """The channel dimension of a per-channel grid."""
        self._require_per_channel("q_per_channel_axis")
        return cast(int, self.axis)

    def _require_per_tensor(self, name: str) -> None:
        if self.axis is not None:
            raise RuntimeError(
                f"{name} is defined on per-tensor grids, this tensor has {self.qscheme()} along axis {self.axis}: "
                "read q_per_channel_scales() and q_per_channel_zero_points(), or quantize it again with "
                "quantize_per_tensor(x.dequantize(), scale, zero_point, dtype)"
            )

    def _require_per_channel(self, name: str) -> None:
        if self.axis is None:
            raise RuntimeError(
                f"{name} is defined on per-channel grids, this tensor has {self.qscheme()}: "
                "read q_scale() and q_zero_point()"
            )

    # --- printing, copying, saving ---

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grid_text = f"scale={self.scale}, zero_point={self.zero_point}"
        if self.axis is not None:
            grid_text += f", axis={self.axis}"
        if type(self._codes) is not Tensor:
            values = f"shape={tuple(self._codes.shape)}"
        else:
            scale, zero_point = self._broadcast_grid()
            values = str(grid.dequantize(self._codes, scale, zero_point, torch.float32)).removeprefix("tensor(")
            values = values.removesuffix(")")
        return f"QTensor({values}, dtype={self.qdtype}, {grid_text})"

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec) if spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            memo[id(self)] = self._with_codes(self._codes.clone())
        return cast(QTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A channel grid is written as lists: in the legacy format tensors have no values yet when this is checked.
        scale, zero_point = self.scale, self.zero_point
        if self.axis is not None:
            scale, zero_point = scale.tolist(), zero_point.tolist()
        return _rebuild_qtensor, (self._codes, scale, zero_point, self.axis)

    # --- helpers ---

    def _with_codes(self, codes: Tensor) -> QTensor:
        """Other codes on this tensor's grid; per-channel parameters are kept as they are."""
        return make_qtensor(codes, self.qdtype, self.scale, self.zero_point, self.axis)

    def _broadcast_grid(self) -> tuple[Any, Any]:
        """Scale and zero point in a shape that broadcasts against the codes."""
        if self.axis is None:
            return self.scale, self.zero_point
        shape = [1] * self._codes.dim()
        shape[self.axis] = -1
        return self.scale.reshape(shape), self.zero_point.reshape(shape)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            raise TypeError(_undefined(_name_of(func)))
        return handler(func, *args, **(kwargs or {}))


class _TracedQTensor(QTensor):
    """A QTensor over a tensor that is not plain: a fake or functional one, met while torch.export traces a model."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise TypeError(_undefined(str(func)))


def make_qtensor(
    codes: Tensor, qdtype: QDtype, scale: float | Tensor, zero_point: int | Tensor, axis: int | None = None
) -> QTensor:
    """A QTensor from parts that are known to fit: no checks. The storage of ``codes`` is shared."""
    if type(codes) is Tensor:
        tensor = Tensor._make_subclass(QTensor, codes)
    else:
        tensor = Tensor._make_wrapper_subclass(
            _TracedQTensor, codes.shape, strides=codes.stride(), dtype=codes.dtype, device=codes.device
        )
    tensor.qdtype = qdtype
    tensor.scale = scale
    tensor.zero_point = zero_point
    tensor.axis = axis
    tensor._codes = codes
    return tensor


def check_channel_grid(
    x: Tensor, scales: Any, zero_points: Any, axis: int, qdtype: QDtype
) -> tuple[Tensor, Tensor, int]:
    """Checks a per-channel grid for ``x`` and brings it to its stored form.

    Returns:
        float64 scales and int64 zero points (both float32 where zero points are floating), and a non-negative axis.

    Raises:
        TypeError, ValueError: naming what does not fit.
    """
    if not isinstance(scales, Tensor) or not isinstance(zero_points, Tensor):
        raise TypeError("a per-channel grid takes tensors of scales and zero points")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis {axis} is out of range for a tensor of {x.dim()} dimensions")
    axis %= x.dim()
    if not scales.is_floating_point():
        raise TypeError(f"scales must be floating, got {scales.dtype}")
    if zero_points.dtype == torch.bool or zero_points.is_complex():
        raise TypeError(f"zero_points must be integers or floats, got {zero_points.dtype}")
    channels = x.shape[axis]
    if scales.shape != (channels,) or zero_points.shape != (channels,):
        raise ValueError(
            f"axis {axis} has {channels} channels, so scales and zero_points must have shape ({channels},), "
            f"got {tuple(scales.shape)} and {tuple(zero_points.shape)}"
        )
    if scales.device != x.device or zero_points.device != x.device:
        raise RuntimeError(
            f"scales ({scales.device}) and zero_points ({zero_points.device}) must be on the tensor's device {x.device}"
        )
    if channels:
        grid.check_scale(scales.min().item(), "every scale")
        grid.check_scale(scales.max().item(), "every scale")
        if bool(torch.isnan(scales).any()):
            raise ValueError("every scale must be finite and above 0, got nan")
    if zero_points.is_floating_point():
        if not bool(torch.isfinite(zero_points).all()):
            raise ValueError("every zero_point must be finite")
        return scales.to(torch.float32), zero_points.to(torch.float32), axis
    if channels:
        for extreme in (zero_points.min(), zero_points.max()):
            grid.check_zero_point(int(extreme), qdtype.qmin, qdtype.qmax, "every zero_point")
    return scales.to(torch.float64), zero_points.to(torch.int64), axis


def same_grid(a: QTensor, b: QTensor) -> bool:
    """Whether two tensors lie on one grid: same dtype, scheme, axis, and equal parameters bit for bit."""
    if a.qdtype != b.qdtype or a.axis != b.axis:
        return False
    if a.axis is None:
        return bool(a.scale == b.scale and a.zero_point == b.zero_point)
    return (
        a.zero_point.dtype == b.zero_point.dtype
        and torch.equal(a.scale, b.scale)
        and torch.equal(a.zero_point, b.zero_point)
    )


def _rebuild_qtensor(codes: Tensor, scale: Any, zero_point: Any, axis: int | None) -> QTensor:
    """What a pickle calls. The parts come from a file, so they are checked."""
    if axis is not None:
        floating = any(isinstance(zero, float) for zero in zero_point)
        scale = torch.tensor(scale, dtype=torch.float64, device=codes.device)
        zero_point = torch.tensor(zero_point, dtype=torch.float64 if floating else torch.int64, device=codes.device)
    return QTensor.from_codes(codes, scale, zero_point, axis=axis)


torch.serialization.add_safe_globals([_rebuild_qtensor])


# --- errors -------------------------------------------------------------------------------------------------------

_CURES = {
    "add": "use FloatFunctional().add in the model, or dequantize() first",
    "mul": "use FloatFunctional().mul in the model, or dequantize() first",
    "cat": "use FloatFunctional().cat in the model, or dequantize() first",
    "storage": "call untyped_storage(), or codes() for the integers and their storage",
}


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"attribute {getattr(getattr(func, '__self__', None), '__name__', '?')!r}"
    return cast(str, name)


def _undefined(name: str) -> str:
    plain = name.strip("_").removeprefix("i").removeprefix("r") if name.startswith("__") else name.strip("_")
    cure = _CURES.get(plain, "call dequantize() first to compute on real values, or int_repr() to compute on codes")
    return f"{name} is not defined on quantized tensors: {cure}"


def _operator_error(name: str) -> Callable[..., Any]:
    def refuse(self: QTensor, *args: Any) -> Any:
        raise TypeError(_undefined(name))

    refuse.__name__ = name
    return refuse


# Python turns a TypeError from a tensor's operator into "unsupported operand", or for == into False: say it here.
for _operator in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift"),
    *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge"),
):
    for _prefix in ("", "i", "r"):
        _dunder = f"__{_prefix}{_operator}__"
        if hasattr(Tensor, _dunder):
            setattr(QTensor, _dunder, _operator_error(_dunder))


# --- metadata -----------------------------------------------------------------------------------------------------


def _plain(func: Any, *args: Any, **kwargs: Any) -> Any:
    with _PlainTorch():
        return func(*args, **kwargs)


_METADATA_ATTRIBUTES = (
    *("shape", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "names", "is_sparse"),
    *("is_sparse_csr", "is_mkldnn", "is_nested", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_vulkan"),
    *("is_xla", "is_mtia", "is_ipu", "is_maia", "_version", "_base", "output_nr", "itemsize", "nbytes", "grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "volatile", "_cdata", "is_inference"),
)
_METADATA_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "storage_offset", "data_ptr"),
    *("untyped_storage", "element_size", "get_device", "is_shared", "is_pinned"),
    *("__len__", "is_inference", "_is_view", "_is_zerotensor", "is_neg", "is_conj", "dim_order", "is_set_to"),
    *("is_same_size", "requires_grad_", "_has_symbolic_sizes_strides", "has_names", "is_signed", "is_coalesced"),
)


def _getter(name: str) -> Any:
    """What ``__torch_function__`` is called with when a tensor's attribute is read."""
    return getattr(Tensor, name).__get__


for _name in _METADATA_ATTRIBUTES:
    if hasattr(getattr(Tensor, _name, None), "__get__"):
        HANDLERS[_getter(_name)] = _plain
HANDLERS[vars(torch._C.TensorBase)["requires_grad"].__set__] = _plain
for _name in _METADATA_METHODS:
    if callable(getattr(Tensor, _name, None)):
        HANDLERS[getattr(Tensor, _name)] = _plain
for _name in ("numel", "is_same_size", "is_inference", "is_neg", "is_conj", "_is_zerotensor", "is_signed"):
    HANDLERS[getattr(torch, _name)] = _plain


@implements(Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex)
def _is_false(func: Any, x: QTensor) -> bool:
    return False


@implements(_getter("dtype"))
def _dtype(func: Any, x: QTensor) -> QDtype:
    return x.dtype


# --- shape operations ---------------------------------------------------------------------------------------------


def _on_codes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = tuple(a._codes if isinstance(a, QTensor) else a for a in args)
    kwargs = {k: v._codes if isinstance(v, QTensor) else v for k, v in kwargs.items()}
    return func(*args, **kwargs)


_SHAPE_FUNCTIONS: tuple[Any, ...] = (
    *(Tensor.view, Tensor.view_as, Tensor.reshape, Tensor.reshape_as, Tensor.flatten, Tensor.unflatten, Tensor.ravel),
    *(Tensor.permute, Tensor.transpose, Tensor.t, Tensor.movedim, Tensor.moveaxis, Tensor.swapaxes, Tensor.swapdims),
    *(Tensor.squeeze, Tensor.unsqueeze, Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, Tensor.narrow),
    *(Tensor.select, Tensor.__getitem__, Tensor.index_select, Tensor.split, Tensor.split_with_sizes, Tensor.chunk),
    *(Tensor.tensor_split, Tensor.unbind, Tensor.repeat, Tensor.repeat_interleave, Tensor.tile, Tensor.flip),
    *(Tensor.roll, Tensor.take_along_dim, Tensor.gather, Tensor.unfold, Tensor.diagonal, Tensor.masked_select),
    *(_getter("T"), _getter("mT"), Tensor.adjoint, Tensor.rot90, Tensor.hsplit, Tensor.vsplit, Tensor.dsplit),
    *(torch.reshape, torch.flatten, torch.unflatten, torch.ravel, torch.permute, torch.transpose, torch.t),
    *(torch.movedim, torch.moveaxis, torch.swapaxes, torch.swapdims, torch.squeeze, torch.unsqueeze, torch.narrow),
    *(torch.select, torch.index_select, torch.split, torch.split_with_sizes, torch.chunk, torch.tensor_split),
    *(torch.unbind, torch.repeat_interleave, torch.tile, torch.flip, torch.roll, torch.take_along_dim, torch.gather),
    *(torch.broadcast_to, torch.diagonal, torch.masked_select, torch.rot90, torch.channel_shuffle),
    *(torch.nn.functional.channel_shuffle, torch.pixel_shuffle, torch.pixel_unshuffle),
)


@implements(*_SHAPE_FUNCTIONS)
def _shape_op(func: Any, x: QTensor, *args: Any, **kwargs: Any) -> Any:
    """Moves codes about. A per-channel grid moves along, or the call is refused where channels would mix."""
    if not isinstance(x, QTensor):  # an index that is a QTensor
        raise TypeError(_undefined(_name_of(func)))
    moved = _on_codes(func, (x, *args), kwargs)
    if x.axis is None:
        if isinstance(moved, Tensor):
            return x._with_codes(moved)
        return type(moved)(x._with_codes(part) for part in moved)
    # Send the channel number of every element through the same movement, and read off where the channels went.
    shape = [1] * x._codes.dim()
    shape[x.axis] = -1
    numbers = torch.arange(x._codes.shape[x.axis], device=x._codes.device).view(shape).expand(x._codes.shape)
    numbers_moved = _on_codes(func, (numbers, *args), kwargs)
    if isinstance(moved, Tensor):
        return _follow_channels(func, x, moved, numbers_moved)
    return type(moved)(_follow_channels(func, x, part, n) for part, n in zip(moved, numbers_moved, strict=True))


def _follow_channels(func: Any, x: QTensor, codes: Tensor, numbers: Tensor) -> QTensor:
    """The grid of moved codes, from the channel number that each of them had before."""
    if numbers.numel() == 0 or bool((numbers == numbers.reshape(-1)[0]).all()):
        return _one_channel(x, codes, numbers)
    for axis in range(codes.dim()):
        lane = numbers.movedim(axis, -1).reshape(-1, codes.shape[axis])[0]
        shape = [1] * codes.dim()
        shape[axis] = -1
        if len(set(lane.tolist())) == lane.numel() and bool((numbers == lane.view(shape)).all()):
            return make_qtensor(codes, x.qdtype, x.scale[lane], x.zero_point[lane], axis)
    raise TypeError(
        f"{_name_of(func)} would mix the channels of axis {x.axis} of a per-channel quantized tensor: "
        "call dequantize() first"
    )


def _one_channel(x: QTensor, codes: Tensor, numbers: Tensor) -> QTensor:
    """All codes come from one channel, or there are none; a dimension of that size holds the per-channel grid."""
    lone = numbers.reshape(-1)[:1]
    for axis in range(codes.dim()):
        if codes.shape[axis] == lone.numel():
            return make_qtensor(codes, x.qdtype, x.scale[lone], x.zero_point[lone], axis)
    if lone.numel() == 0 or x.zero_point.is_floating_point():
        raise TypeError(
            "a floating zero point needs a channel dimension: select it with a slice, or dequantize() first"
        )
    return make_qtensor(codes, x.qdtype, float(x.scale[lone]), int(x.zero_point[lone]))


# --- copies, devices ----------------------------------------------------------------------------------------------


@implements(
    *(Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.cpu, Tensor.cuda, Tensor.pin_memory),
    *(torch.clone, torch.detach, Tensor.share_memory_),
)
def _copy(func: Any, x: QTensor, *args: Any, **kwargs: Any) -> QTensor:
    return _on_device_of(x, func(x._codes, *args, **kwargs))


@implements(Tensor.to)
def _to(func: Any, x: QTensor, *args: Any, **kwargs: Any) -> QTensor:
    args = tuple(a._codes if isinstance(a, QTensor) else a for a in args)
    wanted = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, (torch.dtype, QDtype))]
    if any(dtype != x.qdtype for dtype in wanted):
        raise TypeError(f"to({wanted[0]}) is not defined on quantized tensors: call dequantize() or int_repr() first")
    args = tuple(a for a in args if not isinstance(a, (torch.dtype, QDtype)))
    kwargs.pop("dtype", None)
    return _on_device_of(x, func(x._codes, *args, **kwargs) if args or kwargs else x._codes)


def _on_device_of(x: QTensor, codes: Tensor) -> QTensor:
    if x.axis is None:
        return x._with_codes(codes)
    return make_qtensor(codes, x.qdtype, x.scale.to(codes.device), x.zero_point.to(codes.device), x.axis)


@implements(Tensor.copy_)
def _copy_(func: Any, x: Any, source: Any, non_blocking: bool = False) -> QTensor:
    if not isinstance(x, QTensor):
        raise TypeError("copy_ from a quantized tensor into a plain one: call dequantize() on the source first")
    if not isinstance(source, QTensor):
        raise TypeError("copy_ from a plain tensor into a quantized one: quantize the source first")
    if source.qdtype != x.qdtype:
        raise TypeError(f"copy_ needs one dtype, got {source.qdtype} into {x.qdtype}")
    if source.axis is not None and source.shape != x.shape:
        raise ValueError(f"copy_ of a per-channel tensor needs equal shapes, got {source.shape} into {x.shape}")
    x._codes.copy_(source._codes, non_blocking)
    for name in ("scale", "zero_point"):
        value = getattr(source, name)
        setattr(x, name, value.to(x._codes.device, copy=True) if isinstance(value, Tensor) else value)
    x.axis = source.axis
    return x


@implements(torch.equal, Tensor.equal)
def _equal(func: Any, a: Any, b: Any) -> bool:
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)):
        raise TypeError("equal of a quantized and a plain tensor: call dequantize() first")
    return same_grid(a, b) and torch.equal(a._codes, b._codes)


@implements(Tensor.__setitem__)
def _setitem(func: Any, x: QTensor, index: Any, value: Any) -> None:
    if not isinstance(x, QTensor) or not isinstance(value, QTensor):
        raise TypeError("only a quantized tensor can be written into a quantized tensor: quantize the value first")
    if x.axis is not None or not same_grid(x, value):
        raise ValueError("only values on the same per-tensor grid can be written into a quantized tensor")
    x._codes[index] = value._codes


@implements(Tensor.__iter__)
def _iter(func: Any, x: QTensor) -> Any:
    return iter(x.unbind(0))


@implements(torch.stack, torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack, torch.dstack)
def _join(func: Any, tensors: Any, *args: Any, **kwargs: Any) -> QTensor:
    """Joins tensors that lie on one per-tensor grid; other grids need FloatFunctional, which knows the output's."""
    parts = list(tensors)
    if not all(isinstance(part, QTensor) for part in parts):
        raise TypeError(f"{_name_of(func)} of quantized and plain tensors: quantize all of them, or dequantize() first")
    first = cast(QTensor, parts[0])
    if first.axis is not None or not all(same_grid(first, part) for part in parts):
        raise ValueError(f"{_name_of(func)} needs tensors on one per-tensor grid: {_CURES['cat']}")
    return first._with_codes(func([part._codes for part in parts], *args, **kwargs))


@implements(Tensor.dequantize, torch.dequantize)
def _dequantize(func: Any, x: QTensor) -> Tensor:
    return x.dequantize()


@implements(torch.int_repr, torch.q_scale, torch.q_zero_point, torch.q_per_channel_scales)
def _accessor(func: Any, x: QTensor) -> Any:
    return getattr(x, func.__name__)()


@implements(torch.q_per_channel_zero_points, torch.q_per_channel_axis)
def _channel_accessor(func: Any, x: QTensor) -> Any:
    return getattr(x, func.__name__)()


@implements(_getter("is_quantized"))
def _is_quantized(func: Any, x: QTensor) -> bool:
    return True
