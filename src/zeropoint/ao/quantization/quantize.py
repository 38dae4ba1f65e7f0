"""The workflow: prepare, calibrate, convert; or quantize dynamically; or prepare for training.

May import: everything else in this package, and ``ao.nn``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import type_before_parametrizations

from zeropoint.ao.nn import _registry
from zeropoint.ao.nn._weight_norm import computes_weight
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.nn.quantized._base import QuantizedModule
from zeropoint.ao.nn.quantized._from_float import has_seen
from zeropoint.ao.nn.quantized.composed import ComposedModule
from zeropoint.ao.quantization._checks import check_names, refuse_codes_in_float, refuse_torch_ao
from zeropoint.ao.quantization.fake_quantize import FakeQuantizeBase
from zeropoint.ao.quantization.observer import ObservingModule
from zeropoint.ao.quantization.qconfig import QConfig, per_channel_dynamic_qconfig
from zeropoint.ao.quantization.qconfig_mapping import QConfigMapping
from zeropoint.ao.quantization.quantization_mappings import (
    KEEPS_GRID,
    Mapping,
    default_dynamic_kinds,
    fixed_observer_of,
    get_default_dynamic_quant_module_mappings,
    get_default_qat_module_mappings,
    get_default_static_quant_module_mappings,
    is_observed,
    no_observer_set,
    twin_of,
)
from zeropoint.ao.quantization.stubs import DeQuantStub, QuantWrapper
from zeropoint.ao.quantization.summary import QuantizationSummary
from zeropoint.ao.quantization.utils import (
    clone_model,
    computes_like,
    get_unique_devices_,
    is_internal_hook,
    makes_normal_tensors,
    move_hooks,
)

__all__ = [
    "add_quant_dequant",
    "convert",
    "prepare",
    "prepare_qat",
    "propagate_qconfig_",
    "quantize",
    "quantize_dynamic",
    "quantize_qat",
    "swap_module",
]

QConfigDict = dict[Any, Any]


# --- qconfigs -----------------------------------------------------------------------------------------------------


def propagate_qconfig_(
    module: nn.Module,
    qconfig_dict: QConfigDict | QConfigMapping | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
) -> None:
    """Gives every module inside ``module`` its qconfig, in place.

    A ``qconfig`` attribute that a module already has counts most, None included; then what ``qconfig_dict`` says of
    its name, then of its type, then the qconfig of the module around it.

    Args:
        module: the model.
        qconfig_dict: a :class:`QConfigMapping`, or a dict from module names and classes to qconfigs.
        prepare_custom_config_dict: ``{"non_traceable_module_name": [...], "non_traceable_module_class": [...]}``:
            modules to which nothing is handed down.

    Raises:
        TypeError: a qconfig that is none.
    """
    custom = prepare_custom_config_dict or {}
    opaque_names = set(custom.get("non_traceable_module_name", ()))
    opaque_classes = tuple(custom.get("non_traceable_module_class", ()))
    _propagate(module, "", None, _lookup(qconfig_dict), opaque_names, opaque_classes)


def _named_modules(spec: QConfigDict | QConfigMapping | None) -> list[str]:
    """The module paths that a spec names."""
    if isinstance(spec, dict) and set(spec) & _MAPPING_KEYS:
        spec = QConfigMapping.from_dict(spec)
    if isinstance(spec, QConfigMapping):
        return list(spec.module_name_qconfigs)
    return [key for key in spec or () if isinstance(key, str)]


_MAPPING_KEYS = {"", "object_type", "module_name", "module_name_regex"}
Lookup = Callable[[str, nn.Module, Any], Any]


def _lookup(spec: QConfigDict | QConfigMapping | None) -> Lookup:
    """A function that finds the qconfig of ``(name, module, qconfig of the parent)``."""
    if isinstance(spec, dict) and set(spec) & _MAPPING_KEYS:
        spec = QConfigMapping.from_dict(spec)
    if isinstance(spec, QConfigMapping):
        mapping = spec

        def resolve(name: str, module: nn.Module, parent: Any) -> Any:
            kind: type = type_before_parametrizations(module)
            if isinstance(module, FusedModule) and kind not in mapping.object_type_qconfigs:
                kind = type_before_parametrizations(module[0])
            return mapping.resolve(name, kind)

        return resolve
    table = spec or {}

    def find(name: str, module: nn.Module, parent: Any) -> Any:
        if name in table:
            return table[name]
        for kind in type(module).__mro__[:-1]:
            if kind in table:
                return table[kind]
        return parent

    return find


def _propagate(
    module: nn.Module, name: str, parent: Any, find: Lookup, opaque_names: set[str], opaque_classes: tuple[type, ...]
) -> None:
    qconfig = getattr(module, "qconfig", None) if hasattr(module, "qconfig") else find(name, module, parent)
    if qconfig is not None and not (hasattr(qconfig, "activation") and hasattr(qconfig, "weight")):
        raise TypeError(f"the qconfig of {name or 'the model'!r} must be a QConfig or None, got {qconfig!r}")
    module.qconfig = qconfig  # type: ignore[assignment]
    for child_name, child in module.named_children():
        if isinstance(child, ObservingModule) or child_name in opaque_names or type(child) in opaque_classes:
            continue
        _propagate(child, _join(name, child_name), qconfig, find, opaque_names, opaque_classes)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# --- prepare ------------------------------------------------------------------------------------------------------


@makes_normal_tensors
def prepare(
    model: nn.Module,
    inplace: bool = False,
    allow_list: Iterable[type[nn.Module]] | None = None,
    observer_non_leaf_module_list: Iterable[type[nn.Module]] | None = None,
    prepare_custom_config_dict: dict[str, Any] | None = None,
    *,
    qconfig_mapping: QConfigDict | QConfigMapping | None = None,
) -> nn.Module:
    """Attaches observers to the outputs of a float model's modules, for calibration.

    A module is observed if it has a qconfig, its own or from around it, and its quantized twin needs an output grid.
    Fused modules are observed as one. Modules that keep their input's grid (ReLU, pooling, dropout, reshapes) are not.
    In eval mode ``nn.LSTM`` and ``nn.MultiheadAttention`` are taken apart (``zeropoint.ao.nn.quantizable``), so that
    what they compute inside is observed; in training mode that is :func:`prepare_qat`'s.
    A module that is used twice has one observer, which sees both uses.

    Args:
        model: the float model; set ``model.qconfig`` (or that of its parts), or pass ``qconfig_mapping``.
        inplace: change the model itself instead of a copy.
        allow_list: the classes to observe, instead of those with a quantized twin.
        observer_non_leaf_module_list: further classes to observe as one, though they have parts.
        prepare_custom_config_dict: ``{"float_to_observed_custom_module_class": {Float: Observed}}``; the observed
            class has a ``from_float(module)``.
        qconfig_mapping: which module gets which qconfig, where it has none of its own.

    Returns:
        The prepared model: run calibration data through it, then call :func:`convert`.

    Raises:
        TypeError: a qconfig that is none, or a stub of ``torch.ao``. ValueError: a name that no module has.

    Example:
        >>> import torch
        >>> from zeropoint.ao.quantization import QuantStub, convert, default_qconfig, prepare
        >>> model = torch.nn.Sequential(QuantStub(), torch.nn.Linear(4, 2)).eval()
        >>> model.qconfig = default_qconfig
        >>> prepared = prepare(model)
        >>> _ = prepared(torch.ones(8, 4))
        >>> convert(prepared)(torch.ones(1, 4)).dtype
        zeropoint.quint8
    """
    refuse_torch_ao(model)
    check_names(model, _named_modules(qconfig_mapping), "qconfig_mapping")
    if not inplace:
        model = clone_model(model)
    custom = prepare_custom_config_dict or {}
    propagate_qconfig_(model, qconfig_mapping, custom)
    if not any(getattr(module, "qconfig", None) for module in model.modules()):
        warnings.warn(
            "no module has a qconfig, so nothing is observed: set model.qconfig or pass qconfig_mapping",
            UserWarning,
            stacklevel=3,
        )
    rules = _ObservationRules(
        None if allow_list is None else tuple(allow_list),
        tuple(observer_non_leaf_module_list or ()),
        {**_registry.OBSERVED, **custom.get("float_to_observed_custom_module_class", {})},
    )
    model = rules.apply(model, "", set())
    if any(isinstance(part, FloatFunctional) for part in model.modules()):
        model.register_forward_pre_hook(_begin_pass, prepend=True)
        model.register_forward_hook(_end_pass, prepend=True)
    return model


class _ObservationRules:
    """Which modules get an observer."""

    def __init__(
        self,
        allow_list: tuple[type[nn.Module], ...] | None,
        non_leaf: tuple[type[nn.Module], ...],
        custom: dict[type[nn.Module], Any],
    ) -> None:
        self.allow_list = allow_list
        self.non_leaf = non_leaf
        self.custom = custom
        self.mapping = get_default_static_quant_module_mappings()

    def apply(self, module: nn.Module, name: str, seen: set[int]) -> nn.Module:
        """Observes ``module`` and what is inside it; returns it, or the observed custom module in its place."""
        if id(module) in seen or isinstance(module, (ObservingModule, QuantizedModule)):
            return module
        seen.add(id(module))
        kind = type_before_parametrizations(module)
        wanted = getattr(module, "qconfig", None) is not None
        if wanted and kind in self.custom and not (kind in _registry.OBSERVED and module.training):
            observed: nn.Module = self.custom[kind].from_float(module)
            observed.qconfig = module.qconfig
            if not isinstance(observed, tuple(no_observer_set())):
                attach_observer(observed, name)
            return observed
        if isinstance(module, FloatFunctional):
            if wanted:
                module.activation_post_process = make_observer(module)
                module.module_path = name
            return module
        if self._is_unit(module, kind):
            if wanted and self._is_observed(module, kind):
                attach_observer(module, name)
            elif wanted and isinstance(module, DeQuantStub):
                module.register_forward_hook(_note_dtype, prepend=True)
            return module
        for child_name, child in list(module.named_children()):
            replacement = self.apply(child, _join(name, child_name), seen)
            if replacement is not child:
                setattr(module, child_name, replacement)
        return module

    def _is_unit(self, module: nn.Module, kind: type) -> bool:
        if isinstance(module, FusedModule) or hasattr(module, "weight_fake_quant") or kind in self.non_leaf:
            return True
        if self.allow_list is not None:
            return kind in self.allow_list
        if kind in no_observer_set():
            return False  # its parts are observed
        return twin_of(kind, self.mapping) is not None

    def _is_observed(self, module: nn.Module, kind: type) -> bool:
        if isinstance(module, DeQuantStub):
            return False
        if kind in self.non_leaf or self.allow_list is not None:
            return True
        found = twin_of(kind, self.mapping)
        return found is None or (is_observed(found[1]) and computes_like(module, found[0]))


def make_observer(module: nn.Module) -> nn.Module:
    """The activation observer of ``module.qconfig``, on the module's device; a known grid where the class has one."""
    qconfig = module.qconfig
    observer: nn.Module = qconfig.activation()  # type: ignore[operator, union-attr]
    fixed = fixed_observer_of(module, simulates=isinstance(observer, FakeQuantizeBase))
    if fixed is not None:
        observer = fixed()
    devices = get_unique_devices_(module)
    if len(devices) > 1:
        raise ValueError(f"{type(module).__name__} lies on several devices {sorted(map(str, devices))}")
    return observer.to(next(iter(devices))) if devices else observer


def attach_observer(module: nn.Module, name: str = "") -> None:
    """Makes an observer see the module's output, before any other hook; nothing happens if it has one."""
    if hasattr(module, "activation_post_process"):
        return
    observer = make_observer(module)
    module.add_module("activation_post_process", observer)
    module.module_path = name  # type: ignore[assignment]
    if getattr(observer, "is_dynamic", False):
        module.register_forward_pre_hook(_observe_input, prepend=True)
    else:
        module.register_forward_hook(_observe_output, prepend=True)


def _observe_output(module: nn.Module, args: Any, output: Any) -> Any:
    return module.activation_post_process(output)  # type: ignore[operator]


def _observe_input(module: nn.Module, args: Any) -> Any:
    return (module.activation_post_process(args[0]), *args[1:])  # type: ignore[operator]


def _note_dtype(module: nn.Module, args: Any, output: Any) -> None:
    """What leaves the quantized part is to have the dtype that it has in the float model. Autocast is a guest there."""
    if isinstance(output, Tensor) and output.is_floating_point() and not torch.is_autocast_enabled(output.device.type):
        module.dtype = output.dtype  # type: ignore[assignment]


def _begin_pass(module: nn.Module, args: Any) -> None:
    for part in module.modules():
        if isinstance(part, FloatFunctional):
            part.uses_in_pass = 0


def _end_pass(module: nn.Module, args: Any, output: Any) -> None:
    for part in module.modules():
        if isinstance(part, FloatFunctional):
            part.uses_in_pass = None


_HOOKS: tuple[Any, ...] = (_observe_output, _observe_input, _note_dtype, _begin_pass, _end_pass)
for _hook in _HOOKS:
    _hook._observes = True


def add_quant_dequant(module: nn.Module) -> nn.Module:
    """Wraps every module without parts that has a qconfig into a :class:`QuantWrapper`, in place.

    Returns:
        The module, or its wrapper.
    """
    if not list(module.children()) and getattr(module, "qconfig", None):
        return QuantWrapper(module)
    for name, child in list(module.named_children()):
        module._modules[name] = add_quant_dequant(child)
    return module


# --- convert ------------------------------------------------------------------------------------------------------


@makes_normal_tensors
def convert(
    module: nn.Module,
    mapping: Mapping | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    is_reference: bool = False,
    convert_custom_config_dict: dict[str, Any] | None = None,
    use_precomputed_fake_quant: bool = False,
    *,
    strict: bool = False,
) -> nn.Module:
    """Swaps the calibrated modules of a prepared model for their quantized twins, the root included.

    A module is swapped if it has a qconfig and the mapping names its class, or the most specific of its base classes;
    a subclass that computes something else than its base is left in float. Forward hooks and pre-hooks move along.
    What was done to each module is ``model.quantization_summary`` (print it).

    Args:
        module: the prepared, calibrated (or trained) model.
        mapping: float class → quantized class, instead of the default one; the quantized class has a ``from_float``.
        inplace: change the model itself instead of a copy. A swapped root is a new module either way.
        remove_qconfig: take qconfigs, observers and their hooks away afterwards.
        is_reference: must be False: this package has no reference modules.
        convert_custom_config_dict: ``{"observed_to_quantized_custom_module_class": {Observed: Quantized}}``; the
            quantized class has a ``from_observed(module)``.
        use_precomputed_fake_quant: keep the weight grids that fake quantizers trained, to the bit.
        strict: raise for modules that saw no data in calibration, instead of a warning.

    Returns:
        The quantized model.

    Raises:
        RuntimeError: a module was not prepared; with ``strict``, one saw no data. ValueError: ``is_reference``.
        TypeError: a stub of ``torch.ao`` is in the model.
    """
    if is_reference:
        raise ValueError("is_reference=True is not offered: quantized modules compute on integers here")
    mapping = get_default_static_quant_module_mappings() if mapping is None else mapping
    refuse_torch_ao(module)
    text = _uncalibrated(module)
    if text:
        if strict:
            raise RuntimeError(text)
        warnings.warn(text, UserWarning, stacklevel=3)
    if not inplace:
        module = clone_model(module)
    custom = (convert_custom_config_dict or {}).get("observed_to_quantized_custom_module_class", {})
    swap = _Swap(mapping, custom, use_precomputed_fake_quant, "quantized")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has seen no data", category=UserWarning)
        module = swap.apply(module, "")
    if remove_qconfig:
        _remove_traces(module)
    for name, part in module.named_modules():
        if isinstance(part, (nn.RNNBase, nn.RNNCellBase)) and not isinstance(part, QuantizedModule):
            part.module_path = name
            if refuse_codes_in_float not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(refuse_codes_in_float, with_kwargs=True)
    module.quantization_summary = swap.summary  # type: ignore[assignment]
    return module


def _uncalibrated(model: nn.Module) -> str:
    """Says which modules' observers are needed and saw nothing; empty if there is none."""
    blind, observed = [], 0
    for name, module in model.named_modules():
        observer = getattr(module, "activation_post_process", None)
        if observer is None or isinstance(module, ObservingModule) or getattr(module, "qconfig", None) is None:
            continue
        observed += 1
        if not has_seen(observer):
            blind.append(repr(name) if name else "the model itself")
    if not blind:
        return ""
    if len(blind) == observed:
        return (
            f"the model saw no data in calibration: its {observed} output grids are the default scale 1.0 and zero "
            "point 0. That is fine if load_state_dict() comes next; if not, run data through the prepared model first"
        )
    names = ", ".join(blind[:10]) + (f" and {len(blind) - 10} more" if len(blind) > 10 else "")
    return (
        f"these modules saw no data in calibration, so their output grid is the default scale 1.0 and zero point 0: "
        f"{names}. Run data that reaches them through the prepared model"
    )


class _Swap:
    """One conversion: walks the model, swaps what it can, and notes what it did."""

    def __init__(
        self,
        mapping: Mapping,
        custom: dict[type[nn.Module], Any],
        use_precomputed_fake_quant: bool,
        kind: str,
        explicit: frozenset[Any] = frozenset(),
    ) -> None:
        self.mapping = mapping
        self.custom = custom
        self.use_precomputed_fake_quant = use_precomputed_fake_quant
        self.kind = kind
        self.explicit = explicit  # classes and names that the caller named: swapped whatever their forward does
        self.summary = QuantizationSummary()
        self.done: dict[int, nn.Module] = {}

    def apply(self, module: nn.Module, name: str) -> nn.Module:
        """``module`` after conversion: a twin, or itself with converted insides."""
        if id(module) in self.done:
            return self.done[id(module)]
        if isinstance(module, ObservingModule):
            return module
        original = module
        self.done[id(module)] = module
        before = module._get_name()
        found = self._target(module, name)
        if isinstance(found, str):
            if not self._has_parts(module):
                self._note_skip(module, name, before, found)
            elif isinstance(module, FusedModule):
                self._note_skip(module, name, before, found)
                return module
        elif _is_composed(found):
            module.__class__ = found  # the same layer, whose parts are converted next
            self.summary.add(name, before, module._get_name())
        else:
            module = self._twin(module, name, found)
            self.done[id(original)] = module
            self.summary.add(name, before, module._get_name())
            return module
        for child_name, child in list(module._modules.items()):
            if child is not None:
                module._modules[child_name] = self.apply(child, _join(name, child_name))
        return module

    def _has_parts(self, module: nn.Module) -> bool:
        return any(not isinstance(child, ObservingModule) for child in module.children())

    def _note_skip(self, module: nn.Module, name: str, before: str, reason: str) -> None:
        if isinstance(module, (QuantizedModule, nn.Identity)):
            return
        if self.kind == "quantized" and isinstance(module, KEEPS_GRID):
            self.summary.add(name, before, before, "runs on codes, keeps the input's grid")
        elif self.kind == "quantized" or next(module.parameters(), None) is not None:  # else nothing to quantize
            self.summary.add(name, before, None, reason)

    def _target(self, module: nn.Module, name: str) -> Any:
        """What to put in the module's place, or in words why it stays."""
        if isinstance(module, QuantizedModule):
            return "is quantized"
        kind = type_before_parametrizations(module)
        if kind in self.custom:
            return self.custom[kind] if getattr(module, "qconfig", None) is not None else "no qconfig"
        if kind is NonDynamicallyQuantizableLinear and kind not in self.mapping:
            return "the module around it reads its weight"
        found = twin_of(kind, self.mapping)
        if found is None:
            if self.kind == "quantized" and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
                return "no quantized twin: keep it between DeQuantStub and QuantStub, or use quantize_dynamic"
            return f"no {self.kind} twin"
        qconfig = getattr(module, "qconfig", None)
        if qconfig is None:
            return "no qconfig"
        if any(parameter.numel() == 0 for parameter in module.parameters()):
            return "has an empty weight"
        base, twin = found
        named = kind in self.explicit or name in self.explicit
        if not named and kind is not base and not computes_like(module, base):
            return f"computes something else than {base.__name__}: name its class to swap it anyway"
        if self.kind == "quantized" and is_observed(twin) and _leaves_float(module):
            return "its qconfig leaves activations in float"
        return twin

    def _twin(self, module: nn.Module, name: str, target: Any) -> nn.Module:
        twin = _make_twin(module, target, self.use_precomputed_fake_quant)
        if isinstance(twin, QuantizedModule):
            twin.module_path = name
        return twin


def _is_composed(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, ComposedModule)


def _leaves_float(module: nn.Module) -> bool:
    dtype = getattr(getattr(module, "activation_post_process", None), "dtype", None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _make_twin(module: nn.Module, target: Any, use_precomputed_fake_quant: bool) -> nn.Module:
    """The quantized module, with the float module's mode, device and hooks."""
    build = target.from_observed if hasattr(target, "from_observed") else target.from_float
    options: dict[str, Any] = {}
    if "use_precomputed_fake_quant" in inspect.signature(build).parameters:
        options["use_precomputed_fake_quant"] = use_precomputed_fake_quant
    devices = get_unique_devices_(module)
    if len(devices) > 1:
        raise ValueError(f"{type(module).__name__} lies on several devices {sorted(map(str, devices))}")
    twin: nn.Module = build(module, **options)
    twin.train(module.training)
    move_hooks([module], twin)
    for device in devices:
        if device.type != "cpu":
            twin.to(device)
    return twin


def swap_module(
    mod: nn.Module,
    mapping: Mapping,
    custom_module_class_mapping: dict[type[nn.Module], Any] | None = None,
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """What the mapping puts in place of ``mod``, with its hooks; ``mod`` itself if it has no qconfig or no twin.

    Args:
        mod: a module with a qconfig.
        mapping: float class → quantized class.
        custom_module_class_mapping: observed class → quantized class, made with ``from_observed``.
        use_precomputed_fake_quant: keep the weight grid that a fake quantizer trained.
    """
    swap = _Swap(mapping, custom_module_class_mapping or {}, use_precomputed_fake_quant, "quantized")
    found = swap._target(mod, "")
    return mod if isinstance(found, str) else swap._twin(mod, "", found)


def _remove_traces(model: nn.Module) -> None:
    """Takes away what prepare() left: qconfigs, observers, and their hooks."""
    for module in list(model.modules()):
        vars(module).pop("qconfig", None)
        if not isinstance(module, QuantizedModule):
            vars(module).pop("module_path", None)
        if isinstance(module._modules.get("activation_post_process"), ObservingModule) and not isinstance(
            module, ObservingModule
        ):
            if isinstance(module, FloatFunctional):
                module.activation_post_process = nn.Identity()
            else:
                del module._modules["activation_post_process"]
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(table.items()):
                if is_internal_hook(hook) and not computes_weight(hook):
                    del table[key]


# --- all in one ---------------------------------------------------------------------------------------------------


def quantize(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: Iterable[Any],
    mapping: Mapping | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Prepares the model, calibrates it with ``run_fn(model, *run_args)``, and converts it.

    Args:
        model: float model with qconfigs and stubs; put into eval mode.
        run_fn: runs calibration data through the prepared model.
        run_args: further arguments of ``run_fn``.
        mapping, inplace: as for :func:`convert`.
    """
    mapping = get_default_static_quant_module_mappings() if mapping is None else mapping
    if not inplace:
        model = clone_model(model)
    model.eval()
    model = prepare(model, inplace=True)
    run_fn(model, *run_args)
    return convert(model, mapping, inplace=True)


@makes_normal_tensors
def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Any = None,
    dtype: Any = torch.int8,
    mapping: Mapping | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Swaps modules for twins with int8 weights that quantize their input on every call. Needs no calibration.

    Weights get one symmetric grid an output channel, which keeps clearly more accuracy than one grid a weight; a
    qconfig passed explicitly, such as ``default_dynamic_qconfig`` with its one grid a weight, is obeyed.

    Args:
        model: the float model.
        qconfig_spec: what to swap: None for every class in the mapping, convolutions excepted, which lose more
            accuracy than they gain in most models; a set of classes and module names; a dict from
            them to qconfigs (None: leave in float); or a :class:`QConfigMapping`. Classes count for their subclasses.
        dtype: of the weights, qint8.
        mapping: float class → quantized class, instead of the default one.
        inplace: change the model itself instead of a copy. A swapped root is a new module either way.

    Returns:
        The quantized model; its ``quantization_summary`` tells what was swapped, what was not, and why.

    Raises:
        ValueError: another dtype, or a name that no module has. TypeError: a spec of another kind.
    """
    if qconfig_spec is None and mapping is None:
        qconfig_spec = default_dynamic_kinds()
    mapping = get_default_dynamic_quant_module_mappings() if mapping is None else mapping
    default = _dynamic_qconfig(dtype)
    if qconfig_spec is None:
        qconfig_spec = dict.fromkeys(mapping, default)
    elif isinstance(qconfig_spec, (set, frozenset, list, tuple)):
        qconfig_spec = dict.fromkeys(qconfig_spec, default)
    elif not isinstance(qconfig_spec, (dict, QConfigMapping)):
        raise TypeError(f"qconfig_spec must be a set, a dict or a QConfigMapping, got {type(qconfig_spec).__name__}")
    check_names(model, _named_modules(qconfig_spec), "qconfig_spec")
    if not inplace:
        model = clone_model(model)
    model.eval()
    propagate_qconfig_(model, qconfig_spec)
    named = frozenset(qconfig_spec) if isinstance(qconfig_spec, dict) else frozenset()
    swap = _Swap(mapping, {}, False, "dynamic", named)
    model = swap.apply(model, "")
    _remove_traces(model)
    model.quantization_summary = swap.summary  # type: ignore[assignment]
    return model


def _dynamic_qconfig(dtype: Any) -> QConfig:
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if name in ("qint8", "int8"):
        return per_channel_dynamic_qconfig
    raise ValueError(f"quantize_dynamic takes dtype=qint8, got {dtype}")


@makes_normal_tensors
def prepare_qat(model: nn.Module, mapping: Mapping | None = None, inplace: bool = False) -> nn.Module:
    """Swaps modules for twins that simulate quantized weights, and attaches fake quantizers to activations.

    ``nn.LSTM`` and ``nn.MultiheadAttention`` are taken apart, so that their parts train like other layers. Other
    recurrent layers stay in float.

    Args:
        model: in training mode, with qconfigs; fuse it with ``fuse_modules_qat`` before.
        mapping: float class → QAT class, instead of the default one.
        inplace: change the model itself instead of a copy.

    Returns:
        The model to train: make the optimizer from *its* parameters. Then call :func:`convert` on it in eval mode.

    Raises:
        ValueError: a model in eval mode. TypeError: a stub of ``torch.ao`` is in the model.
    """
    if not model.training:
        raise ValueError("prepare_qat takes a model in training mode: call model.train()")
    refuse_torch_ao(model)
    default = mapping is None
    mapping = get_default_qat_module_mappings() if mapping is None else mapping
    if not inplace:
        model = clone_model(model)
    propagate_qconfig_(model)
    if default:
        model = _in_parts(model, {})
        propagate_qconfig_(model)
    model = _Swap(mapping, {}, False, "training").apply(model, "")
    return prepare(model, inplace=True)


def _in_parts(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    """``module`` with the quantizable layer in the place of every layer that has one, and a qconfig."""
    if id(module) in done:
        return done[id(module)]
    done[id(module)] = module
    layer: Any = _registry.OBSERVED.get(type_before_parametrizations(module))
    if layer is None or getattr(module, "qconfig", None) is None:
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = _in_parts(child, done)
        return module
    qconfig = vars(module).pop("qconfig")  # without it, the parts are not observed yet
    try:
        twin: nn.Module = layer.from_float(module)
    finally:
        module.qconfig = qconfig
    twin.qconfig = qconfig
    move_hooks([module], twin)
    done[id(module)] = twin
    return twin


def quantize_qat(
    model: nn.Module, run_fn: Callable[..., Any], run_args: Iterable[Any], inplace: bool = False
) -> nn.Module:
    """Prepares the model for training, trains it with ``run_fn(model, *run_args)``, and converts it.

    Args:
        model: float model with qconfigs and stubs; put into training mode.
        run_fn: trains the prepared model; it makes the optimizer from that model's parameters.
        run_args: further arguments of ``run_fn``.
        inplace: change the model itself instead of a copy.
    """
    if not inplace:
        model = clone_model(model)
    model.train()
    model = prepare_qat(model, inplace=True)
    run_fn(model, *run_args)
    return convert(model, inplace=True)
