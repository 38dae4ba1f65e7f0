"""What fused modules for training share: the rectifier behind the layer.

May import: ``intrinsic.fused``, what QAT and quantized modules share.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from zeropoint.ao.nn._weight_norm import bake_weight
from zeropoint.ao.nn.qat._base import WeightSimulation
from zeropoint.ao.nn.quantized._from_float import require_class

__all__ = ["RectifiedSimulation", "make_rectifier", "rectifier_name", "rectify"]

_R = TypeVar("_R", bound="RectifiedSimulation")


def rectifier_name(module: nn.Module) -> str:
    """``"relu6"`` or ``"relu"``, as quantized modules call it."""
    return "relu6" if isinstance(module, nn.ReLU6) else "relu"


def make_rectifier(name: str) -> nn.Module:
    """The float module of that name."""
    return nn.ReLU6() if name == "relu6" else nn.ReLU()


def rectify(x: Tensor, name: str | None) -> Tensor:
    """``x`` behind the rectifier of that name; None for none."""
    if name is None:
        return x
    return F.relu6(x) if name == "relu6" else F.relu(x)


class RectifiedSimulation(WeightSimulation):
    """Mixin in front of a QAT layer: a rectifier behind it.

    Attributes:
        rectifier: ``"relu"``, or ``"relu6"`` where a ReLU6 was fused.
    """

    rectifier: str = "relu"
    FUSED_CLASS: type[nn.Module]

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer with the fake-quantized weight, then the rectifier; float. Arguments as for the layer."""
        return rectify(super().forward(input, *args, **kwargs), self.rectifier)

    @classmethod
    def from_float(cls: type[_R], mod: Any, use_precomputed_fake_quant: bool = False) -> _R:
        """The QAT twin of a fused float module; it shares the parameter objects.

        Args:
            mod: the fused float class of the same name; its qconfig is taken over.
            use_precomputed_fake_quant: accepted as in ``torch.ao``; nothing is computed here.

        Raises:
            TypeError: another class.
        """
        require_class(mod, (cls.FUSED_CLASS,), cls)
        twin: _R = cls._from_layer(bake_weight(mod[0]), getattr(mod, "qconfig", None))  # type: ignore[attr-defined]
        twin.rectifier = rectifier_name(mod[1])
        return twin.train(mod.training)

    def to_float(self) -> nn.Module:
        """The fused float module, with detached parameters, in the same mode."""
        layer = super().to_float()  # type: ignore[misc]
        return self.FUSED_CLASS(layer, make_rectifier(self.rectifier)).train(self.training)
