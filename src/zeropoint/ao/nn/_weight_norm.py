"""Weights that are computed from other parameters: weight_norm and spectral_norm, as hooks or as parametrizations.

May import: torch only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["bake_weight", "computes_weight", "effective_weight"]


def computes_weight(hook: Any) -> bool:
    """Whether a forward pre-hook is an old-style weight_norm or spectral_norm."""
    return hasattr(hook, "compute_weight")


def effective_weight(module: nn.Module) -> Tensor:
    """The weight that a forward pass would use, detached.

    A hook's weight is up to date only after a forward pass, so it is computed here; parametrizations compute theirs
    whenever it is read.
    """
    weight = module.weight
    for hook in module._forward_pre_hooks.values():
        if computes_weight(hook) and getattr(hook, "name", None) == "weight":
            extra = (False,) if hasattr(hook, "n_power_iterations") else ()  # spectral_norm: not one more iteration
            weight = hook.compute_weight(module, *extra)  # type: ignore[attr-defined]
    assert isinstance(weight, Tensor)
    return weight.detach()


def bake_weight(module: nn.Module) -> nn.Module:
    """Makes tensors that parametrizations or weight_norm hooks compute ordinary parameters again, in place."""
    if parametrize.is_parametrized(module):
        # remove_parametrizations would also take the property off the class, which copies of the module share.
        names = list(module.parametrizations)  # type: ignore[arg-type]
        values = {name: getattr(module, name).detach().clone() for name in names}
        module.__class__ = parametrize.type_before_parametrizations(module)
        del module._modules["parametrizations"]
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value))
    for key, hook in list(module._forward_pre_hooks.items()):
        if computes_weight(hook):
            hook.remove(module)  # type: ignore[attr-defined]
            del module._forward_pre_hooks[key]
    return module
