"""Which module's output is whose input: found by running a model once.

May import: torch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeropoint.analysis._data import call

__all__ = ["Flow", "layer_channels"]

_METADATA = {"__get__", "size", "dim", "stride", "numel", "is_floating_point", "__len__", "is_contiguous"}


def tensors_in(x: Any) -> Iterator[Tensor]:
    """Every tensor in tuples, lists and dicts."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from tensors_in(part)
    elif isinstance(x, Mapping):
        for part in x.values():
            yield from tensors_in(part)


class Flow(TorchFunctionMode):
    """The flow of tensors between the modules of a model, as one run shows it.

    A tensor that anything but a module reads, such as an addition in a forward, or that the model returns, has an
    unknown reader, so nothing is concluded from it.

    Args:
        model: the model.
        batch: what to run it on.
        leaves: classes that are not looked into; modules without parts are leaves anyway.
    """

    def __init__(self, model: nn.Module, batch: Any, leaves: tuple[type[nn.Module], ...] = ()) -> None:
        super().__init__()
        self._leaf: nn.Module | None = None
        self._kept: list[Tensor] = []  # a tensor that is gone could lend its id to another one
        self._maker: dict[int, str] = {}
        self._readers: dict[int, list[str | None]] = {}
        self._calls: dict[str, list[list[int]]] = {}
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, leaves) or next(module.children(), None) is None
        }
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(name), with_kwargs=True))
        try:
            with torch.no_grad(), self:
                self._read(call(model, batch), None)
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._leaf is None and getattr(func, "__name__", "") not in _METADATA:
            self._read([args, kwargs or {}], None)
        return func(*args, **(kwargs or {}))

    def _read(self, x: Any, reader: str | None) -> list[int]:
        found = list(tensors_in(x))
        for tensor in found:
            self._kept.append(tensor)
            self._readers.setdefault(id(tensor), []).append(reader)
        return [id(tensor) for tensor in found]

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._leaf is None:
                self._leaf = module
                self._calls.setdefault(name, []).append(self._read([args, kwargs], name))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._leaf is not module:
                return
            self._leaf = None
            inputs = {id(tensor) for tensor in tensors_in([args, kwargs])}
            for tensor in tensors_in(output):
                self._kept.append(tensor)
                if id(tensor) not in inputs:
                    self._maker[id(tensor)] = name
                elif isinstance(module, nn.Identity):
                    self._readers[id(tensor)].remove(name)  # it handed the tensor on
                else:
                    self._readers[id(tensor)].append(None)  # it wrote into its input

        return leave

    def pairs(self, through: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, list[str], str]]:
        """``(first, modules between, second)``: all that ``first`` makes goes through the ones between into ``second``.

        Args:
            through: classes that may stand between.
        """
        for name, calls in self._calls.items():
            between: list[str] = []
            while len(calls) == 1 and len(calls[0]) == 1:
                tensor = calls[0][0]
                maker = self._maker.get(tensor)
                if maker is None or len(self._readers[tensor]) != 1 or len(self._calls.get(maker, ())) != 1:
                    break
                yield maker, between, name
                if not isinstance(self._modules[maker], through):
                    break
                between = [maker, *between]
                calls = self._calls[maker]

    def fans(self, makers: tuple[type[nn.Module], ...], readers: tuple[type[nn.Module], ...]) -> dict[str, list[str]]:
        """``{first: every module that reads what it makes}``, where all of those are of ``readers``."""
        found: dict[str, list[str]] = {}
        for tensor, maker in self._maker.items():
            names = self._readers.get(tensor, [])
            if not isinstance(self._modules[maker], makers) or len(self._calls[maker]) != 1 or not names:
                continue
            if all(
                name is not None and isinstance(self._modules[name], readers) and len(self._calls[name]) == 1
                for name in names
            ):
                found[maker] = [name for name in names if name is not None]
        return found


def layer_channels(layer: nn.Module) -> tuple[int, int] | None:
    """Input and output channels of a linear layer or a convolution; None for something else."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return layer.in_channels, layer.out_channels
    return None
