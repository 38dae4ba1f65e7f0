"""Layers whose parts are quantized modules: what calibrated quantizable layers become.

May import: ``zeropoint.ao.nn.quantizable``, which imports single modules of this package but never this one.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, TypeVar

from torch import nn

from zeropoint.ao.nn import quantizable
from zeropoint.ao.nn._registry import static_twin_of
from zeropoint.ao.nn.quantized._from_float import require_class

__all__ = ["LSTM", "ComposedModule", "MultiheadAttention"]

_C = TypeVar("_C", bound="ComposedModule")


class ComposedModule(nn.Module):
    """A layer that ``convert`` makes of an observed one by quantizing its parts: the forward pass is the same code."""

    OBSERVED = False
    _OBSERVED_CLASS: type[nn.Module]
    __signature__: inspect.Signature

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__signature__ = inspect.signature(cls._OBSERVED_CLASS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from zeropoint.ao.quantization import convert, default_qconfig, prepare  # that package imports this one

        super().__init__(*args, **kwargs)
        self.eval()
        self.qconfig = default_qconfig
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a state dict brings weights and grids
            convert(prepare(self, inplace=True), inplace=True)
        vars(self).pop("quantization_summary", None)

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Brings what ``torch.ao`` stores to the names of this module, in place."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._adapt_state(state_dict, prefix)  # before the parts read it
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    @classmethod
    def from_float(cls, other: nn.Module, qconfig: Any = None, split_gates: bool = False) -> Any:
        """Raises TypeError: a float layer has to be observed first."""
        raise TypeError(
            f"{cls.__name__} comes from a calibrated {cls._OBSERVED_CLASS.__module__}.{cls.__name__}, got "
            f"{type(other).__name__}: call prepare(), run calibration data, and convert() or from_observed()"
        )

    @classmethod
    def from_observed(cls: type[_C], other: nn.Module) -> _C:
        """The quantized twin of a calibrated layer, which stays as it is.

        Raises:
            TypeError: another class.
        """
        from zeropoint.ao.quantization import convert  # that package imports this one

        require_class(other, (cls._OBSERVED_CLASS,), cls)
        converted = convert(other)
        assert isinstance(converted, cls)
        vars(converted).pop("quantization_summary", None)
        return converted


@static_twin_of(quantizable.LSTM)
class LSTM(ComposedModule, quantizable.LSTM):
    """A long short-term memory over quantized sequences: every step inside is a quantized module.

    ``convert`` makes it of a calibrated ``quantizable.LSTM``, which ``prepare`` puts in the place of ``nn.LSTM``. Made
    directly, it waits for a state dict.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as for
            ``torch.nn.LSTM``.
        split_gates: the gates have grids of their own.
    """

    _OBSERVED_CLASS = quantizable.LSTM

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """``torch.ao`` keeps no grid of its curves, which is known, nor of joined tensors, which is the first one's."""
        curves = [f"{name}.scale" for name, part in self.named_modules() if name.endswith(_CURVES)]
        if any(prefix + name in state_dict for name in curves):
            return
        own = self.state_dict()
        for name in curves:
            for key in (name, name.removesuffix("scale") + "zero_point"):
                state_dict[prefix + key] = own[key]
        for name, _ in self.named_modules():
            if name == "hidden" or name.endswith("join"):
                first = (
                    name.removesuffix("join") + "layer_fw.cell.ogate_cy" if name != "hidden" else _FIRST + "ogate_cy"
                )
            elif name == "cells":
                first = _FIRST + "fgate_cx_igate_cgate"
            else:
                continue
            for end in ("scale", "zero_point"):
                if f"{prefix}{first}.{end}" in state_dict:
                    state_dict.setdefault(f"{prefix}{name}.{end}", state_dict[f"{prefix}{first}.{end}"])


_CURVES = ("input_gate", "forget_gate", "cell_gate", "output_gate", "cell_state")
_FIRST = "layers.0.layer_fw.cell."


@static_twin_of(quantizable.MultiheadAttention)
class MultiheadAttention(ComposedModule, quantizable.MultiheadAttention):
    """Multi-head attention with quantized projections, from quantized tensors to a quantized output.

    ``convert`` makes it of a calibrated ``quantizable.MultiheadAttention``, which ``prepare`` puts in the place of
    ``nn.MultiheadAttention``. Made directly, it waits for a state dict.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as for
            ``torch.nn.MultiheadAttention``.
    """

    _OBSERVED_CLASS = quantizable.MultiheadAttention

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """``torch.ao`` quantizes scaled queries and attention weights too; here they are float."""
        for name in ("q_scaling_product", "quant_attn_output_weights"):
            for end in ("scale", "zero_point"):
                state_dict.pop(f"{prefix}{name}.{end}", None)
