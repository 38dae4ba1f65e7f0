"""Which modules in a row fuse, and into what.

May import: ``ao.nn.intrinsic``, ``fusing``, ``utils``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn._weight_norm import bake_weight
from zeropoint.ao.quantization.fusing import folded_layer
from zeropoint.ao.quantization.utils import clear_hooks

__all__ = [
    "DEFAULT_OP_LIST_TO_FUSER_METHOD",
    "fuse_conv_bn",
    "fuse_conv_bn_relu",
    "fuse_convtranspose_bn",
    "fuse_convtranspose_bn_relu",
    "fuse_linear_bn",
    "fuse_linear_bn_relu",
    "get_fuser_method",
]

Fuser = Callable[..., nn.Module]

_CONV_BN = {nn.Conv1d: nni.ConvBn1d, nn.Conv2d: nni.ConvBn2d, nn.Conv3d: nni.ConvBn3d}
_CONV_BN_RELU = {nn.Conv1d: nni.ConvBnReLU1d, nn.Conv2d: nni.ConvBnReLU2d, nn.Conv3d: nni.ConvBnReLU3d}
_TRANSPOSED_RELU = {
    nn.ConvTranspose1d: nni.ConvTransposeReLU1d,
    nn.ConvTranspose2d: nni.ConvTransposeReLU2d,
    nn.ConvTranspose3d: nni.ConvTransposeReLU3d,
}
_CONV_RELU = {nn.Conv1d: nni.ConvReLU1d, nn.Conv2d: nni.ConvReLU2d, nn.Conv3d: nni.ConvReLU3d}


def _check_mode(is_qat: bool, *modules: nn.Module) -> None:
    modes = {module.training for module in modules}
    if len(modes) > 1:
        raise ValueError("the modules to fuse must all be in training mode or all in eval mode")
    if is_qat and not modes.pop():
        raise ValueError("fuse_modules_qat takes a model in training mode: call model.train(), or use fuse_modules")
    if not is_qat and True in modes:
        raise ValueError("fuse_modules takes a model in eval mode: call model.eval(), or use fuse_modules_qat")


def _by_rank(table: Mapping[Any, type[nn.Module]], conv: nn.Module) -> type[nn.Module]:
    return next(fused for kind, fused in table.items() if isinstance(conv, kind))


def _folded(layer: nn.Module, bn: _BatchNorm) -> nn.Module:
    return folded_layer(clear_hooks(bake_weight(copy.deepcopy(layer))), bn)


def fuse_conv_bn(is_qat: bool, conv: nn.Module, bn: _BatchNorm) -> nn.Module:
    """A convolution and a batch norm: one folded convolution, or for training a ``ConvBn``.

    Raises:
        ValueError: the wrong mode, another number of channels, or no running statistics.
    """
    _check_mode(is_qat, conv, bn)
    if is_qat:
        _check_trainable(conv, bn)
        return _by_rank(_CONV_BN, conv)(bake_weight(conv), bn)
    return _folded(conv, bn)


def fuse_conv_bn_relu(is_qat: bool, conv: nn.Module, bn: _BatchNorm, relu: nn.Module) -> nn.Module:
    """As :func:`fuse_conv_bn`, with a rectifier: a ``ConvReLU`` with the batch norm folded, or a ``ConvBnReLU``."""
    _check_mode(is_qat, conv, bn, relu)
    if is_qat:
        _check_trainable(conv, bn)
        return _by_rank(_CONV_BN_RELU, conv)(bake_weight(conv), bn, relu)
    return _by_rank(_CONV_RELU, conv)(_folded(conv, bn), relu)


def fuse_linear_bn(is_qat: bool, linear: nn.Module, bn: _BatchNorm) -> nn.Module:
    """A linear layer and a batch norm: one folded linear layer, or for training a ``LinearBn1d``."""
    _check_mode(is_qat, linear, bn)
    if is_qat:
        _check_trainable(linear, bn)
        return nni.LinearBn1d(bake_weight(linear), bn)
    return _folded(linear, bn)


def fuse_linear_bn_relu(is_qat: bool, linear: nn.Module, bn: _BatchNorm, relu: nn.Module) -> nn.Module:
    """As :func:`fuse_linear_bn`, with a rectifier: a folded ``LinearReLU``, or a ``LinearBn1d`` and the rectifier."""
    _check_mode(is_qat, linear, bn, relu)
    fused = fuse_linear_bn(is_qat, linear, bn)
    return nn.Sequential(fused, relu) if is_qat else nni.LinearReLU(fused, relu)


def fuse_convtranspose_bn(is_qat: bool, convt: nn.Module, bn: _BatchNorm) -> nn.Module:
    """A transposed convolution and a batch norm: one folded transposed convolution.

    Raises:
        NotImplementedError: in training.
    """
    _check_mode(is_qat, convt, bn)
    if is_qat:
        raise NotImplementedError("a transposed convolution keeps no batch norm in training: fuse it in eval mode")
    return _folded(convt, bn)


def fuse_convtranspose_bn_relu(is_qat: bool, convt: nn.Module, bn: _BatchNorm, relu: nn.Module) -> nn.Module:
    """As :func:`fuse_convtranspose_bn`, with a rectifier: a ``ConvTransposeReLU`` with the batch norm folded."""
    _check_mode(is_qat, convt, bn, relu)
    return _by_rank(_TRANSPOSED_RELU, convt)(fuse_convtranspose_bn(is_qat, convt, bn), relu)


def _check_trainable(layer: nn.Module, bn: _BatchNorm) -> None:
    channels = getattr(layer, "out_channels", getattr(layer, "out_features", None))
    if bn.num_features != channels:
        raise ValueError(f"{type(bn).__name__} of {bn.num_features} channels behind a layer of {channels} channels")
    if not bn.affine or not bn.track_running_stats:
        raise ValueError("a batch norm must have affine=True and track_running_stats=True to be fused for training")


def _sequence(fused: type[nn.Module]) -> Fuser:
    """The fuser of rows that compute the same before and after: the fused class is a Sequential of them."""

    def fuse(is_qat: bool, *modules: nn.Module) -> nn.Module:
        if len({module.training for module in modules}) > 1:
            raise ValueError("the modules to fuse must all be in training mode or all in eval mode")
        return fused(*modules)

    return fuse


DEFAULT_OP_LIST_TO_FUSER_METHOD: dict[tuple[type[nn.Module], ...], Fuser] = {
    (nn.Linear, nn.BatchNorm1d): fuse_linear_bn,
    (nn.BatchNorm2d, nn.ReLU): _sequence(nni.BNReLU2d),
    (nn.BatchNorm3d, nn.ReLU): _sequence(nni.BNReLU3d),
    (nn.Linear, nn.ReLU): _sequence(nni.LinearReLU),
    (nn.Linear, nn.BatchNorm1d, nn.ReLU): fuse_linear_bn_relu,
}
"""Classes in a row → what fuses them; subclasses match too, and ReLU6 wherever ReLU does."""

for _conv, _convt, _bn in (
    (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d),
    (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
    (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d),
):
    for _norm in (_bn, nn.SyncBatchNorm):
        DEFAULT_OP_LIST_TO_FUSER_METHOD[(_conv, _norm)] = fuse_conv_bn
        DEFAULT_OP_LIST_TO_FUSER_METHOD[(_conv, _norm, nn.ReLU)] = fuse_conv_bn_relu
        DEFAULT_OP_LIST_TO_FUSER_METHOD[(_convt, _norm)] = fuse_convtranspose_bn
        DEFAULT_OP_LIST_TO_FUSER_METHOD[(_convt, _norm, nn.ReLU)] = fuse_convtranspose_bn_relu
    DEFAULT_OP_LIST_TO_FUSER_METHOD[(_conv, nn.ReLU)] = _sequence(_CONV_RELU[_conv])
    DEFAULT_OP_LIST_TO_FUSER_METHOD[(_convt, nn.ReLU)] = _sequence(_TRANSPOSED_RELU[_convt])
for _row, _fuser in list(DEFAULT_OP_LIST_TO_FUSER_METHOD.items()):
    if _row[-1] is nn.ReLU:
        _row6 = (*_row[:-1], nn.ReLU6)
        DEFAULT_OP_LIST_TO_FUSER_METHOD[_row6] = _fuser


def get_fuser_method(
    op_list: Sequence[type[nn.Module]], additional_fuser_method_mapping: dict[Any, Fuser] | None = None
) -> Fuser:
    """What fuses modules of these classes in a row; it is called as ``fuser(is_qat, *modules)``.

    Raises:
        NotImplementedError: nothing does.
    """
    table = {**DEFAULT_OP_LIST_TO_FUSER_METHOD, **(additional_fuser_method_mapping or {})}
    row = tuple(op_list)
    if row in table:
        return table[row]
    for pattern, fuser in table.items():
        if len(pattern) == len(row) and all(map(issubclass, row, pattern)):
            return fuser
    names = ", ".join(kind.__name__ for kind in row)
    raise NotImplementedError(f"nothing fuses ({names}): see DEFAULT_OP_LIST_TO_FUSER_METHOD for what does")
