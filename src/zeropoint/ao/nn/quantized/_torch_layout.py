"""State dicts of ``torch.ao``'s quantized modules, brought to this package's flat layout.

``torch.ao`` keeps a Linear as ``_packed_params._packed_params``, a (quantized weight, bias) pair, and a convolution as
a quantized ``weight`` beside ``bias``; here they are plain tensors.

May import: ``tensor``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zeropoint.ao.nn.quantized._weights import split_weight
from zeropoint.tensor import QTensor

__all__ = ["flatten_packed_params"]

_PAIR = "_packed_params._packed_params"


def flatten_packed_params(state_dict: dict[str, Any], prefix: str, axis: int) -> bool:
    """Replaces what ``torch.ao`` stores under ``prefix`` by this package's plain tensors.

    Args:
        state_dict: the dict that a module loads; changed in place.
        prefix: the module's path, with a dot at its end.
        axis: the channel dimension of the weight.

    Returns:
        Whether anything was found.
    """
    pair = state_dict.pop(prefix + _PAIR, None)
    state_dict.pop(prefix + "_packed_params.dtype", None)
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        state_dict[prefix + "weight"], state_dict[prefix + "bias"] = pair
    weight = state_dict.get(prefix + "weight")
    if not isinstance(weight, Tensor) or not (isinstance(weight, QTensor) or weight.is_quantized):
        return False
    codes, scale, zero_point = split_weight(weight, axis, f"{prefix}weight")
    state_dict[prefix + "weight"] = codes
    state_dict[prefix + "weight_scale"] = scale
    state_dict[prefix + "weight_zero_point"] = zero_point
    bias = state_dict.get(prefix + "bias")
    if bias is None:
        state_dict.pop(prefix + "bias", None)
    else:
        state_dict[prefix + "bias"] = bias.detach()
    return True
