"""QConfigMapping: which qconfig a module gets, by its name, a pattern, its type, or for all.

May import: ``observer``, ``fake_quantize``, ``qconfig``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeropoint.ao.quantization.fake_quantize import FixedQParamsFakeQuantize, default_per_channel_weight_fake_quant
from zeropoint.ao.quantization.observer import (
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
    default_per_channel_weight_observer,
    default_placeholder_observer,
)
from zeropoint.ao.quantization.qconfig import (
    QConfig,
    QConfigAny,
    default_quint8_weight_qconfig,
    default_reuse_input_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
)

__all__ = ["QConfigMapping", "get_default_qat_qconfig_mapping", "get_default_qconfig_mapping"]

ObjectType = Callable[..., Any] | str


class QConfigMapping:
    """Assigns qconfigs to the modules of a model. Setters return the mapping, so calls chain.

    In rising order of precedence: :meth:`set_global`, :meth:`set_object_type`, :meth:`set_module_name_regex`,
    :meth:`set_module_name`, :meth:`set_module_name_object_type_order`. A qconfig of None means "leave it in float".

    Example:
        >>> import torch
        >>> from zeropoint.ao.quantization import QConfigMapping, default_per_channel_qconfig, default_qconfig
        >>> mapping = QConfigMapping().set_global(default_qconfig).set_module_name("head", None)
        >>> mapping.resolve("head", torch.nn.Linear) is None
        True
    """

    def __init__(self) -> None:
        self.global_qconfig: QConfigAny = None
        self.object_type_qconfigs: dict[ObjectType, QConfigAny] = {}
        self.module_name_regex_qconfigs: dict[str, QConfigAny] = {}
        self.module_name_qconfigs: dict[str, QConfigAny] = {}
        self.module_name_object_type_order_qconfigs: dict[tuple[str, ObjectType, int], QConfigAny] = {}

    # -- setting

    def set_global(self, global_qconfig: QConfigAny) -> QConfigMapping:
        """The qconfig of every module that nothing else speaks of."""
        self.global_qconfig = global_qconfig
        return self

    def set_object_type(self, object_type: ObjectType, qconfig: QConfigAny) -> QConfigMapping:
        """The qconfig of a module class and its subclasses, of a function, or of a method's name."""
        self.object_type_qconfigs[object_type] = qconfig
        return self

    def set_module_name_regex(self, module_name_regex: str, qconfig: QConfigAny) -> QConfigMapping:
        """The qconfig of every module whose name the pattern matches from its beginning; the first pattern wins.

        Raises:
            ValueError: not a regular expression.
        """
        try:
            re.compile(module_name_regex)
        except re.error as error:
            raise ValueError(f"{module_name_regex!r} is not a regular expression: {error}") from error
        self.module_name_regex_qconfigs[module_name_regex] = qconfig
        return self

    def set_module_name(self, module_name: str, qconfig: QConfigAny) -> QConfigMapping:
        """The qconfig of the module of that name, and of every module inside it that nothing nearer speaks of."""
        self.module_name_qconfigs[module_name] = qconfig
        return self

    def set_module_name_object_type_order(
        self, module_name: str, object_type: ObjectType, index: int, qconfig: QConfigAny
    ) -> QConfigMapping:
        """The qconfig of the ``index``-th module of that type directly inside the module of that name."""
        self.module_name_object_type_order_qconfigs[(module_name, object_type, index)] = qconfig
        return self

    # -- asking

    def resolve(self, module_name: str, module_type: ObjectType, order: int | None = None) -> QConfigAny:
        """The qconfig of one module.

        Args:
            module_name: its full name, ``"layer1.0.conv1"``; "" for the root.
            module_type: its class; the most specific class of its MRO that the mapping names decides.
            order: how many modules of the same type stand before it in its parent; None leaves that rule out.
        """
        parent = module_name.rpartition(".")[0]
        if order is not None and (parent, module_type, order) in self.module_name_object_type_order_qconfigs:
            return self.module_name_object_type_order_qconfigs[(parent, module_type, order)]
        name = module_name
        while name:
            if name in self.module_name_qconfigs:
                return self.module_name_qconfigs[name]
            name = name.rpartition(".")[0]
        for pattern, qconfig in self.module_name_regex_qconfigs.items():
            if re.match(pattern, module_name):
                return qconfig
        kinds = module_type.__mro__ if isinstance(module_type, type) else (module_type,)
        for kind in kinds:
            if kind in self.object_type_qconfigs:
                return self.object_type_qconfigs[kind]
        return self.global_qconfig

    # -- as plain data

    def to_dict(self) -> dict[str, Any]:
        """The mapping as a dictionary of lists of tuples, with the keys of torch.ao's qconfig dictionaries."""
        return {
            "": self.global_qconfig,
            "object_type": list(self.object_type_qconfigs.items()),
            "module_name_regex": list(self.module_name_regex_qconfigs.items()),
            "module_name": list(self.module_name_qconfigs.items()),
            "module_name_object_type_order": [
                (*key, qconfig) for key, qconfig in self.module_name_object_type_order_qconfigs.items()
            ],
        }

    @classmethod
    def from_dict(cls, qconfig_dict: dict[str, Any]) -> QConfigMapping:
        """The mapping that :meth:`to_dict` wrote. Every key may be missing; dictionaries stand for lists of pairs.

        Raises:
            ValueError: an unknown key.
        """
        mapping = cls()
        setters: dict[str, Callable[..., QConfigMapping]] = {
            "object_type": mapping.set_object_type,
            "module_name_regex": mapping.set_module_name_regex,
            "module_name": mapping.set_module_name,
            "module_name_object_type_order": mapping.set_module_name_object_type_order,
        }
        unknown = sorted(set(qconfig_dict) - {"", *setters})
        if unknown:
            raise ValueError(f"unknown keys {unknown} in a qconfig dictionary, known are '' and {sorted(setters)}")
        mapping.set_global(qconfig_dict.get(""))
        for key, setter in setters.items():
            entries = qconfig_dict.get(key, ())
            for entry in entries.items() if isinstance(entries, dict) else entries:
                setter(*entry)
        return mapping

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, QConfigMapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"global: {self.global_qconfig}"]
        for key, entries in self.to_dict().items():
            for *names, qconfig in entries if key else ():
                shown = ", ".join(name.__name__ if callable(name) else repr(name) for name in names)
                lines.append(f"{key} {shown}: {qconfig}")
        return "QConfigMapping(\n  " + "\n  ".join(lines) + "\n)"


_RANGE_0_TO_1: tuple[ObjectType, ...] = (
    nn.Hardsigmoid,
    nn.functional.hardsigmoid,
    "hardsigmoid",
    "hardsigmoid_",
    nn.Sigmoid,
    torch.sigmoid,
    "sigmoid",
    "sigmoid_",
    nn.Softmax,
)
_RANGE_NEG_1_TO_1: tuple[ObjectType, ...] = (nn.Tanh, torch.tanh, "tanh", "tanh_")


def _default_mapping(qconfig: QConfig, is_qat: bool) -> QConfigMapping:
    weight = default_per_channel_weight_fake_quant if is_qat else default_per_channel_weight_observer
    mapping = QConfigMapping().set_global(qconfig).set_object_type("reshape", default_reuse_input_qconfig)
    layer_norm = QConfig(qconfig.activation, default_placeholder_observer)  # its weight stays in float
    for norm in (nn.LayerNorm, nn.functional.layer_norm):
        mapping.set_object_type(norm, layer_norm)
    mapping.set_object_type(nn.PReLU, default_quint8_weight_qconfig)
    for kinds, observer in (
        (_RANGE_0_TO_1, default_fixed_qparams_range_0to1_observer),
        (_RANGE_NEG_1_TO_1, default_fixed_qparams_range_neg1to1_observer),
    ):
        activation = FixedQParamsFakeQuantize.with_args(observer=observer) if is_qat else observer
        for kind in kinds:
            mapping.set_object_type(kind, QConfig(activation, weight))
    return mapping


def get_default_qconfig_mapping(backend: str = "x86", version: int = 0) -> QConfigMapping:
    """:func:`get_default_qconfig` for all, and the fixed grids of sigmoid, softmax and tanh.

    Transposed convolutions get per-channel weights as well: the kernels take them.

    Args:
        backend, version: as for :func:`get_default_qconfig`.
    """
    return _default_mapping(get_default_qconfig(backend, version), is_qat=False)


def get_default_qat_qconfig_mapping(backend: str = "x86", version: int = 1) -> QConfigMapping:
    """:func:`get_default_qat_qconfig` for all, and the fixed grids of sigmoid, softmax and tanh.

    Args:
        backend, version: as for :func:`get_default_qat_qconfig`.
    """
    return _default_mapping(get_default_qat_qconfig(backend, version), is_qat=True)
