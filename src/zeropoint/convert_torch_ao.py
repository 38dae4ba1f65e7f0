"""Models that ``torch.ao`` quantized or prepared, in memory, made over into models of this package.

Classes are recognized by their names, so that ``torch.ao`` is never imported: where a model holds its modules, it is
there. Files are for :mod:`zeropoint.checkpoint`.

May import: every module of the package that defines what a model may hold.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from zeropoint.checkpoint import PackedParams
from zeropoint.migrate._names import is_of_interest, new_name
from zeropoint.tensor import QTensor

__all__ = ["from_torch_ao"]

M = TypeVar("M", bound=nn.Module)


def from_torch_ao(module: nn.Module) -> nn.Module:
    """A copy of a model in which this package's modules stand where ``torch.ao``'s stood.

    Args:
        module: a converted model (static or dynamic), or a prepared one (for calibration or for training), or one
            module. It is not changed.

    Returns:
        The model, which gives the same codes within one. Prepared models keep what their observers have seen and
        their trained grids; ``zeropoint.ao.quantization.convert`` converts them.

    Raises:
        TypeError: a module that has no counterpart here; the message names it.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"from_torch_ao takes a module, got {type(module).__name__}")
    # deepcopy asks the memo first: so every reference to one of torch.ao's modules leads to its counterpart.
    memo: dict[int, Any] = {}
    for path, part in _outermost(module, ""):
        if id(part) not in memo:
            memo[id(part)] = _counterpart(part, path, memo)
    model = copy.deepcopy(module, memo)
    for part in model.modules():
        _replace_hooks(part)
        if "qconfig" in vars(part):
            part.qconfig = _qconfig(part.qconfig)
    _observe_fixed_grids(model)
    return model


def _is_torch_ao(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return is_of_interest(f"{kind.__module__}.{kind.__qualname__}")


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``torch.ao`` in a model, without their own parts."""
    if _is_torch_ao(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{path}.{name}" if path else name)


def _twin_class(kind: type, path: str) -> Any:
    full = f"{kind.__module__}.{kind.__qualname__}"
    name = new_name(full)
    if name is None:
        raise TypeError(f"{path or 'the model'} is a {full}, which has no counterpart in zeropoint")
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _counterpart(module: nn.Module, path: str, memo: dict[int, Any]) -> nn.Module:
    """Our module for one of ``torch.ao``'s, with its parameters, statistics and hooks."""
    cls = _twin_class(type(module), path)
    children = {name: _child(child, f"{path}.{name}", memo) for name, child in module.named_children()}
    if issubclass(cls, nn.Sequential):
        twin = cls(*(children[name] for name in map(str, range(len(children))) if name in children))
    else:
        twin = cls(**_arguments(cls, module, children))
    for name, child in children.items():
        if not name.startswith("_"):  # torch.ao's packed parameters are modules, with private names
            setattr(twin, name, child)
    twin.load_state_dict(_state(module, twin))
    _copy_settings(module, twin)
    return cast(nn.Module, twin)


def _child(child: nn.Module, path: str, memo: dict[int, Any]) -> nn.Module:
    if id(child) not in memo and path.rpartition(".")[2].startswith("_"):
        return child
    if id(child) not in memo and _is_torch_ao(child):
        memo[id(child)] = _counterpart(child, path, memo)
    return copy.deepcopy(child, memo)


# --- how our module is made ---------------------------------------------------------------------------------------

_SKIPPED = frozenset({"self", "device", "factory_kwargs", "qconfig"})


def _arguments(cls: type, module: Any, children: dict[str, nn.Module]) -> dict[str, Any]:
    """Constructor arguments of our class, read off the attributes of ``torch.ao``'s module."""
    known = inspect.signature(cls).parameters
    if "observer" in known:  # a fake quantize is made with its observer's class and arguments
        observer = cast(Any, type(children["activation_post_process"]))
        wanted = _read(module.activation_post_process, observer)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            return {"observer": observer.with_args(**wanted)}
        bounds = {"quant_min": module.quant_min, "quant_max": module.quant_max, "reduce_range": False}
        return {**wanted, **bounds, "observer": observer}
    chosen = _read(module, cls)
    if hasattr(module, "calculate_qparams"):
        # A range that the observer chose itself is no argument; one that was given is halved already.
        drop = ("reduce_range",) if getattr(module, "has_customized_qrange", False) else ("quant_min", "quant_max")
        chosen = {name: value for name, value in chosen.items() if name not in drop}
    elif not _has_codes(module):
        chosen.pop("dtype", None)
    return chosen


def _read(module: Any, cls: type) -> dict[str, Any]:
    """What a module tells of the constructor arguments of a class."""
    names = inspect.signature(cls).parameters
    values = {name: _attribute(module, name) for name in names if name not in _SKIPPED}
    chosen = {name: value for name, value in values.items() if value is not None}
    if "weight" in names:  # normalizations take their affine parameters, not whether there are any
        chosen.update({name: copy.deepcopy(getattr(module, name)) for name in ("weight", "bias")})
    return chosen


def _has_codes(module: Any) -> bool:
    """Whether ``dtype`` says what the codes are; elsewhere it is a float dtype, or the default."""
    return type(module).__name__ in ("Quantize", "Embedding", "EmbeddingBag")


_OTHER_NAMES = {"output_scale": "scale", "output_zero_point": "zero_point", "bias_": "bias"}


def _attribute(module: Any, name: str) -> Any:
    """The value of a constructor argument, or None where the module does not tell."""
    value = getattr(module, _OTHER_NAMES.get(name, name), None)
    if name in ("bias", "bias_"):
        return (value() if inspect.ismethod(value) else value) is not None
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if inspect.ismethod(value) or isinstance(value, nn.Module):
        return None
    return value


# --- what it holds ------------------------------------------------------------------------------------------------


def _state(module: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """The state dict of ``torch.ao``'s module in objects of this package."""
    state = {name: _plain(value) for name, value in module.state_dict().items()}
    wanted = twin.state_dict()
    for name in ("scale", "zero_point"):  # plain attributes in torch.ao's activations
        if name in wanted and name not in state:
            state[name] = torch.tensor(getattr(module, name))
    return state


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return list(map(_plain, value))
    if type(value).__name__ == "ScriptObject":
        return PackedParams("torch.ScriptObject", (), _plain(value.__getstate__()))
    if isinstance(value, Tensor) and not isinstance(value, QTensor) and value.is_quantized:
        return _quantized(value)
    return value


def _quantized(value: Tensor) -> QTensor:
    codes = value.int_repr()
    if "per_channel" not in str(value.qscheme()):
        return QTensor.from_codes(codes, value.q_scale(), value.q_zero_point())
    return QTensor.from_codes(
        codes, value.q_per_channel_scales(), value.q_per_channel_zero_points(), axis=value.q_per_channel_axis()
    )


def _copy_settings(module: nn.Module, twin: nn.Module) -> None:
    """Mode, qconfig, hooks, and the seven bits that ``torch.ao``'s dynamic modules lay over their activations."""
    twin.train(module.training)
    if "qconfig" in vars(module):
        twin.qconfig = _qconfig(module.qconfig)
    if ".dynamic." in type(module).__module__ and hasattr(twin, "reduce_range"):
        twin.reduce_range = True  # type: ignore[assignment]
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
        getattr(twin, name).update(getattr(module, name))


# --- hooks and qconfigs -------------------------------------------------------------------------------------------


def _replace_hooks(module: nn.Module) -> None:
    """Ours for the hooks that ``torch.ao`` calls observers by; others stay."""
    from zeropoint.ao.quantization.quantize import _observe_input, _observe_output

    for table, ours in ((module._forward_hooks, _observe_output), (module._forward_pre_hooks, _observe_input)):
        for key, hook in table.items():
            if is_of_interest(f"{getattr(hook, '__module__', '')}.{getattr(hook, '__name__', '')}"):
                table[key] = ours


def _observe_fixed_grids(model: nn.Module) -> None:
    """Sigmoid and its kin: conversion reads their grid, which is known, off an observer that ``torch.ao`` omits."""
    from zeropoint.ao.quantization.quantization_mappings import fixed_observer_of
    from zeropoint.ao.quantization.quantize import attach_observer

    if not any(hasattr(part, "activation_post_process") for part in model.modules()):
        return
    for path, part in list(model.named_modules()):
        if getattr(part, "qconfig", None) is not None and fixed_observer_of(part, simulates=False) is not None:
            attach_observer(part, path)


def _qconfig(qconfig: Any) -> Any:
    if qconfig is None or not _is_torch_ao(qconfig):
        return qconfig
    from zeropoint.ao.quantization import QConfig

    return QConfig(activation=_factory(qconfig.activation), weight=_factory(qconfig.weight))


def _factory(factory: Any) -> Callable[..., Any]:
    """A class or a ``with_args`` of ``torch.ao`` as the same of this package."""
    if isinstance(factory, type):
        return cast("Callable[..., Any]", _twin_class(factory, "a qconfig") if _is_torch_ao(factory) else factory)
    partial = getattr(factory, "p", factory)
    if not isinstance(partial, functools.partial):
        return cast("Callable[..., Any]", factory)
    cls = cast(Any, _factory(partial.func))
    keywords = {name: _factory(value) if _makes(value) else value for name, value in partial.keywords.items()}
    keywords.pop("factory_kwargs", None)
    return cast("Callable[..., Any]", cls.with_args(**keywords) if hasattr(cls, "with_args") else cls)


def _makes(value: Any) -> bool:
    return isinstance(value, (type, functools.partial)) or hasattr(value, "p")
