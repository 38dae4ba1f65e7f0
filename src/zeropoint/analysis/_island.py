"""A float module inside the quantized part of a model.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._data import call, run
from zeropoint.ao.nn.quantized._base import QuantizedModule
from zeropoint.ao.nn.quantized._from_float import observed_grid
from zeropoint.ao.nn.quantized.quantize import Quantize
from zeropoint.ao.quantization import QConfig, convert, prepare
from zeropoint.ao.quantization.observers.base import ObservingModule
from zeropoint.ao.quantization.quantization_mappings import KEEPS_GRID
from zeropoint.ao.quantization.summary import ModuleRecord, QuantizationSummary
from zeropoint.ao.quantization.utils import clone_model, is_internal_hook, set_module
from zeropoint.dtypes import as_qdtype
from zeropoint.tensor import QTensor

__all__ = ["FloatIsland", "convert_with_islands", "find_islands", "keep_in_float", "place_island"]


NOT_QUANTIZABLE = "cannot compute on quantized tensors"


class FloatIsland(nn.Module):
    """Runs a module in float between quantized ones.

    Quantized arguments are dequantized. If the result is one float tensor, it is quantized on the grid that its
    observer found in calibration.

    Args:
        module: the float module.
        observer: sees the results of calibration; None: the result stays float, since only islands read it.
        reason: why it is in float, for the summary of the conversion.

    Attributes:
        module: the float module.
        quantize: after calibration, what quantizes the result; None: it stays float.
        qconfig: None, so that ``prepare`` and ``convert`` leave the inside alone.
    """

    def __init__(self, module: nn.Module, observer: nn.Module | None, reason: str = "kept in float") -> None:
        super().__init__()
        self.module = module
        self.reason = reason
        self.observer = observer
        self.quantize: Quantize | None = None
        self.qconfig = None
        self.training = module.training
        for part in module.modules():
            part.qconfig = None  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, quantized where quantized modules read it."""
        result = self.module(*_dequantized(args), **_dequantized(kwargs))
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if self.observer is not None:
            return self.observer(result)
        return result if self.quantize is None else self.quantize(result)

    def finish(self) -> None:
        """Calibration is over: takes the observer's grid."""
        observer: Any = self.observer
        if observer is not None:
            scale, zero_point = observed_grid(observer, use_precomputed=False)
            self.quantize = Quantize(float(scale), int(zero_point), as_qdtype(observer.dtype))
            self.observer = None


def _dequantized(x: Any) -> Any:
    if isinstance(x, QTensor):
        return x.dequantize()
    if isinstance(x, (tuple, list)):
        return type(x)(_dequantized(part) for part in x)
    return {key: _dequantized(part) for key, part in x.items()} if isinstance(x, dict) else x


def keep_in_float(prepared: nn.Module, names: Collection[str], readers: Mapping[str, list[str]]) -> nn.Module:
    """A copy of a prepared, calibrated model in which these modules are islands.

    Args:
        prepared: the model.
        names: the modules.
        readers: ``{module: all modules that read what it makes}``, of those of which this is known.
    """

    def stays_float(name: str) -> bool:
        """Whether only islands read it, perhaps behind modules that take any tensor."""
        return bool(readers.get(name)) and all(
            reader in names or (isinstance(prepared.get_submodule(reader), KEEPS_GRID) and stays_float(reader))
            for reader in readers[name]
        )

    model = clone_model(prepared)
    for name in names:
        place_island(model, name, not stays_float(name))
    return model


def place_island(prepared: nn.Module, name: str, quantized: bool) -> None:
    """Makes a module of a prepared model an island, in place; ``quantized``: its result goes back to codes."""
    module = prepared.get_submodule(name)
    observer = module._modules.pop("activation_post_process", None)
    for table in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in table.items() if is_internal_hook(hook)]:
            del table[key]
    set_module(prepared, name, FloatIsland(module, observer if quantized else None))


def convert_with_islands(prepared: nn.Module) -> nn.Module:
    """``convert`` of a model with islands."""
    model = clone_model(prepared)
    for module in model.modules():
        if isinstance(module, FloatIsland):
            module.finish()
    model = convert(model, inplace=True)
    _name_islands(model)
    return model


def _name_islands(model: Any) -> None:
    """In the summary of the conversion an island is one entry, under its own name."""
    islands = {name: module for name, module in model.named_modules() if isinstance(module, FloatIsland)}
    records, named = [], set()
    for record in model.quantization_summary:
        name = next((name for name in islands if f"{record.name}.".startswith(f"{name}.")), None)
        if name is None:
            records.append(record)
        elif name not in named:
            named.add(name)
            records.append(ModuleRecord(name, islands[name].module._get_name(), None, islands[name].reason))
    model.quantization_summary = QuantizationSummary(records)


def find_islands(model: nn.Module, batch: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Finds the modules that cannot compute on quantized tensors, by trying.

    Args:
        model: float model with qconfigs, in evaluation mode.
        batch: one batch of calibration data.

    Returns:
        The model with these modules as islands, and their paths.

    Raises:
        TypeError: what fails is the model itself, or a quantized layer that gets a float tensor.
    """
    model = clone_model(model)
    islands: list[str] = []
    while True:
        trial = prepare(model)
        run(trial, [batch])
        failure = _failing_module(convert_with_islands(trial), batch)
        if failure is None:
            return model, tuple(islands)
        name, module, error = failure
        if not name or name in islands or isinstance(module, (QuantizedModule, FloatIsland, ObservingModule)):
            raise error
        qconfig = next(q for q in (getattr(m, "qconfig", None) for m in model.modules()) if isinstance(q, QConfig))
        set_module(model, name, FloatIsland(model.get_submodule(name), qconfig.activation(), NOT_QUANTIZABLE))
        islands.append(name)


def _failing_module(model: nn.Module, batch: Any) -> tuple[str, nn.Module, TypeError] | None:
    """The innermost module that refuses the batch with a TypeError, as arithmetic on quantized tensors does."""
    names = {id(module): name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, args: running.append(m)))
        handles.append(module.register_forward_hook(lambda m, args, output: running.pop() and None))
    try:
        with torch.no_grad():
            call(model, batch)
    except TypeError as error:
        inner = running[-1] if running else model
        return names[id(inner)], inner, error
    finally:
        for handle in handles:
            handle.remove()
    return None
