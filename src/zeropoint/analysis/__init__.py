"""What did quantization cost, where, and what helps.

* errors, layer by layer: :func:`weight_errors`, :func:`own_errors`, :func:`activation_errors`, :func:`layer_errors`;
* which layers hurt: :func:`sensitivity`; as much as accuracy allows: :func:`quantize_with_accuracy`;
* which modules fuse: :func:`find_fusable`;
* what helps, before quantizing: :func:`equalize`, :func:`correct_bias`, :func:`smooth`; :func:`adaround` on a prepared
  model, :func:`reestimate_batch_norm` on one in training. Each returns a changed copy.
"""

from zeropoint.analysis._adaround import adaround
from zeropoint.analysis._batch_norm import reestimate_batch_norm
from zeropoint.analysis._bias_correction import correct_bias
from zeropoint.analysis._channel_clamp import ChannelClamp
from zeropoint.analysis._equalization import equalize
from zeropoint.analysis._errors import TensorError, tensor_error
from zeropoint.analysis._fusable import find_fusable
from zeropoint.analysis._island import FloatIsland
from zeropoint.analysis._layers import LayerError, activation_errors, layer_errors, own_errors, weight_errors
from zeropoint.analysis._search import AccuracyResult, Step, quantize_with_accuracy
from zeropoint.analysis._sensitivity import LayerSensitivity, Sensitivity, output_sqnr, sensitivity
from zeropoint.analysis._smooth import smooth

__all__ = [
    "AccuracyResult",
    "ChannelClamp",
    "FloatIsland",
    "LayerError",
    "LayerSensitivity",
    "Sensitivity",
    "Step",
    "TensorError",
    "activation_errors",
    "adaround",
    "correct_bias",
    "equalize",
    "find_fusable",
    "layer_errors",
    "output_sqnr",
    "own_errors",
    "quantize_with_accuracy",
    "reestimate_batch_norm",
    "sensitivity",
    "smooth",
    "tensor_error",
    "weight_errors",
]
