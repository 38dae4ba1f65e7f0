"""Fusing: a layer with the batch norm and the rectifier behind it becomes one module.

May import: ``fuser_method_mappings``, ``utils``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from zeropoint.ao.quantization.fuser_method_mappings import get_fuser_method
from zeropoint.ao.quantization.utils import clone_model, get_module, makes_normal_tensors, move_hooks, set_module

__all__ = ["fuse_known_modules", "fuse_modules", "fuse_modules_qat"]

Names = Sequence[str] | Sequence[Sequence[str]]


def fuse_known_modules(
    mod_list: list[nn.Module], is_qat: bool, additional_fuser_method_mapping: dict[Any, Any] | None = None
) -> list[nn.Module]:
    """The fused module, followed by an Identity for each module that it absorbed.

    Hooks and pre-hooks of all the modules move to the fused one, in order.

    Raises:
        NotImplementedError: nothing fuses these classes. ValueError: the wrong mode, or parts that do not fit.
    """
    kinds = [type_before_parametrizations(module) for module in mod_list]
    fused = get_fuser_method(kinds, additional_fuser_method_mapping)(is_qat, *mod_list)
    fused.train(mod_list[0].training)
    move_hooks(mod_list, fused)
    qconfig = getattr(mod_list[0], "qconfig", None)
    if qconfig is not None:
        fused.qconfig = qconfig
    return [fused, *(nn.Identity().train(mod_list[0].training) for _ in mod_list[1:])]


@makes_normal_tensors
def _fuse(
    model: nn.Module,
    modules_to_fuse: Names,
    is_qat: bool,
    inplace: bool,
    fuser_func: Callable[..., list[nn.Module]],
    fuse_custom_config_dict: dict[str, Any] | None,
) -> nn.Module:
    rows: list[Any] = list(modules_to_fuse)
    if all(isinstance(name, str) for name in rows):
        rows = [rows]
    if not inplace:
        model = clone_model(model)
    extra = (fuse_custom_config_dict or {}).get("additional_fuser_method_mapping", {})
    work: list[tuple[Sequence[str], list[nn.Module]]] = []
    for names in rows:
        modules = [get_module(model, name) for name in names]
        _check_row(names, modules, is_qat, extra if fuser_func is fuse_known_modules else None)
        work.append((names, modules))
    for names, modules in work:
        try:
            fused = fuser_func(modules, is_qat, extra)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise type(error)(f"cannot fuse {list(names)}: {error}") from error
        for name, module in zip(names, fused, strict=True):
            set_module(model, name, module)
    return model


def _check_row(names: Sequence[str], modules: list[nn.Module], is_qat: bool, extra: dict[Any, Any] | None) -> None:
    """What can be known before anything is changed."""
    if len(modules) < 2:
        raise ValueError(f"cannot fuse {list(names)}: it takes two modules or more")
    if len(set(map(id, modules))) != len(modules):
        raise ValueError(f"cannot fuse {list(names)}: a module appears twice")
    if extra is None:
        return
    try:
        get_fuser_method([type_before_parametrizations(m) for m in modules], extra)
    except NotImplementedError as error:
        raise NotImplementedError(f"cannot fuse {list(names)}: {error}") from error


def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: Callable[..., list[nn.Module]] = fuse_known_modules,
    fuse_custom_config_dict: dict[str, Any] | None = None,
) -> nn.Module:
    """Fuses rows of modules for inference: a batch norm is folded into the layer in front of it.

    Rows that fuse: Conv1d/2d/3d with BatchNorm, with BatchNorm and ReLU, with ReLU; Linear the same way;
    ConvTranspose with BatchNorm; BatchNorm2d/3d with ReLU. ReLU6 goes wherever ReLU does. The first name gets the
    fused module, the others an Identity. Only fuse modules whose outputs nothing else uses.

    Args:
        model: in eval mode.
        modules_to_fuse: names of modules in a row, ``["conv", "bn", "relu"]``, or a list of such rows.
        inplace: change the model itself instead of a copy.
        fuser_func: what fuses a list of modules, called as :func:`fuse_known_modules`.
        fuse_custom_config_dict: ``{"additional_fuser_method_mapping": {(ClassA, ClassB): fuser}}``.

    Returns:
        The fused model.

    Raises:
        ValueError: an unknown name, or a model in training mode. NotImplementedError: nothing fuses such a row.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU()).eval()
        >>> type(fuse_modules(model, ["0", "1", "2"])[0]).__name__
        'ConvReLU2d'
    """
    return _fuse(model, modules_to_fuse, False, inplace, fuser_func, fuse_custom_config_dict)


def fuse_modules_qat(
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: Callable[..., list[nn.Module]] = fuse_known_modules,
    fuse_custom_config_dict: dict[str, Any] | None = None,
) -> nn.Module:
    """Fuses rows of modules for quantization-aware training: batch norms stay, and go on training.

    Args:
        model: in training mode.
        modules_to_fuse, inplace, fuser_func, fuse_custom_config_dict: as for :func:`fuse_modules`.

    Returns:
        The fused model.

    Raises:
        ValueError: an unknown name, or a model in eval mode. NotImplementedError: nothing fuses such a row.
    """
    return _fuse(model, modules_to_fuse, True, inplace, fuser_func, fuse_custom_config_dict)
