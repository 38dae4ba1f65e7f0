"""What layers that keep their batch norm in training share.

The weight is simulated as it will be folded: ``fake_quantize(W * g / sqrt(running_var + eps))``. The result is divided
by that factor again, so that the batch norm behind it sees, and learns from, the statistics of the layer itself
(R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", section 3.2.2). In eval mode the
two cancel and what remains is the folded layer.

The factor takes part as a number without gradient: the batch norm passes on its own gradient, and a second one, through
a division by a small ``g``, would only let training explode. Channels whose ``g`` is 0 have nothing to fold and pass
the float weight, so their statistics stay those of the layer.

May import: ``intrinsic.fused``, ``ops.qdq``, what QAT modules share.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeropoint.ao.nn._folding import fold_batch_norm
from zeropoint.ao.nn._weight_norm import bake_weight
from zeropoint.ao.nn.intrinsic.qat._rectify import make_rectifier, rectifier_name, rectify
from zeropoint.ao.nn.qat._base import WeightSimulation
from zeropoint.ao.nn.quantized._from_float import require_class
from zeropoint.ops import qdq

__all__ = ["BatchNormSimulation", "freeze_bn_stats", "update_bn_stats"]

_B = TypeVar("_B", bound="BatchNormSimulation")


class BatchNormSimulation(WeightSimulation):
    """Mixin in front of a float layer: simulated quantization of the folded weight, with the batch norm kept.

    Attributes:
        bn: the batch norm, with its parameters and running statistics.
        freeze_bn: whether its statistics are frozen; ``train()`` does not unfreeze them.
        rectifier: ``"relu"`` or ``"relu6"`` behind the batch norm, or None.
    """

    FUSED_CLASS: ClassVar[type[nn.Module]]
    LAYER_CLASS: ClassVar[type[nn.Module]]
    rectifier: str | None = None
    bn: _BatchNorm
    freeze_bn: bool
    weight: Any
    bias: Any

    def _keep(self, bn: _BatchNorm, freeze_bn: bool, qconfig: Any) -> None:
        self.bn = bn
        self._simulate(qconfig, self.weight.device)
        self.freeze_bn = freeze_bn
        if freeze_bn:
            self.freeze_bn_stats()

    # --- statistics ---

    def reset_running_stats(self) -> None:
        """Starts the batch norm's running statistics anew."""
        self.bn.reset_running_stats()

    def reset_bn_parameters(self) -> None:
        """Starts the batch norm's statistics and parameters anew."""
        self.bn.reset_running_stats()
        nn.init.uniform_(self.bn.weight)
        nn.init.zeros_(self.bn.bias)

    def update_bn_stats(self: _B) -> _B:
        """Lets the batch norm use and update batch statistics while it trains."""
        self.freeze_bn = False
        self.bn.training = self.training
        return self

    def freeze_bn_stats(self: _B) -> _B:
        """Makes the batch norm use its running statistics and leave them as they are."""
        self.freeze_bn = True
        self.bn.training = False
        return self

    def train(self: _B, mode: bool = True) -> _B:
        """Sets the mode of the module and, unless its statistics are frozen, of the batch norm."""
        super().train(mode)
        if getattr(self, "freeze_bn", False):
            self.bn.training = False
        return self

    # --- computing ---

    def _factor(self) -> Tensor:
        """``g / sqrt(running_var + eps)``, one a channel, without gradient."""
        assert self.bn.running_var is not None
        return (self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)).detach()

    def _layer_output(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer with this weight, and this bias if any in place of its own."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        """The layer, the batch norm and the rectifier, with the folded weight fake-quantized; float."""
        if qdq.capturing() and not self.bn.training:  # the folded layer itself: a runtime knows it as one operator
            weight, bias = self.folded_weight_bias()
            return rectify(self._layer_output(input, self.weight_fake_quant(weight), bias), self.rectifier)
        factor = self._factor()
        zero = factor == 0
        column = (-1, *[1] * (self.weight.dim() - 1))
        folded = self.weight_fake_quant(self.weight * factor.reshape(column))
        folded = torch.where(zero.reshape(column), self.weight, folded)
        row = (1, -1, *[1] * (self.weight.dim() - 2))
        y = self._layer_output(input, folded) / torch.where(zero, 1.0, factor).reshape(row)
        if self.bias is not None:
            y = y + self.bias.reshape(row)
        return rectify(self.bn(y), self.rectifier)

    def folded_weight_bias(self) -> tuple[Tensor, Tensor]:
        """Weight, by the same float operations as in training, and bias of the layer with its batch norm folded in."""
        column = (-1, *[1] * (self.weight.dim() - 1))
        weight = self.weight.detach() * self._factor().reshape(column)
        return weight, fold_batch_norm(self.weight, self.bias, self.bn)[1]

    # --- making ---

    @classmethod
    def from_float(cls: type[_B], mod: Any, use_precomputed_fake_quant: bool = False) -> _B:
        """The QAT twin of a fused float module; it shares the parameter objects and the batch norm.

        Args:
            mod: the fused float class of the same name; its qconfig is taken over.
            use_precomputed_fake_quant: accepted as in ``torch.ao``; nothing is computed here.

        Raises:
            TypeError: another class.
        """
        require_class(mod, (cls.FUSED_CLASS,), cls)
        layer = bake_weight(mod[0])
        twin = cls._like(layer, getattr(mod, "qconfig", None))
        twin.weight, twin.bias = layer.weight, layer.bias
        twin.weight_fake_quant.to(twin.weight.device)
        twin.bn = mod[1]
        if len(mod.PARTS) == 3:
            twin.rectifier = rectifier_name(mod[2])
        return twin.train(mod.training)

    @classmethod
    def _like(cls: type[_B], layer: Any, qconfig: Any) -> _B:
        """A new module of the sizes of a float layer."""
        raise NotImplementedError

    def _float_layer(self) -> nn.Module:
        """A new float layer of the same sizes, with a bias."""
        raise NotImplementedError

    def to_float(self) -> nn.Module:
        """A float layer with the batch norm folded in and detached parameters, with the rectifier if there is one."""
        layer = self._float_layer()
        weight, bias = fold_batch_norm(self.weight, self.bias, self.bn)
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        if self.rectifier is not None:
            layer = self._rectified_class()(layer, make_rectifier(self.rectifier))
        return layer.train(self.training)

    def _rectified_class(self) -> type[nn.Module]:
        """The fused float class of layer and rectifier."""
        raise NotImplementedError


def freeze_bn_stats(mod: nn.Module) -> None:
    """For ``model.apply``: freezes the statistics of fused batch norms."""
    if isinstance(mod, BatchNormSimulation):
        mod.freeze_bn_stats()


def update_bn_stats(mod: nn.Module) -> None:
    """For ``model.apply``: lets fused batch norms update their statistics."""
    if isinstance(mod, BatchNormSimulation):
        mod.update_bn_stats()
