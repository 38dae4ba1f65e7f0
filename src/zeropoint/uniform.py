"""Symmetric per-tensor quantization of a model's parameters, in place, with integer codes that restore it exactly.

Each parameter ``w`` becomes ``clamp(round(s * w), -quant_max, quant_max) / s`` with ``s = quant_max / max(abs(w))``.

May import: torch only.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["load_uniform", "save_uniform", "uniform_dequantize", "uniform_quantize"]

UniformCodes = dict[str, dict[str, Tensor]]
"""``{parameter name: {"quant": codes, "scale": s}}``."""

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FORMAT = "zeropoint.uniform"
_CODE_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


@torch.no_grad()
def uniform_quantize(model: nn.Module, quant_max: int) -> tuple[nn.Module, UniformCodes]:
    """Fake-quantizes a model's parameters in place and returns their integer codes.

    Each parameter ``w`` becomes ``clamp(round(s * w), -quant_max, quant_max) / s`` with
    ``s = quant_max / max(abs(w))``, or ``s = 1`` where all of ``w`` is 0. The arithmetic is that of the parameter's
    dtype, and float64 where that dtype cannot hold the scale or every code. Buffers stay as they are. A parameter
    that stands under several names is quantized once and recorded under each of them.

    Args:
        model: module to quantize in place; pass a copy to keep the original weights. Parameters may be frozen, empty,
            0-d, of float16, bfloat16, float32 or float64, on any device.
        quant_max: the largest code, from 1 to ``2**63 - 1``. Codes use the smallest signed dtype that holds it.

    Returns:
        The same model, and for each parameter name ``{"quant": codes, "scale": s}``: detached CPU tensors, the scale
        0-d.

    Raises:
        TypeError: ``quant_max`` is not an int, or a parameter is not real and floating.
        ValueError: ``quant_max`` is out of range, or a parameter holds NaN or infinite values. The message names the
            parameter. Nothing is changed then.

    Example:
        >>> from torch import nn
        >>> from zeropoint import uniform_quantize, uniform_dequantize
        >>> model, codes = uniform_quantize(nn.Linear(2, 3), quant_max=127)
        >>> codes["weight"]["quant"].dtype
        torch.int8
        >>> restored = uniform_dequantize(nn.Linear(2, 3), codes)
        >>> bool(restored.weight.equal(model.weight))
        True
    """
    if isinstance(quant_max, bool) or not isinstance(quant_max, int):
        raise TypeError(f"quant_max must be an int, got {quant_max!r}")
    if not 1 <= quant_max < 2**63:
        raise ValueError(f"quant_max must be from 1 to 2**63 - 1, got {quant_max}")
    code_dtype = next(dtype for dtype in _CODE_DTYPES if quant_max <= torch.iinfo(dtype).max)

    work = [(parameter, names, _scale(parameter, quant_max, names[0])) for parameter, names in _parameters(model)]
    model_dict: UniformCodes = {}
    for parameter, names, scale in work:
        codes = _codes(parameter, scale, quant_max).to(code_dtype)
        parameter.copy_(_values(codes, scale))
        entry = {"quant": codes.cpu(), "scale": scale.cpu()}
        model_dict.update((name, entry) for name in names)
    return model, model_dict


@torch.no_grad()
def uniform_dequantize(model: nn.Module, model_dict: Mapping[str, Mapping[str, Tensor]]) -> nn.Module:
    """Loads parameters from the codes of :func:`uniform_quantize`, in place and bit for bit.

    Tied parameters may be untied in ``model``, and the other way round: a parameter is restored from whichever of its
    names has an entry.

    Args:
        model: module to overwrite in place, on any device.
        model_dict: codes and scales of every parameter of ``model``, by name; further names are ignored.

    Returns:
        The same model, each parameter being ``codes / scale``.

    Raises:
        KeyError: a parameter without codes. ValueError: codes of another shape. Nothing is changed then.
    """
    work: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    for parameter, names in _parameters(model):
        entry = next((model_dict[name] for name in names if name in model_dict), None)
        if entry is None:
            raise KeyError(f"no codes for the parameter {' or '.join(names)}")
        codes, scale = entry["quant"], entry["scale"]
        if codes.shape != parameter.shape or scale.numel() != 1:
            raise ValueError(
                f"the parameter {names[0]} has shape {tuple(parameter.shape)}, its codes {tuple(codes.shape)} and its "
                f"scale {tuple(scale.shape)}: codes need the parameter's shape, the scale one element"
            )
        work.append((parameter, codes, scale.reshape(())))
    for parameter, codes, scale in work:
        parameter.copy_(_values(codes.to(parameter.device), scale.to(parameter.device)))
    return model


# --- one parameter ------------------------------------------------------------------------------------------------


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[str]]]:
    """Each parameter once, with all of its names."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    for key, parameter in found.items():
        yield parameter, names[key]


def _scale(parameter: Tensor, quant_max: int, name: str) -> Tensor:
    """The 0-d scale of one parameter, after every check that it needs.

    Its dtype is the parameter's where that tells all codes apart and holds the scale, else float64.
    """
    if parameter.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"the parameter {name} has dtype {parameter.dtype}: only real floating ones can be quantized")
    if parameter.is_meta:
        raise ValueError(f"the parameter {name} is on the meta device and has no values")
    peak = parameter.abs().max() if parameter.numel() else parameter.new_zeros(())
    if not bool(torch.isfinite(peak)):
        raise ValueError(f"the parameter {name} holds NaN or infinite values")
    if not bool(peak > 0):
        return torch.ones_like(peak)
    if quant_max <= 2 / torch.finfo(parameter.dtype).eps:
        scale = quant_max / peak
        if bool(torch.isfinite(scale)):
            return scale
    return (float(quant_max) / peak.to(torch.float64)).clamp(max=torch.finfo(torch.float64).max)


def _codes(parameter: Tensor, scale: Tensor, quant_max: int) -> Tensor:
    """int64 codes. Beyond 2**53 the bound itself is no float64, so saturation is done on the integers."""
    rounded = torch.round(scale * parameter.to(scale.dtype)).to(torch.float64)
    beyond = rounded.abs() >= float(quant_max)
    inside = torch.where(beyond, 0.0, rounded).to(torch.int64)
    return torch.where(beyond, rounded.sign().to(torch.int64) * quant_max, inside)


def _values(codes: Tensor, scale: Tensor) -> Tensor:
    """``codes / scale``: what both directions write, so that they agree to the last bit."""
    compute = torch.float64 if scale.dtype == torch.float64 else torch.float32
    return codes.to(compute) / scale.to(compute)


# --- files --------------------------------------------------------------------------------------------------------


def save_uniform(model_dict: Mapping[str, Mapping[str, Tensor]], path: str | os.PathLike[str]) -> None:
    """Writes the codes of :func:`uniform_quantize` to a safetensors file.

    The file holds ``<name>.quant`` and ``<name>.scale`` for each parameter; further names of a tied parameter stand
    in its metadata.

    Args:
        model_dict: what :func:`uniform_quantize` returned.
        path: the file; an old one is replaced.

    Raises:
        ImportError: safetensors is not installed.
    """
    tensors: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, entry in model_dict.items():
        first = first_names.setdefault(id(entry["quant"]), name)
        if first != name:
            tied[name] = first
            continue
        tensors[f"{name}.quant"] = entry["quant"].contiguous()
        tensors[f"{name}.scale"] = entry["scale"].contiguous()
    _safetensors().save_file(tensors, os.fspath(path), metadata={"format": _FORMAT, "tied": json.dumps(tied)})


def load_uniform(path: str | os.PathLike[str]) -> UniformCodes:
    """Reads what :func:`save_uniform` wrote, for :func:`uniform_dequantize`.

    Raises:
        ImportError: safetensors is not installed. ValueError: another kind of file.
    """
    with _safetensors().safe_open(os.fspath(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{os.fspath(path)} was not written by save_uniform")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)
    model_dict: UniformCodes = {}
    for key, value in tensors.items():
        name, _, kind = key.rpartition(".")
        model_dict.setdefault(name, {})[kind] = value
    for name, first in json.loads(metadata.get("tied", "{}")).items():
        model_dict[name] = model_dict.get(first, {})
    for name, entry in model_dict.items():
        if set(entry) != {"quant", "scale"}:
            raise ValueError(f"{os.fspath(path)} lacks the codes or the scale of {name}")
    return model_dict


def _safetensors() -> Any:
    try:
        module = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("uniform files need the package safetensors: pip install safetensors") from error
    return module
