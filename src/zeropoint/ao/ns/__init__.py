"""What did quantization cost? Float and quantized models side by side, by ``torch.ao``'s names."""

from zeropoint.ao.ns import _numeric_suite
from zeropoint.ao.ns._numeric_suite import (
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
    "_numeric_suite",
    "compare_model_outputs",
    "compare_model_stub",
    "compare_weights",
    "get_logger_dict",
    "get_matching_activations",
    "prepare_model_outputs",
    "prepare_model_with_stubs",
]
