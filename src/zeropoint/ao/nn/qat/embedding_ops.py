"""Embeddings that simulate quantized rows while they train.

May import: what QAT modules share.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn._registry import converts_to
from zeropoint.ao.nn.qat._base import WeightSimulation
from zeropoint.ao.nn.quantized._from_float import require_class

__all__ = ["Embedding", "EmbeddingBag"]

_E = TypeVar("_E", bound="_QATEmbedding")

_OPTIONS = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class _QATEmbedding(WeightSimulation):
    """What both embeddings share: rows, quantized one by one, with floating zero points."""

    OPTIONS: tuple[str, ...]
    FLOAT_CLASS: type[nn.Module]
    weight: Any
    num_embeddings: int
    embedding_dim: int

    def _simulate_rows(self, qconfig: Any) -> None:
        if qconfig is None:
            from zeropoint.ao.quantization.qconfig import default_embedding_qat_qconfig

            qconfig = default_embedding_qat_qconfig
        self._simulate(qconfig, self.weight.device)
        scheme = getattr(self.weight_fake_quant, "qscheme", None)
        if scheme is None or scheme.name != "per_channel_affine_float_qparams":
            raise ValueError(
                f"{type(self).__name__} needs a qconfig whose weights have floating zero points, such as "
                f"default_embedding_qat_qconfig; got {getattr(scheme, 'name', scheme)}"
            )

    @classmethod
    def from_float(cls: type[_E], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _E:
        """The QAT twin of a float module; it shares the parameter object.

        Raises:
            TypeError: another class. ValueError: a qconfig without floating zero points.
        """
        require_class(mod, (cls.FLOAT_CLASS,), cls)
        source: Any = mod
        options = {name: getattr(source, name) for name in cls.OPTIONS}
        make: Any = cls
        twin: _E = make(
            source.num_embeddings,
            source.embedding_dim,
            **options,
            qconfig=getattr(mod, "qconfig", None),
            device=source.weight.device,
            dtype=source.weight.dtype,
        )
        twin.weight = source.weight
        twin.train(mod.training)
        return twin

    def to_float(self) -> nn.Module:
        """A float copy with a detached weight, in the same mode."""
        options = {name: getattr(self, name) for name in self.OPTIONS}
        make: Any = self.FLOAT_CLASS
        layer: nn.Module = make(self.num_embeddings, self.embedding_dim, **options)
        layer.weight = nn.Parameter(self.weight.detach().clone())
        return layer.train(self.training)


@converts_to(nnq.Embedding)
class Embedding(_QATEmbedding, nn.Embedding):
    """A look-up table with simulated quantization of its rows.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as for
            ``nn.Embedding``.
        qconfig: its weights have floating zero points; None for ``default_embedding_qat_qconfig``.
        device, dtype: of the parameter.

    Raises:
        ValueError: a qconfig without floating zero points.
    """

    OPTIONS = ("padding_idx", *_OPTIONS)
    FLOAT_CLASS = nn.Embedding

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
        device: Any = None,
        dtype: Any = None,
        qconfig: Any = None,
    ) -> None:
        nn.Embedding.__init__(
            self,
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            device=device,
            dtype=dtype,
        )
        self._simulate_rows(qconfig)

    def forward(self, input: Tensor) -> Tensor:
        """The fake-quantized rows that ``input`` names."""
        return F.embedding(
            input,
            self.weight_fake_quant(self.weight),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


@converts_to(nnq.EmbeddingBag)
class EmbeddingBag(_QATEmbedding, nn.EmbeddingBag):
    """Sums or means of look-up table rows, with simulated quantization of the rows.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, include_last_offset,
            padding_idx: as for ``nn.EmbeddingBag``.
        qconfig: its weights have floating zero points; None for ``default_embedding_qat_qconfig``.
        device, dtype: of the parameter.

    Raises:
        ValueError: a qconfig without floating zero points.
    """

    OPTIONS = (*_OPTIONS, "mode", "include_last_offset", "padding_idx")
    FLOAT_CLASS = nn.EmbeddingBag

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        qconfig: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        nn.EmbeddingBag.__init__(
            self,
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            _weight,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        self._simulate_rows(qconfig)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One row a bag, from the fake-quantized rows that ``input`` names."""
        return F.embedding_bag(
            input,
            self.weight_fake_quant(self.weight),
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
