"""Small helpers over modules: devices, hooks, copies, and whether a subclass still computes what its base computes.

May import: ``ao.nn``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from zeropoint.ao.nn._weight_norm import computes_weight

__all__ = [
    "clear_hooks",
    "clone_model",
    "computes_like",
    "get_module",
    "get_unique_devices_",
    "is_internal_hook",
    "makes_normal_tensors",
    "move_hooks",
    "set_module",
]


def get_unique_devices_(module: nn.Module) -> set[torch.device]:
    """The devices of all parameters and buffers; the meta device does not count."""
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.device for tensor in tensors if tensor.device.type != "meta"}


def get_module(model: nn.Module, name: str) -> nn.Module:
    """The module at a dotted path; "" is the model itself.

    Raises:
        ValueError: there is none.
    """
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"the model has no module {name!r}: {error}") from error


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module at a dotted path."""
    parent, _, leaf = name.rpartition(".")
    setattr(get_module(model, parent), leaf, module)


def clone_model(model: nn.Module) -> nn.Module:
    """A deep copy; tensors that hooks left on modules, such as weight_norm's product, are copied detached."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


_F = TypeVar("_F", bound=Callable[..., Any])


def makes_normal_tensors(function: _F) -> _F:
    """The function outside of ``torch.inference_mode``: what it puts into a model can be loaded into and trained."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast(_F, outside)


# --- hooks --------------------------------------------------------------------------------------------------------

_PRE = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_POST = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def move_hooks(sources: list[nn.Module], target: nn.Module) -> None:
    """Moves all forward hooks and pre-hooks to ``target``, in order.

    The handles of the first module's pre-hooks and of the last module's hooks stay valid. Hooks that compute a
    weight (old-style weight_norm and spectral_norm) and those of ``prepare`` are dropped: their work is done.
    """
    for names, keeper in ((_PRE, sources[0]), (_POST, sources[-1])):
        tables = [{name: dict(getattr(source, name)) for name in names} for source in sources]
        for source in sources:
            for name in names:
                getattr(source, name).clear()
        for name in names:
            own = getattr(target, name)
            kept = getattr(keeper, name)  # the very dictionary that the handles point to
            for table in tables:
                dropped = {key for key, hook in table[names[0]].items() if is_internal_hook(hook)}
                kept.update({key: value for key, value in table[name].items() if key not in dropped})
            kept.update(own)
            setattr(target, name, kept)
            setattr(keeper, name, type(kept)())


def is_internal_hook(hook: Any) -> bool:
    """Whether a hook belongs to the machinery: it observes, or it computes a weight before the forward pass."""
    return bool(getattr(hook, "_observes", False)) or computes_weight(hook)


def clear_hooks(module: nn.Module) -> nn.Module:
    """Takes all forward hooks and pre-hooks away, in place."""
    for name in (*_PRE, *_POST):
        getattr(module, name).clear()
    return module


# --- subclasses ---------------------------------------------------------------------------------------------------


def computes_like(module: nn.Module, base: type[nn.Module]) -> bool:
    """Whether a module of a subclass computes what ``base`` computes.

    It does if it does not override ``forward``. A linear layer or convolution that does is asked: both methods run on
    one small input, and the results must be equal.
    """
    if "forward" not in vars(module) and type(module).forward is base.forward:
        return True
    probe = _probe(module)
    if probe is None:
        return False
    forward = vars(module).get("forward", None)
    own: Callable[[Tensor], Any] = forward if forward is not None else lambda x: type(module).forward(module, x)
    try:
        with torch.no_grad():
            return torch.equal(own(probe), base.forward(module, probe))
    except Exception:
        return False


def _probe(module: nn.Module) -> Tensor | None:
    """A small input without any two equal values."""
    if isinstance(module, nn.Linear):
        shape = [2, 3, module.in_features]
    elif isinstance(module, nn.modules.conv._ConvNd):
        extents = [d * (k - 1) + 4 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        shape = [2, module.in_channels, *extents]
    else:
        return None
    weight = module.weight
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).mul(0.7).sin()
    return values.reshape(shape).to(weight.device, weight.dtype)
