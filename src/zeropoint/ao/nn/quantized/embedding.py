"""Embeddings whose rows are 8- or 4-bit codes, each row on a grid of its own.

May import: ``tensor``, ``dtypes``, and what quantized modules share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._registry import dynamic_twin_of, static_twin_of
from zeropoint.ao.nn.quantized._base import QuantizedModule
from zeropoint.ao.nn.quantized._from_float import has_seen, observed_grid, require_class
from zeropoint.dtypes import as_qdtype, quint8
from zeropoint.ops.embedding import MODES, pack_rows, unpack_rows
from zeropoint.tensor import QTensor, make_qtensor

__all__ = ["Embedding", "EmbeddingBag"]

_E = TypeVar("_E", bound="_Rows")


class _RowsView(QTensor):
    """The weight of an embedding: a quantized tensor that may be called, as ``torch.ao``'s ``weight()`` is."""

    def __call__(self) -> QTensor:
        return make_qtensor(self._codes, self.qdtype, self.scale, self.zero_point, self.axis)


def _bits_of(dtype: Any) -> int:
    """8 for quint8, 4 for torch's quint4x2 or its name."""
    if str(dtype).rpartition(".")[2] == "quint4x2":
        return 4
    if as_qdtype(dtype) != quint8:
        raise ValueError(f"embeddings have quint8 or quint4x2 rows, got dtype={dtype}")
    return 8


class _Rows(QuantizedModule):
    """A table of rows.

    Its state is flat plain tensors: ``weight`` (uint8; with 4 bits two codes a byte, the first in the low half),
    ``weight_scale`` and ``weight_zero_point`` (float32, one a row). The dtype of what it returns is no part of it.
    """

    num_embeddings: int
    embedding_dim: int
    bits: int
    output_dtype: torch.dtype = torch.float32
    """Of what the module returns: sums are float32, and are rounded to it. ``from_float`` and ``to`` set it."""

    def _init_rows(self, num_embeddings: int, embedding_dim: int, weight: Any, dtype: Any) -> None:
        if min(num_embeddings, embedding_dim) < 0:
            raise ValueError(f"{type(self).__name__} takes sizes from 0 up, got {num_embeddings}, {embedding_dim}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.bits = _bits_of(dtype)
        codes = torch.zeros(num_embeddings, embedding_dim, dtype=torch.uint8)
        self._buffers["weight"] = pack_rows(codes, self.bits)
        self._buffers["weight_scale"] = torch.ones(num_embeddings)
        self._buffers["weight_zero_point"] = torch.zeros(num_embeddings)
        if weight is not None:
            self.set_weight(weight)

    @property
    def weight(self) -> QTensor:
        """The rows as a quint8 tensor (num_embeddings, embedding_dim), unpacked; callable."""
        codes = unpack_rows(cast(Tensor, self._buffers["weight"]), self.bits, self.embedding_dim)
        scale, zero_point = (
            cast(Tensor, self._buffers["weight_scale"]),
            cast(Tensor, self._buffers["weight_zero_point"]),
        )
        if type(codes) is not Tensor or codes.is_meta:
            return make_qtensor(codes, quint8, scale, zero_point, 0)
        view = Tensor._make_subclass(_RowsView, codes)
        view.qdtype, view._codes = quint8, codes
        view.scale, view.zero_point, view.axis = scale, zero_point, 0
        return view

    def set_weight(self, w: Tensor) -> None:
        """Takes new rows.

        Args:
            w: a quint8 tensor of the module's shape with one grid a row; codes up to 15 if the module has 4 bits.

        Raises:
            TypeError: not quint8. ValueError: another shape, one grid for all rows, or codes above 15.
        """
        codes, scale, zero_point = self._split(w)
        self._buffers["weight"] = pack_rows(codes, self.bits)
        self._buffers["weight_scale"] = scale
        self._buffers["weight_zero_point"] = zero_point

    def _split(self, w: Any) -> tuple[Tensor, Tensor, Tensor]:
        name, cure = self._where(), "quantize_per_channel(weight, scales, zero_points, 0, zeropoint.quint8) makes them"
        if not isinstance(w, Tensor) or not (isinstance(w, QTensor) or w.is_quantized) or w.dtype != quint8:
            seen = w.dtype if isinstance(w, Tensor) else type(w).__name__
            raise TypeError(f"{name} takes quint8 rows, got {seen}: {cure}")
        if w.shape != (self.num_embeddings, self.embedding_dim) or "per_channel" not in str(w.qscheme()):
            raise ValueError(
                f"{name} takes rows of shape ({self.num_embeddings}, {self.embedding_dim}) with one grid each, got "
                f"shape {tuple(w.shape)}, {w.qscheme()}: {cure}"
            )
        codes = w.int_repr()
        if self.bits == 4 and codes.numel() and int(codes.max()) > 15:
            raise ValueError(
                f"{name} has rows of 4 bits, got codes up to {int(codes.max())}: make it with dtype=zeropoint.quint8"
            )
        scale, zero_point = (t.to(torch.float32) for t in (w.q_per_channel_scales(), w.q_per_channel_zero_points()))
        return codes.contiguous(), scale, zero_point

    def _operands(self) -> tuple[Any, ...]:
        buffers = self._buffers
        parts = (buffers["weight"], buffers["weight_scale"], buffers["weight_zero_point"])
        return (*parts, self.bits, self.embedding_dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Grids keep their precision; what the float module would return after half() and the like is returned here.
        self.output_dtype = fn(torch.empty(0, dtype=self.output_dtype)).dtype
        return super()._apply(fn, recurse)

    def _check_indices(self, indices: Any) -> None:
        if not isinstance(indices, Tensor) or indices.dtype not in (torch.int32, torch.int64):
            seen = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"{self._where()} takes int32 or int64 indices, got {seen}: convert them with .long()")

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        super()._adapt_state(state_dict, prefix)
        state_dict.pop(f"{prefix}_packed_params.dtype", None)
        rows = state_dict.pop(f"{prefix}_packed_params._packed_weight", None)
        if rows is not None:
            state_dict[f"{prefix}weight"] = rows
        value = state_dict.get(f"{prefix}weight")
        if isinstance(value, Tensor) and (isinstance(value, QTensor) or value.is_quantized):
            codes, scale, zero_point = self._split(value)
            state_dict[f"{prefix}weight"] = pack_rows(codes, self.bits)
            state_dict[f"{prefix}weight_scale"] = scale
            state_dict[f"{prefix}weight_zero_point"] = zero_point

    def extra_repr(self) -> str:
        rest = "" if self.output_dtype == torch.float32 else f", output_dtype={self.output_dtype}"
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}{rest}"

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_float(cls: type[_E], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _E:
        """The quantized twin of a float or QAT module; it returns the dtype of the module's weights.

        Args:
            mod: the float module of the same name in ``torch.nn``, or its QAT twin. A qconfig whose weights have
                floating zero points chooses the rows' grids (``float_qparams_weight_only_qconfig``, or ``…_4bit``);
                with any other, such as a model's default one, rows get 8 bits.
            use_precomputed_fake_quant: keep the grids that ``mod.weight_fake_quant`` holds.

        Raises:
            TypeError: another class. ValueError: ``max_norm``, which changes the weights at every call.
        """
        require_class(mod, (_FLOAT[cls],), cls)
        source: Any = mod
        if source.max_norm is not None:
            raise ValueError(f"{type(mod).__name__} with max_norm={source.max_norm} changes its weights at every call")
        observer = getattr(mod, "weight_fake_quant", None)
        trained = observer is not None and has_seen(observer)
        if observer is None:
            observer = _row_observer(getattr(mod, "qconfig", None)).to(source.weight.device)
        values = source.weight.detach().to(torch.float32)
        if not trained:
            observer(values)
        scale, zero_point = (
            t.to(values.device, torch.float32) for t in observed_grid(observer, use_precomputed_fake_quant)
        )
        four = int(observer.quant_max) <= 15
        twin = cls(
            source.num_embeddings,
            source.embedding_dim,
            dtype="quint4x2" if four else quint8,
            **cls._options(mod),
        )
        low, high = int(observer.quant_min), int(observer.quant_max)
        codes = torch.ops.zeropoint.quantize_per_channel.default(values, scale, zero_point, 0, low, high, torch.uint8)
        twin.output_dtype = source.weight.dtype
        twin.set_weight(make_qtensor(codes, quint8, scale, zero_point, 0))
        return twin


def _row_observer(qconfig: Any) -> Any:
    # Imported late: that package imports this one for its mappings.
    from zeropoint.ao.quantization.observer import default_float_qparams_observer

    observer = None if qconfig is None else qconfig.weight()
    scheme = getattr(observer, "qscheme", None)
    if str(getattr(scheme, "name", scheme)) == "per_channel_affine_float_qparams":
        return observer
    return default_float_qparams_observer()


@dynamic_twin_of(nn.Embedding)
@static_twin_of(nn.Embedding)
class Embedding(_Rows):
    """A look-up table of quantized rows that gives floats.

    Args:
        num_embeddings, embedding_dim: how many rows there are, and their length.
        padding_idx: kept for reference; what counts is the row itself.
        max_norm, norm_type, scale_grad_by_freq, sparse: as ``torch.ao`` takes them; they concern training, so only
            ``max_norm=None`` is accepted.
        _weight: the rows, quint8 with one grid each.
        dtype: ``quint8``, or torch's ``quint4x2`` or its name: rows of 4-bit codes, two a byte.

    Attributes:
        output_dtype: of what it returns: float32, or that of the float module that it was made from.
        weight: quint8 tensor (num_embeddings, embedding_dim) with one grid a row; callable.

    Raises:
        ValueError: another dtype, or ``max_norm``.

    Example:
        >>> import torch
        >>> from zeropoint.ao.nn import quantized as nnq
        >>> nnq.Embedding.from_float(torch.nn.Embedding(10, 4))(torch.tensor([[1, 2]])).shape
        torch.Size([1, 2, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        dtype: Any = quint8,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise ValueError("quantized Embedding takes no max_norm: its rows do not change")
        self.padding_idx = padding_idx
        self._init_rows(num_embeddings, embedding_dim, _weight, dtype)

    def forward(self, indices: Tensor) -> Tensor:
        """Rows ``(…, embedding_dim)`` of ``output_dtype`` at int32 or int64 indices ``(…)``.

        Raises:
            TypeError: other indices. IndexError, RuntimeError: indices that are no rows.
        """
        self._check_indices(indices)
        rows: Tensor = torch.ops.zeropoint.embedding.default(indices, *self._operands())
        return rows.to(self.output_dtype)

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {"padding_idx": mod.padding_idx}


@dynamic_twin_of(nn.EmbeddingBag)
@static_twin_of(nn.EmbeddingBag)
class EmbeddingBag(_Rows):
    """Sums, means or maxima of bags of quantized rows, computed in float32. An empty bag gives zeros.

    Args:
        num_embeddings, embedding_dim: how many rows there are, and their length.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: the last offset is the end of the last bag, not the start of another.
        padding_idx: an index that does not count.
        max_norm, norm_type, scale_grad_by_freq, sparse, _weight, dtype: as for :class:`Embedding`.

    Raises:
        ValueError: another mode or dtype, or ``max_norm``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "sum",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        dtype: Any = quint8,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None:
            raise ValueError("quantized EmbeddingBag takes no max_norm: its rows do not change")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx
        self._init_rows(num_embeddings, embedding_dim, _weight, dtype)

    def forward(
        self, indices: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """``(bags, embedding_dim)`` of ``output_dtype``.

        Args:
            indices: ``(bags, length)``, or ``(n,)`` with ``offsets``.
            offsets: where in ``indices`` each bag starts, from 0, rising; one more with ``include_last_offset``.
            per_sample_weights: of the shape of ``indices``, for sums: multiply the rows.

        Raises:
            TypeError: dtypes that do not fit. ValueError: shapes and offsets that do not fit.
        """
        self._check_indices(indices)
        bounds = self._bounds(indices, offsets)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise ValueError(f"per_sample_weights go with mode='sum', this module has mode={self.mode!r}")
            if per_sample_weights.shape != indices.shape:
                raise ValueError(
                    f"per_sample_weights must have the shape of the indices, {tuple(indices.shape)}, got "
                    f"{tuple(per_sample_weights.shape)}"
                )
            per_sample_weights = per_sample_weights.to(torch.float32).reshape(-1)
        rows: Tensor = torch.ops.zeropoint.embedding_bag.default(
            indices.reshape(-1), bounds, *self._operands(), self.mode, per_sample_weights, self.padding_idx
        )
        return rows.to(self.output_dtype)

    def _bounds(self, indices: Tensor, offsets: Tensor | None) -> Tensor:
        """Where the bags begin and end, int64 of one more than there are bags."""
        if indices.dim() == 2:
            if offsets is not None:
                raise ValueError("EmbeddingBag takes no offsets with indices of two dimensions: every row is a bag")
            return torch.arange(indices.shape[0] + 1, device=indices.device) * indices.shape[1]
        if indices.dim() != 1:
            raise ValueError(f"EmbeddingBag takes indices of one or two dimensions, got shape {tuple(indices.shape)}")
        if offsets is None:
            raise ValueError("EmbeddingBag takes offsets with indices of one dimension: where each bag starts")
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"offsets must be 1-D integers, got {offsets.dtype} of shape {tuple(offsets.shape)}")
        starts = offsets.to(torch.int64)
        if self.include_last_offset:
            if not starts.numel():
                raise ValueError("offsets with include_last_offset hold at least the end of the indices, got none")
            bounds = starts
        else:
            bounds = torch.cat((starts, starts.new_tensor([indices.shape[0]])))
        if torch.compiler.is_compiling() or not starts.numel():
            return bounds
        if int(starts[0]) != 0 or bool((bounds[1:] < bounds[:-1]).any()) or int(bounds[-1]) > indices.shape[0]:
            raise ValueError(
                f"offsets must rise from 0 to at most the {indices.shape[0]} indices, got {starts.tolist()[:16]}"
            )
        return bounds

    @classmethod
    def _options(cls, mod: Any) -> dict[str, Any]:
        return {name: getattr(mod, name) for name in ("mode", "include_last_offset", "padding_idx")}


_FLOAT: dict[type[_Rows], type[nn.Module]] = {Embedding: nn.Embedding, EmbeddingBag: nn.EmbeddingBag}
