"""What did quantization cost, where, and what helps.

* errors, layer by layer: :func:`weight_errors`, :func:`own_errors`, :func:`activation_errors`, :func:`layer_errors`;
* which layers hurt: :func:`sensitivity`; as much as accuracy allows: :func:`quantize_with_accuracy`.
"""

from zeropoint.analysis._errors import TensorError, tensor_error
from zeropoint.analysis._island import FloatIsland
from zeropoint.analysis._layers import LayerError, activation_errors, layer_errors, own_errors, weight_errors
from zeropoint.analysis._search import AccuracyResult, Step, quantize_with_accuracy
from zeropoint.analysis._sensitivity import LayerSensitivity, Sensitivity, output_sqnr, sensitivity

__all__ = [
    "AccuracyResult",
    "FloatIsland",
    "LayerError",
    "LayerSensitivity",
    "Sensitivity",
    "Step",
    "TensorError",
    "activation_errors",
    "layer_errors",
    "output_sqnr",
    "own_errors",
    "quantize_with_accuracy",
    "sensitivity",
    "tensor_error",
    "weight_errors",
]
