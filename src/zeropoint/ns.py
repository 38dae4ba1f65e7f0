"""The numeric suite by a short name: everything of :mod:`zeropoint.ao.ns`."""

from zeropoint.ao.ns import (
    Logger,
    OutputLogger,
    Shadow,
    ShadowLogger,
    compare_model_outputs,
    compare_model_stub,
    compare_weights,
    get_logger_dict,
    get_matching_activations,
    prepare_model_outputs,
    prepare_model_with_stubs,
)

__all__ = [
    "Logger",
    "OutputLogger",
    "Shadow",
    "ShadowLogger",
    "compare_model_outputs",
    "compare_model_stub",
    "compare_weights",
    "get_logger_dict",
    "get_matching_activations",
    "prepare_model_outputs",
    "prepare_model_with_stubs",
]
