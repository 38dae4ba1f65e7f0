"""Multi-head attention whose projections are linear layers, so that they can be observed and quantized.

May import: ``tensor``, and quantized modules.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropoint.ao.nn._registry import observed_twin_of
from zeropoint.ao.nn.quantizable.rnn import prepared
from zeropoint.ao.nn.quantized._from_float import require_class
from zeropoint.tensor import QTensor

__all__ = ["MultiheadAttention"]


@observed_twin_of(nn.MultiheadAttention)
class MultiheadAttention(nn.Module):
    """``torch.nn.MultiheadAttention`` in parts: what ``prepare`` puts in its place.

    The four projections, where the weights are, become quantized; scores, softmax and the weighted mean between them
    are computed in float, from dequantized queries, keys and values. Converted, it takes quantized tensors and gives a
    quantized output; the attention weights are float.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as for
            ``torch.nn.MultiheadAttention``.

    Raises:
        ValueError: ``embed_dim`` is no multiple of ``num_heads``.
    """

    in_proj_bias: None = None
    """There is no joint projection: torch's encoder layer, which asks, then keeps to its ordinary path."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        from zeropoint.ao.quantization.stubs import QuantStub  # that package imports this one

        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.add_zero_attn = add_zero_attn
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.linear_Q: nn.Module = nn.Linear(embed_dim, embed_dim, bias, **options)
        self.linear_K: nn.Module = nn.Linear(self.kdim, embed_dim, bias, **options)
        self.linear_V: nn.Module = nn.Linear(self.vdim, embed_dim, bias, **options)
        self.out_proj: nn.Module = nn.Linear(embed_dim, embed_dim, bias, **options)
        self.quant_attn_output: nn.Module = QuantStub()
        for name in ("bias_k", "bias_v"):
            value = nn.Parameter(torch.empty(1, 1, embed_dim, **options)) if add_bias_kv else None
            if value is not None:
                nn.init.xavier_normal_(value)
            self.register_parameter(name, value)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``torch.nn.MultiheadAttention``: the output, and the attention weights or None.

        Args:
            query, key, value: ``(length, batch, size)``, ``(batch, length, size)`` with ``batch_first``, or
                ``(length, size)``; quantized once the module is converted.
            key_padding_mask: ``(batch, source)``; True, or a number to add, for keys to leave out.
            need_weights: return the attention weights, averaged over heads unless ``average_attn_weights`` is False.
            attn_mask: ``(target, source)`` or ``(batch * heads, target, source)``; True, or a number to add.
            is_causal: ``attn_mask`` is a causal mask: a hint that changes nothing, but needs the mask.

        Raises:
            ValueError: shapes that do not fit, or ``is_causal`` without a mask.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask: pass the mask too")
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                f"MultiheadAttention takes query, key and value of two or three dimensions alike, got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        q, k, v = (_real(x) for x in (self.linear_Q(query), self.linear_K(key), self.linear_V(value)))
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        k, v, extra = self._extended(k, v)
        batch, target, source = q.shape[0], q.shape[1], k.shape[1]
        q, k, v = self._split(q), self._split(k), self._split(v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.embed_dim // self.num_heads)
        if attn_mask is not None:
            mask = F.pad(_additive(attn_mask, scores.dtype), (0, extra))
            wanted = ((target, source), (batch * self.num_heads, target, source))
            if tuple(mask.shape) not in wanted:
                raise ValueError(f"attn_mask must have shape {wanted[0]} or {wanted[1]}, got {tuple(attn_mask.shape)}")
            scores = scores + (mask if mask.dim() == 2 else mask.reshape(batch, self.num_heads, target, source))
        if key_padding_mask is not None:
            padding = F.pad(_additive(key_padding_mask, scores.dtype), (0, extra))
            if tuple(padding.shape) != (batch, source):
                raise ValueError(
                    f"key_padding_mask must have shape {(batch, source - extra)}, got {tuple(key_padding_mask.shape)}"
                )
            scores = scores + padding[:, None, None, :]
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        joined = (weights @ v).transpose(1, 2).flatten(2)
        if not batched:
            joined, weights = joined.squeeze(0), weights.squeeze(0)
        elif not self.batch_first:
            joined = joined.transpose(0, 1)
        output = self.out_proj(self.quant_attn_output(joined))
        if not need_weights:
            return output, None
        return output, weights.mean(-3) if average_attn_weights else weights

    def _split(self, x: Tensor) -> Tensor:
        """``(batch, heads, length, size of a head)`` of ``(batch, length, size)``."""
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, self.embed_dim // self.num_heads).transpose(1, 2)

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values ``(batch, source, size)`` with what is added behind them, and how many that are."""
        rows: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            rows.append((cast(Tensor, self.bias_k), cast(Tensor, self.bias_v)))
        if self.add_zero_attn:
            zero = k.new_zeros(1, 1, self.embed_dim)
            rows.append((zero, zero))
        for key, value in rows:
            k = torch.cat((k, key.to(k.dtype).expand(k.shape[0], 1, -1)), 1)
            v = torch.cat((v, value.to(v.dtype).expand(v.shape[0], 1, -1)), 1)
        return k, v, len(rows)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"

    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None) -> MultiheadAttention:
        """The twin of a float module, with a copy of its parameters; prepared for calibration if there is a qconfig.

        Args:
            other: ``nn.MultiheadAttention``.
            qconfig: instead of ``other.qconfig``.

        Raises:
            TypeError: another class.
        """
        require_class(other, (nn.MultiheadAttention,), cls)
        source = cast(nn.MultiheadAttention, other)
        has_bias = source.in_proj_bias is not None
        twin = cls(
            source.embed_dim,
            source.num_heads,
            source.dropout,
            has_bias,
            source.bias_k is not None,
            source.add_zero_attn,
            source.kdim,
            source.vdim,
            source.batch_first,
        )
        if source._qkv_same_embed_dim:
            weights = source.in_proj_weight.chunk(3)
        else:
            weights = (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)
        biases = source.in_proj_bias.chunk(3) if has_bias else (None, None, None)
        parts = zip(("linear_Q", "linear_K", "linear_V"), weights, biases, strict=True)
        for name, weight, bias in (*parts, ("out_proj", source.out_proj.weight, source.out_proj.bias)):
            linear = cast(nn.Linear, getattr(twin, name))
            linear.weight = _copied(weight)
            linear.bias = None if bias is None else _copied(bias)  # type: ignore[assignment]
        for name in ("bias_k", "bias_v"):
            value = getattr(source, name)
            if value is not None:
                setattr(twin, name, _copied(value))
        twin.train(source.training)
        return cast(
            MultiheadAttention, prepared(twin, getattr(source, "qconfig", None) if qconfig is None else qconfig)
        )


def _real(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QTensor) else x


def _copied(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().clone())


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add: -inf for True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
