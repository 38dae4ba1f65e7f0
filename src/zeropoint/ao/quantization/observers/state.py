"""Saving, loading, merging and synchronizing what a model's observers have seen.

May import: ``ops.histogram``, ``observers.base``, ``observers.minmax``, ``observers.histogram``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.ao.quantization.observers.base import ObserverBase, ObservingModule
from zeropoint.ao.quantization.observers.minmax import AveragingObserver, RangeObserver
from zeropoint.ops.histogram import redistribute

__all__ = ["get_observer_state_dict", "load_observer_state_dict", "merge_observer_state_dicts", "sync_observers"]


def _outermost_observers(model: nn.Module) -> Iterator[tuple[str, ObservingModule]]:
    """Observers and fake quantizers by name, without the observers inside fake quantizers."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ObservingModule) and not any(name.startswith(outer) for outer in inside):
            inside.append(f"{name}." if name else "")
            yield name, module


# --- save and load ------------------------------------------------------------------------------------------------


def get_observer_state_dict(model: nn.Module) -> OrderedDict[str, Tensor]:
    """The statistics, grids and flags of every observer and fake quantizer in a model, so that it need not be
    calibrated again.

    Returns:
        The matching part of ``model.state_dict()``, under the same keys: ``"conv1.activation_post_process.min_val"``.
    """
    state = OrderedDict[str, Tensor]()
    for name, observer in _outermost_observers(model):
        state.update(observer.state_dict(prefix=f"{name}." if name else ""))
    return state


def load_observer_state_dict(model: nn.Module, obs_dict: Mapping[str, Tensor]) -> None:
    """Loads what :func:`get_observer_state_dict` saved, into a model with the same observers.

    Statistics take the loaded shape; buffers stay on their device.

    Raises:
        RuntimeError: observers without their statistics, or entries without an observer; nothing is loaded then.
            Flags and grids of fake quantizers may be absent, as they are for weights in torch.ao's files.
    """
    observers = [(f"{name}." if name else "", module) for name, module in _outermost_observers(model)]
    known = {prefix + key for prefix, module in observers for key in module.state_dict()}
    needed = {
        key
        for name, module in model.named_modules()
        if isinstance(module, ObserverBase)
        for key in module.state_dict(prefix=f"{name}." if name else "")
    }
    missing, unexpected = sorted(needed - set(obs_dict)), sorted(set(obs_dict) - known)
    if missing or unexpected:
        raise RuntimeError(
            f"the observer state does not fit the model: missing {missing}, unexpected {unexpected}. Prepare the "
            "model with the qconfig that was saved"
        )
    for prefix, module in observers:
        own = {key: obs_dict[prefix + key] for key in module.state_dict() if prefix + key in obs_dict}
        module.load_state_dict(own, strict=False)


# --- merge --------------------------------------------------------------------------------------------------------


def merge_observer_state_dicts(*dicts: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
    """One state from several calibration runs of one model, as if one run had seen all the data.

    Ranges become their union; so do averaged ranges, whose order of batches is not known. Histograms are laid over the
    union and added. A run that never reached an observer adds nothing to it. What is left, such as flags and the
    grids of fake quantizers, is taken from the first state; a fake quantizer makes its grid anew from the merged
    statistics at its next call with the observer on.

    Args:
        dicts: what :func:`get_observer_state_dict` gave, from models prepared alike.

    Raises:
        ValueError: no state, states with different keys, or with different numbers of channels or bins.
    """
    if not dicts:
        raise ValueError("merge_observer_state_dicts needs at least one state")
    for other in dicts[1:]:
        if set(other) != set(dicts[0]):
            raise ValueError(f"the states have different keys: {sorted(set(other) ^ set(dicts[0]))}")
    merged = OrderedDict((key, value.clone()) for key, value in dicts[0].items())
    for key in dicts[0]:
        if key.rpartition(".")[2] != "min_val":
            continue
        prefix = key.removesuffix("min_val")
        names = [name for name in ("min_val", "max_val", "histogram") if prefix + name in dicts[0]]
        states = [{name: state[prefix + name] for name in names} for state in dicts]
        merged.update({prefix + name: value for name, value in _merge(states, prefix or "observer").items()})
    return merged


def _merge(states: Iterable[dict[str, Tensor]], name: str, average: bool = False) -> dict[str, Tensor]:
    """One observer's statistics from several, on the device of the first."""
    states = list(states)
    device = states[0]["min_val"].device
    seen = [{key: value.to(device) for key, value in state.items()} for state in states if _has_seen(state)]
    if not seen:
        return states[0]
    lows, highs = [state["min_val"] for state in seen], [state["max_val"] for state in seen]
    if len({low.shape for low in lows}) > 1:
        raise ValueError(f"{name}: the states have different numbers of channels: {[tuple(v.shape) for v in lows]}")
    if average:
        return {"min_val": _finite_mean(lows), "max_val": _finite_mean(highs)}
    merged = {"min_val": torch.stack(lows).amin(0), "max_val": torch.stack(highs).amax(0)}
    if "histogram" in seen[0]:
        merged["histogram"] = _merge_histograms(seen, merged, name)
    return merged


def _has_seen(state: dict[str, Tensor]) -> bool:
    return bool((state["min_val"] <= state["max_val"]).any())


def _finite_mean(values: list[Tensor]) -> Tensor:
    stacked = torch.stack(values).to(torch.float64)
    finite = torch.isfinite(stacked)
    mean = torch.where(finite, stacked, 0.0).sum(0) / finite.sum(0)
    return torch.where(finite.any(0), mean, stacked[0]).to(values[0].dtype)


def _merge_histograms(states: list[dict[str, Tensor]], merged: dict[str, Tensor], name: str) -> Tensor:
    if len({state["histogram"].shape for state in states}) > 1:
        raise ValueError(f"{name}: the states have different numbers of bins")
    low, high = float(merged["min_val"]), float(merged["max_val"])
    total = torch.zeros_like(states[0]["histogram"], dtype=torch.float64)
    for state in states:
        counts = state["histogram"].to(torch.float64)
        total += redistribute(counts, float(state["min_val"]), float(state["max_val"]), low, high)
    return total


# --- several processes --------------------------------------------------------------------------------------------


def sync_observers(model: nn.Module, group: Any = None) -> None:
    """Gives every process of a group the statistics of all, in one exchange.

    Ranges become their union, histograms are added over the union of their ranges, and averaged ranges become the mean
    over the processes that saw data: what one average over the mean of their batches would have given. Fake
    quantizers make their grid anew. All processes end with equal buffers. Synchronize histograms once, after the
    calibration: a second exchange would count what they already share again.

    Args:
        model: the same prepared model in every process, on any device.
        group: a ``torch.distributed`` process group; None is the default group.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized.
        ValueError: the processes have different observers.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError("sync_observers needs torch.distributed: call torch.distributed.init_process_group first")
    observers = {name: module for name, module in model.named_modules() if isinstance(module, RangeObserver)}
    own = {
        name: {key: getattr(observer, key).cpu() for key in _statistics(observer)}
        for name, observer in observers.items()
    }
    gathered: list[dict[str, dict[str, Tensor]]] = [{}] * distributed.get_world_size(group)
    distributed.all_gather_object(gathered, own, group=group)
    for rank, other in enumerate(gathered):
        if set(other) != set(own):
            raise ValueError(f"process {rank} has other observers: {sorted(set(other) ^ set(own))}")
    for name, observer in observers.items():
        average = isinstance(observer, AveragingObserver)
        for key, value in _merge([state[name] for state in gathered], name or "observer", average).items():
            setattr(observer, key, value.to(getattr(observer, key)))
    for module in model.modules():
        if isinstance(module, ObservingModule):
            module.refresh_grid()


def _statistics(observer: RangeObserver) -> list[str]:
    return ["min_val", "max_val", *(["histogram"] if hasattr(observer, "histogram") else [])]
