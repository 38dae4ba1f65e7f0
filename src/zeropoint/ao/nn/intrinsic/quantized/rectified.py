"""What fused quantized modules share: a layer whose kernel also clamps its output.

May import: what quantized modules share, ``intrinsic.fused``.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from zeropoint.ao.nn.quantized._base import GridModule
from zeropoint.ao.nn.quantized._from_float import require_class

__all__ = ["Rectified"]

_R = TypeVar("_R", bound="Rectified")


class Rectified(GridModule):
    """Mixin in front of a quantized layer: the output is clamped at real zero, and at 6 where a ReLU6 was fused."""

    rectifier = "relu"
    FUSED_CLASS: type[nn.Module]

    @classmethod
    def from_float(cls: type[_R], mod: nn.Module, use_precomputed_fake_quant: bool = False) -> _R:
        """The quantized twin of a calibrated fused module.

        Args:
            mod: the float class of the same name, or its QAT form, with an ``activation_post_process``.
            use_precomputed_fake_quant: keep the weight grid that ``mod.weight_fake_quant`` trained.

        Raises:
            TypeError: another class. RuntimeError: no qconfig, or not prepared.
        """
        if hasattr(mod, "weight_fake_quant"):  # a QAT module has weight and rectifier in one
            return cls._from_parts(mod, mod, getattr(mod, "rectifier", "relu"), use_precomputed_fake_quant)
        require_class(mod, (cls.FUSED_CLASS,), cls)
        assert isinstance(mod, nn.Sequential)
        rectifier = "relu6" if isinstance(mod[1], nn.ReLU6) else "relu"
        return cls._from_parts(mod, mod[0], rectifier, use_precomputed_fake_quant)

    @classmethod
    def _from_parts(cls: type[_R], mod: nn.Module, layer: nn.Module, rectifier: str, precomputed: bool) -> _R:
        twin: _R = cls._from_layer(mod, layer, precomputed)  # type: ignore[attr-defined]
        if rectifier != twin.rectifier:
            twin.rectifier = rectifier
            twin._derive_grid()
        return twin

    def extra_repr(self) -> str:
        words: str = super().extra_repr()
        return words if self.rectifier == "relu" else f"{words}, rectifier={self.rectifier}"
