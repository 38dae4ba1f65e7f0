"""What every observer shares: factories, buffers that keep their dtype, the code range, and the way to a grid.

May import: ``dtypes``, ``grid``, ``ops.qdq``.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint import grid
from zeropoint.dtypes import QDtype, QScheme, as_qdtype, as_qscheme, per_tensor_affine, quint8
from zeropoint.ops import qdq

__all__ = [
    "ObserverBase",
    "ObservingModule",
    "UniformQuantizationObserverBase",
    "code_range",
    "observed_range",
]


# --- factories ----------------------------------------------------------------------------------------------------


class _PartialWrapper:
    """A class, or another factory, together with constructor arguments: calling it makes a new instance each time.

    Two factories of the same class and the same arguments are equal and have one hash, however they were built up.

    Attributes:
        p: a ``functools.partial`` with the class in ``p.func`` and the arguments in ``p.keywords``.
        callable_args: arguments that are called when an instance is made, for values known only then.
    """

    def __init__(self, p: functools.partial[Any], callable_args: dict[str, Callable[[], Any]] | None = None) -> None:
        self.p = p
        self.callable_args = dict(callable_args or {})

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        late = {name: make() for name, make in self.callable_args.items() if name not in keywords}
        return self.p(*args, **late, **keywords)

    def with_args(self, **keywords: Any) -> _PartialWrapper:
        """The same factory with more, or other, arguments."""
        late = {name: make for name, make in self.callable_args.items() if name not in keywords}
        return _PartialWrapper(functools.partial(self.p.func, *self.p.args, **{**self.p.keywords, **keywords}), late)

    def with_callable_args(self, **keywords: Callable[[], Any]) -> _PartialWrapper:
        """The same factory with arguments that are called each time an instance is made."""
        fixed = {name: value for name, value in self.p.keywords.items() if name not in keywords}
        return _PartialWrapper(
            functools.partial(self.p.func, *self.p.args, **fixed), {**self.callable_args, **keywords}
        )

    def _key(self) -> tuple[Any, ...]:
        keywords = {name: _canonical(value) for name, value in self.p.keywords.items()}
        return self.p.func, self.p.args, keywords, self.callable_args

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, _PartialWrapper) else NotImplemented

    def __hash__(self) -> int:
        func, _, keywords, late = self._key()
        return hash(
            (func, frozenset((name, _hash_or_none(value)) for name, value in keywords.items()), frozenset(late))
        )

    def __repr__(self) -> str:
        name = getattr(self.p.func, "__name__", repr(self.p.func))
        words = [repr(value) for value in self.p.args]
        words += [f"{key}={_show(value)}" for key, value in {**self.p.keywords, **self.callable_args}.items()]
        return f"{name}.with_args({', '.join(words)})"


def _canonical(value: Any) -> Any:
    """torch's scheme objects and ours mean the same argument."""
    try:
        return as_qscheme(value) if type(value).__name__ == "qscheme" else value
    except TypeError:
        return value


def _hash_or_none(value: Any) -> int | None:
    try:
        return hash(value)
    except TypeError:
        return None


def _show(value: Any) -> str:
    if isinstance(value, QScheme):
        return str(value)
    return value.__name__ if isinstance(value, type) else repr(value)


class ObservingModule(nn.Module):
    """Base of observers and fake quantizers: made through factories, with buffers that keep their dtype.

    ``model.half()`` and ``model.to(torch.bfloat16)`` move these buffers but never narrow them: a range kept in
    float16 would drift, and its counts would stop at 65504.
    """

    @classmethod
    def with_args(cls, **keywords: Any) -> _PartialWrapper:
        """A factory: ``MinMaxObserver.with_args(dtype=qint8)()`` makes an instance, a new one at each call."""
        return _PartialWrapper(functools.partial(cls, **keywords))

    @classmethod
    def with_callable_args(cls, **keywords: Callable[[], Any]) -> _PartialWrapper:
        """A factory whose arguments are called each time an instance is made."""
        return _PartialWrapper(functools.partial(cls), keywords)

    def sync(self, group: Any = None) -> None:
        """Gives every process of a ``torch.distributed`` group the statistics of all: see :func:`sync_observers`."""
        from zeropoint.ao.quantization.observers.state import sync_observers  # which knows every kind of observer

        sync_observers(self, group)

    def refresh_grid(self) -> None:
        """Makes a stored grid anew from the statistics; observers store none."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


# --- observers ----------------------------------------------------------------------------------------------------


class ObserverBase(ObservingModule, ABC):
    """Base of all observers: ``forward(x)`` looks at ``x`` and returns it unchanged.

    Args:
        dtype: the dtype that the observed tensor is to get: a quantized dtype, or a float dtype for "leave it".
        is_dynamic: the grid is chosen anew at each call of the converted module, not from calibration.
    """

    dtype: QDtype | torch.dtype

    def __init__(self, dtype: Any, is_dynamic: bool = False) -> None:
        super().__init__()
        self.dtype = dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else as_qdtype(dtype)
        self.is_dynamic = is_dynamic

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Looks at ``x`` and returns it."""

    @abstractmethod
    def calculate_qparams(self, **kwargs: Any) -> Any:
        """Scale and zero point for what was seen so far."""


def code_range(
    qdtype: QDtype, quant_min: int | None, quant_max: int | None, reduce_range: bool = False
) -> tuple[int, int]:
    """The codes a grid may use: those of the dtype, or the given ones, halved at both ends for ``reduce_range``.

    Raises:
        ValueError: the range leaves the dtype, is empty, or does not contain 0.
    """
    low = qdtype.qmin if quant_min is None else int(quant_min)
    high = qdtype.qmax if quant_max is None else int(quant_max)
    if not qdtype.qmin <= low < high <= qdtype.qmax:
        raise ValueError(
            f"quant_min < quant_max must lie in [{qdtype.qmin}, {qdtype.qmax}] for {qdtype}, got [{low}, {high}]"
        )
    if not low <= 0 <= high:
        raise ValueError(f"the code range must contain 0, got [{low}, {high}]")
    return (low // 2, high // 2) if reduce_range else (low, high)


def observed_range(min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both ends and whether anything was seen, of shape [channels]: at least [1], and 0 … 0 where nothing was seen."""
    if min_val.numel() == 0:
        low, high = min_val.new_full((1,), float("inf")), max_val.new_full((1,), float("-inf"))
    else:
        low, high = min_val.reshape(-1), max_val.reshape(-1)
    seen = low <= high
    return torch.where(seen, low, 0.0), torch.where(seen, high, 0.0), seen


class UniformQuantizationObserverBase(ObserverBase):
    """Base of the observers that keep a range and make an affine grid of it.

    Args:
        dtype: :data:`~zeropoint.quint8`, :data:`~zeropoint.qint8` or :data:`~zeropoint.qint32`, or torch's names.
        qscheme: how the grid is laid: ours or torch's scheme objects.
        reduce_range: use half of the codes. Nothing in this package needs it: its kernels are exact over 8 bits.
        quant_min, quant_max: the codes to use; None takes the dtype's. They must contain 0.
        factory_kwargs: ``{"device": ...}``: where the buffers are made.
        eps: the smallest scale.
        is_dynamic: see :class:`ObserverBase`.

    Attributes:
        eps: float32 buffer of shape [1].

    Raises:
        TypeError: an unknown dtype or scheme. ValueError: the code range makes no grid, or a scheme of the wrong kind.
    """

    _version = 3
    eps: Tensor
    _schemes: tuple[QScheme, ...] = tuple(QScheme)

    def __init__(
        self,
        dtype: Any = quint8,
        qscheme: Any = per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = grid.DEFAULT_EPS,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(as_qdtype(dtype), is_dynamic)
        self.qscheme = as_qscheme(qscheme)
        if self.qscheme not in self._schemes:
            names = ", ".join(scheme.name for scheme in self._schemes)
            raise ValueError(f"{type(self).__name__} takes the schemes {names}, got {self.qscheme.name}")
        self.reduce_range = reduce_range
        self.has_customized_qrange = quant_min is not None or quant_max is not None
        self.quant_min, self.quant_max = code_range(self.qdtype, quant_min, quant_max, reduce_range)
        self._device = torch.nn.factory_kwargs(factory_kwargs).get("device")
        self.register_buffer("eps", torch.tensor([eps], dtype=torch.float32, device=self._device))
        self._warned_non_finite = False

    @property
    def qdtype(self) -> QDtype:
        """The quantized dtype that the grid is made for."""
        return as_qdtype(self.dtype)

    def symmetric_zero_point(self) -> int:
        """The code of real zero on a symmetric grid: 0 for signed codes, the middle for unsigned ones (128 of 256)."""
        if self.qdtype.is_signed:
            return 0
        whole = (self.quant_min, self.quant_max) == (self.qdtype.qmin, self.qdtype.qmax)
        return (self.quant_min + self.quant_max + whole) // 2

    def _calculate_qparams(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Scale (float32) and zero point (int32; float32 for floating zero points) of a range, of shape [channels].

        A channel that saw nothing gets (1.0, 0). Reads no value on the host.
        """
        low, high, seen = observed_range(min_val, max_val)
        if self.qscheme.is_symmetric:
            middle = self.symmetric_zero_point()
            scale, zero = grid.symmetric_qparams(low, high, self.quant_min, self.quant_max, middle, self.eps)
        elif self.qscheme is QScheme.per_channel_affine_float_qparams:
            scale, zero = grid.float_qparams(low, high, self.quant_min, self.quant_max, self.eps)
        else:
            scale, zero = grid.affine_qparams(low, high, self.quant_min, self.quant_max, self.eps)
        return torch.where(seen, scale, 1.0), torch.where(seen, zero, 0).to(zero.dtype)

    def _refuse_capture(self) -> None:
        """An observer rounds nothing: the ONNX file would hold the float model, and nobody would know."""
        if qdq.capturing():
            raise RuntimeError(
                f"a model with {type(self).__name__} only observes, so there is nothing to export to ONNX yet: convert "
                "it and take zeropoint.onnx.export, or prepare it with fake quantizers"
            )

    def _warn_non_finite(self) -> None:
        if not self._warned_non_finite:
            self._warned_non_finite = True
            warnings.warn(
                f"{type(self).__name__} saw NaN or infinite values and ignores them: check the calibration data",
                UserWarning,
                stacklevel=4,
            )

    def _warn_unobserved(self) -> None:
        warnings.warn(
            f"{type(self).__name__} has seen no data, so its grid is the default scale 1.0 and zero point 0: "
            "run calibration data through the model first",
            UserWarning,
            stacklevel=3,
        )

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything seen."""

    def reset_min_max_vals(self) -> None:
        """The same as :meth:`reset`, by torch.ao's name."""
        self.reset()
