"""The error of every layer of a quantized model: of its weight, by itself, and with all that came before.

May import: floors 1 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zeropoint.analysis._data import as_batches, with_progress
from zeropoint.analysis._errors import ErrorMeter, TensorError, tensor_error
from zeropoint.analysis._island import FloatIsland
from zeropoint.ao.ns import compare_model_outputs, compare_model_stub, compare_weights
from zeropoint.ao.ns._numeric_suite import weight_of
from zeropoint.ao.quantization.quantization_mappings import (
    DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS,
    DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
    get_default_compare_output_module_list,
)

__all__ = ["LayerError", "NamedArguments", "activation_errors", "layer_errors", "own_errors", "weight_errors"]


@dataclass(frozen=True)
class LayerError:
    """What quantization cost at one layer.

    Attributes:
        name: its path in the model.
        kind: the name of the quantized class.
        weight: of its weight; None where it has none.
        own: of its output, given the very input that the quantized layer had.
        activation: of its output, with all that came before.
    """

    name: str
    kind: str
    weight: TensorError | None
    own: TensorError | None
    activation: TensorError | None


def weight_errors(float_model: nn.Module, q_model: nn.Module) -> dict[str, TensorError]:
    """The error of every quantized weight, worst SQNR first.

    Args:
        float_model: the float model, fused as the quantized one was.
        q_model: the quantized model.

    Returns:
        ``{path of the module: error}``; a module with several weights has an entry for each, ``path.weight_name``.

    Example:
        >>> import torch
        >>> from zeropoint.analysis import weight_errors
        >>> from zeropoint.ao.quantization import quantize_dynamic
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> list(weight_errors(model, quantize_dynamic(model)))
        ['0']
    """
    errors = {}
    for key, wanted, got in _weights(float_model, q_model):
        path, _, leaf = key.rpartition(".")
        errors[path if leaf in ("weight", "_packed_params") else key] = tensor_error(wanted, got)
    return _worst_first(errors)


def _weights(float_model: nn.Module, q_model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Key, float weight and quantized weight; one that is kept as two sums of codes is given as their float sum."""
    state = q_model.state_dict()
    for key, pair in compare_weights(float_model.state_dict(), state).items():
        wanted, got = pair["float"], pair["quantized"]
        if got.is_quantized and wanted.shape == got.shape:
            rest = weight_of(f"{key}_rest", state.get(f"{key}_rest"), state)
            yield key, wanted, got if rest is None else got.dequantize() + rest.dequantize()


def _by_module(float_model: nn.Module, q_model: nn.Module) -> dict[str, TensorError]:
    """One error a module: of all its weights together, since a recurrent layer has many."""
    meters: dict[str, ErrorMeter] = {}
    for key, wanted, got in _weights(float_model, q_model):
        meters.setdefault(key.rpartition(".")[0], ErrorMeter()).update(wanted, got)
    return {name: meter.result() for name, meter in meters.items()}


def activation_errors(
    float_model: nn.Module, q_model: nn.Module, data: Any, *, progress: bool = False
) -> dict[str, TensorError]:
    """The error of every layer's output, with all that came before, worst SQNR first.

    Args:
        float_model: the float model, fused as the quantized one was.
        q_model: the quantized model.
        data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        progress: show a progress bar, if tqdm or rich is installed.

    Raises:
        TypeError, ValueError: data that is none.
    """
    classes = {*get_default_compare_output_module_list(), FloatIsland}

    def compare(floating: Any, quantized: Any, *batch: Any) -> Any:
        return compare_model_outputs(floating, quantized, *batch, allow_list=classes)

    return _measure(float_model, q_model, data, "comparing activations", progress, compare)


def own_errors(
    float_model: nn.Module, q_model: nn.Module, data: Any, *, progress: bool = False
) -> dict[str, TensorError]:
    """The error that every layer adds by itself, given the very input that the quantized one has, worst SQNR first.

    Args:
        float_model, q_model, data, progress: as for :func:`activation_errors`.
    """
    classes = {*DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, *DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS}

    def compare(floating: Any, quantized: Any, *batch: Any) -> Any:
        return compare_model_stub(floating, quantized, classes, *batch)

    return _measure(float_model, q_model, data, "comparing layers", progress, compare)


def _measure(
    float_model: nn.Module, q_model: nn.Module, data: Any, what: str, progress: bool, compare: Any
) -> dict[str, TensorError]:
    meters: dict[str, ErrorMeter] = {}
    for batch in with_progress(as_batches(data), what, progress):
        models: tuple[nn.Module, nn.Module] = float_model, q_model
        arguments, prefix = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), ""
        if isinstance(batch, Mapping):
            models, prefix = (NamedArguments(float_model), NamedArguments(q_model)), "model."
        for key, pair in compare(*models, *arguments).items():
            meter = meters.setdefault(key.removesuffix("stats").removesuffix(".").removeprefix(prefix), ErrorMeter())
            for wanted, got in zip(pair["float"], pair["quantized"], strict=False):
                wanted, got = _output(wanted), _output(got)
                if wanted is not None and got is not None and wanted.shape == got.shape:
                    meter.update(wanted, got)
    return _worst_first({name: meter.result() for name, meter in meters.items()})


class NamedArguments(nn.Module):
    """A model that takes its named arguments as one dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Any:
        return self.model(**batch)


def _output(x: Any) -> Tensor | None:
    while isinstance(x, (tuple, list)) and x:
        x = x[0]
    return x if isinstance(x, Tensor) else None


def _worst_first(errors: dict[str, TensorError]) -> dict[str, TensorError]:
    return dict(sorted(errors.items(), key=lambda item: item[1].sqnr))


def layer_errors(float_model: nn.Module, q_model: nn.Module, data: Any, *, progress: bool = False) -> list[LayerError]:
    """The errors of every layer, in the order of the model.

    Args:
        float_model: the float model, fused as the quantized one was.
        q_model: the quantized model.
        data: a tensor, or batches: tensors, tuples of arguments, or dicts of named ones.
        progress: show a progress bar, if tqdm or rich is installed.

    Returns:
        One entry for each quantized module that has a float twin of the same path, and for each
        :class:`~zeropoint.analysis.FloatIsland`. A recurrent layer's weights count as one.
    """
    weights = _by_module(float_model, q_model)
    own = own_errors(float_model, q_model, data, progress=progress)
    activations = activation_errors(float_model, q_model, data, progress=progress)
    return [
        LayerError(name, module._get_name(), weights.get(name), own.get(name), activations.get(name))
        for name, module in q_model.named_modules()
        if name in weights or name in own or name in activations
    ]
