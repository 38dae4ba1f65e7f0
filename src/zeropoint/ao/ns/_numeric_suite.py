"""The numeric suite: a float model and a quantized one side by side, weights, layers and activations.

Three questions, three functions:

* :func:`compare_weights`: what became of each weight?
* :func:`compare_model_stub`: what does each layer add by itself, given the very input that the quantized one had?
* :func:`compare_model_outputs`: how far apart are the activations, with all that came before?

Modules are matched by their path, so both models must have one structure: fuse the float model as the quantized one
was fused. Loggers keep whole tensors, one entry a call, cloned, so that a later in-place operation does not reach them.

May import: floor 4, ``ao.nn`` and ``ao.quantization``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.quantized.conv_transpose import exchange_channels
from zeropoint.ao.quantization import DeQuantStub
from zeropoint.ao.quantization.observers.base import ObservingModule
from zeropoint.ao.quantization.quantization_mappings import get_default_compare_output_module_list
from zeropoint.dtypes import QDtype, quint8
from zeropoint.tensor import QTensor

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

Pairs = dict[str, dict[str, Any]]

_LOGGER = "output_logger"
"""The child of a module that keeps its outputs."""


# --- weights ------------------------------------------------------------------------------------------------------


def compare_weights(float_dict: Mapping[str, Any], quantized_dict: Mapping[str, Any]) -> Pairs:
    """The weights of two models side by side.

    Every weight of the quantized model is matched with the float weight of the same module path: exactly, so "ab.c" is
    not "a.bc". A layer at ``path`` also finds the first part of a float fused module, ``path.0.weight``. Weights of
    ``torch.ao``'s layout (``_packed_params``) are matched as well.

    Args:
        float_dict: the ``state_dict()`` of the float model.
        quantized_dict: the ``state_dict()`` of the quantized model, or of one prepared for training.

    Returns:
        ``{key in quantized_dict: {"float": tensor, "quantized": tensor}}``. Where the quantized model keeps codes and
        a grid, "quantized" is a quantized tensor of them: call ``dequantize()`` to compare. The weight of a transposed
        convolution with groups is given, on both sides, as (out_channels, in_channels / groups, kernel): in that layout
        a dimension holds its grids.

    Example:
        >>> import torch
        >>> from zeropoint.ao.ns import compare_weights
        >>> from zeropoint.ao.quantization import quantize_dynamic
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> pairs = compare_weights(model.state_dict(), quantize_dynamic(model).state_dict())
        >>> list(pairs), pairs["0.weight"]["quantized"].dtype
        (['0.weight'], zeropoint.qint8)
    """
    pairs: Pairs = {}
    for key, stored in quantized_dict.items():
        match = _float_key(key, float_dict)
        if match is None:
            continue
        floating, weight = _matched(key, stored, quantized_dict, float_dict[match])
        if weight is not None:
            pairs[key] = {"float": floating, "quantized": weight}
    return pairs


def _matched(key: str, stored: Any, state: Mapping[str, Any], floating: Any) -> tuple[Any, Tensor | None]:
    """The float weight and the one that ``key`` stands for, in one layout; None if it stands for something else.

    Which dimension the grids belong to is not written in a state dict. Where several have the right size, as in a
    square transposed convolution, it is the one that comes closest to the float weight.
    """
    scale, zero_point = state.get(f"{key}_scale"), state.get(f"{key}_zero_point")
    tensors = all(isinstance(part, Tensor) for part in (stored, floating, scale, zero_point))
    if not tensors or not cast(Tensor, scale).dim():
        return floating, weight_of(key, stored, state)
    readings = []
    for groups, axis in _layouts(stored, cast(Tensor, scale).numel()):
        if groups > 1 and floating.shape != stored.shape:
            continue
        wanted, codes = (exchange_channels(x, groups) if groups > 1 else x for x in (floating, stored))
        weight = QTensor.from_codes(codes, cast(Tensor, scale), cast(Tensor, zero_point), axis=axis)
        same = wanted.shape == weight.shape
        distance = float((weight.dequantize() - wanted).abs().sum()) if same else 0.0
        readings.append((distance, wanted, weight))
    best = min(readings, key=lambda reading: reading[0], default=(0.0, floating, None))
    return best[1:]


def _layouts(codes: Tensor, channels: int) -> list[tuple[int, int]]:
    """Groups whose channels are to be exchanged (1: as it is), and the dimension that then has a grid an entry.

    Of a transposed convolution it is the second one, and with groups the first one of the weight with its channels
    exchanged.
    """
    found = [(1, axis) for axis in (0, 1) if axis < codes.dim() and codes.shape[axis] == channels]
    groups = channels // codes.shape[1] if codes.dim() > 2 else 1
    if groups > 1 and groups * codes.shape[1] == channels and codes.shape[0] % groups == 0:
        found.append((groups, 0))
    return found


def weight_of(key: str, stored: Any, state: Mapping[str, Any]) -> Tensor | None:
    """The weight that ``key`` stands for, its grids along the first dimension that they fit; None if it is none."""
    leaf = key.rpartition(".")[2]
    scale, zero_point = state.get(f"{key}_scale"), state.get(f"{key}_zero_point")
    if isinstance(stored, Tensor) and isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
        if scale.dim() == 0:
            return QTensor.from_codes(stored, float(scale), int(zero_point))
        axis = 0 if stored.shape[0] == scale.numel() else 1
        return QTensor.from_codes(stored, scale, zero_point, axis=axis)
    if leaf == "_packed_params":
        entry = stored[0] if isinstance(stored, (tuple, list)) and stored else stored
        return entry if isinstance(entry, Tensor) else None
    return stored if leaf == "weight" and isinstance(stored, Tensor) else None


def _float_key(key: str, float_dict: Mapping[str, Any]) -> str | None:
    """The key of the float weight that belongs to a quantized one, or None."""
    path, _, leaf = key.rpartition(".")
    if leaf == "_packed_params":  # of the module itself, or of a module of that name inside it
        path, leaf = path.removesuffix("_packed_params").removesuffix("."), "weight"
    candidates = (_join(path, leaf), _join(_join(path, "0"), leaf))
    return next((candidate for candidate in candidates if candidate in float_dict), None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# --- loggers ------------------------------------------------------------------------------------------------------


class Logger(ObservingModule):
    """Base of the loggers: keeps what passes through it in ``stats``.

    Attributes:
        stats: what was recorded; its keys are the subclass's.
        dtype: quint8, since torch.ao's tools ask every observer for one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, Any] = {}
        self.dtype: QDtype = quint8

    def forward(self, x: Any) -> Any:
        """Records ``x``; a subclass says how."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it records: define forward")


class ShadowLogger(Logger):
    """Keeps the outputs of a quantized module and of its float twin.

    ``stats`` is ``{"float": [tensor, …], "quantized": [tensor, …]}``, whole tensors, one entry a call. Of a module
    that returns a tuple, such as an LSTM, the first element is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stats["float"] = []
        self.stats["quantized"] = []

    def forward(self, x: Any, y: Any) -> None:  # type: ignore[override]
        """Records ``x``, what the quantized module returned, and ``y``, what the float one did."""
        self.stats["quantized"].append(_keep(_first(x)))
        self.stats["float"].append(_keep(_first(y)))


class OutputLogger(Logger):
    """Keeps the outputs of a module: ``stats`` is ``{"tensor_val": [output, …]}``, one entry a call.

    Outputs are kept as they are, tuples included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stats["tensor_val"] = []

    def forward(self, x: Any) -> Any:
        """Records ``x`` and returns it."""
        self.stats["tensor_val"].append(_keep(x))
        return x


def _first(x: Any) -> Any:
    return x[0] if isinstance(x, (tuple, list)) else x


def _map(function: Callable[[Tensor], Any], x: Any) -> Any:
    """``x`` with the function applied to every tensor in it, through tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_map(function, part) for part in x))
    if isinstance(x, (tuple, list)):
        return type(x)(_map(function, part) for part in x)
    return {key: _map(function, part) for key, part in x.items()} if isinstance(x, dict) else x


def _keep(x: Any) -> Any:
    return _map(lambda tensor: tensor.detach().clone(), x)


def _dequantized(x: Any) -> Any:
    return _map(lambda tensor: tensor.dequantize() if tensor.is_quantized else tensor, x)


def get_logger_dict(mod: nn.Module, prefix: str = "") -> Pairs:
    """What the loggers inside a model recorded.

    Args:
        mod: a model with loggers.
        prefix: the path that ``mod`` itself is to have in the keys.

    Returns:
        ``{"<path of the module that holds the logger>.stats": stats}``; a logger of ``mod`` itself is "stats".
    """
    return {
        _join(_join(prefix, name) if name else prefix, "stats"): child.stats
        for name, module in mod.named_modules()
        for child in module.children()
        if isinstance(child, Logger)
    }


# --- layers: a float shadow next to each quantized module -----------------------------------------------------------


class Shadow(nn.Module):
    """Runs a quantized module, and its float twin on the same input; gives the outputs of both to a logger.

    It stands in the quantized module's place: it returns what that returns, offers the operations of a
    ``QFunctional``, and reads attributes that it lacks, such as ``weight``, from the quantized module.

    Args:
        q_module: the quantized module.
        float_module: its float twin.
        logger_cls: makes the logger, which is called with the quantized output and the float one.

    Attributes:
        orig_module: the quantized module.
        shadow_module: the float module.
        logger: the logger.
    """

    def __init__(self, q_module: nn.Module, float_module: nn.Module, logger_cls: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.orig_module = q_module
        self.shadow_module = float_module
        self.logger = logger_cls()
        self.training = q_module.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_modules", {}).get("orig_module")
            if original is None:  # while it is being copied or unpickled
                raise
            return getattr(original, name)

    def _run(self, quantized: Callable[..., Any], floating: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        output = quantized(*args, **kwargs)
        with torch.no_grad():
            shadow = floating(*_dequantized(args), **_dequantized(kwargs))
        self.logger(output, shadow)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the quantized module returns."""
        return self._run(self.orig_module, self.shadow_module, args, kwargs)

    def _operation(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._run(getattr(self.orig_module, name), getattr(self.shadow_module, name), args, kwargs)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y`` by the quantized module."""
        return cast(Tensor, self._operation("add", x, y))

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """``x + y`` with a number, by the quantized module."""
        return cast(Tensor, self._operation("add_scalar", x, y))

    def sub(self, x: Tensor, y: Tensor) -> Tensor:
        """``x - y`` by the quantized module."""
        return cast(Tensor, self._operation("sub", x, y))

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """``x * y`` by the quantized module."""
        return cast(Tensor, self._operation("mul", x, y))

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """``x * y`` with a number, by the quantized module."""
        return cast(Tensor, self._operation("mul_scalar", x, y))

    def div(self, x: Tensor, y: Tensor) -> Tensor:
        """``x / y`` by the quantized module."""
        return cast(Tensor, self._operation("div", x, y))

    def cat(self, x: Any, dim: int = 0) -> Tensor:
        """The tensors joined along ``dim`` by the quantized module."""
        return cast(Tensor, self._operation("cat", x, dim))

    def add_relu(self, x: Tensor, y: Tensor) -> Tensor:
        """``max(x + y, 0)`` by the quantized module."""
        return cast(Tensor, self._operation("add_relu", x, y))

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """The matrix product by the quantized module."""
        return cast(Tensor, self._operation("matmul", x, y))


def prepare_model_with_stubs(
    float_module: nn.Module,
    q_module: nn.Module,
    module_swap_list: Collection[type[nn.Module]],
    logger_cls: Callable[[], nn.Module] = ShadowLogger,
) -> None:
    """Puts a :class:`Shadow` in place of each quantized module whose float twin is of a listed class, in place.

    Both models are walked in step, by the names of their children. Where both hold modules of the same classes, there
    is nothing to compare, and nothing is wrapped. The root itself has no place where a shadow could stand.

    Args:
        float_module: the float model.
        q_module: the quantized model, which is changed.
        module_swap_list: float classes; their subclasses count.
        logger_cls: makes each shadow's logger.

    Raises:
        TypeError: the list holds something that is not a class.
    """
    for _ in _place_shadows(float_module, q_module, _classes(module_swap_list, "module_swap_list"), logger_cls):
        pass


def _classes(classes: Collection[type[nn.Module]], name: str) -> tuple[type[nn.Module], ...]:
    found = tuple(classes)
    for kind in found:
        if not isinstance(kind, type):
            raise TypeError(f"{name} must hold module classes, got {kind!r}")
    return found


def _place_shadows(
    float_module: nn.Module,
    q_module: nn.Module,
    classes: tuple[type[nn.Module], ...],
    logger_cls: Callable[[], nn.Module],
) -> Iterator[tuple[nn.Module, str, Shadow]]:
    """Yields each shadow with its parent and its name there, once it has been placed."""
    twins = float_module._modules
    for name, child in list(q_module._modules.items()):
        twin = twins.get(name)
        if twin is None or child is None:
            continue
        if not isinstance(twin, classes):
            yield from _place_shadows(twin, child, classes, logger_cls)
        elif not _same_classes(twin, child):
            shadow = Shadow(child, twin, logger_cls)
            q_module._modules[name] = shadow
            yield q_module, name, shadow


def _same_classes(a: nn.Module, b: nn.Module) -> bool:
    return [type(module) for module in a.modules()] == [type(module) for module in b.modules()]


def compare_model_stub(
    float_model: nn.Module,
    q_model: nn.Module,
    module_swap_list: Collection[type[nn.Module]],
    *data: Any,
    logger_cls: Callable[[], nn.Module] = ShadowLogger,
) -> Pairs:
    """What each layer adds by itself: each runs in float too, on the input that the quantized one has.

    Args:
        float_model: the float model, fused as the quantized one was.
        q_model: the quantized model; afterwards it is as it was.
        module_swap_list: the float classes to compare; their subclasses count.
        data: the inputs of one call of the model.
        logger_cls: makes each shadow's logger.

    Returns:
        ``{"<path>.stats": {"float": [tensor, …], "quantized": [tensor, …]}}``, one entry a call of the module.

    Raises:
        TypeError: the list holds something that is not a class.

    Example:
        >>> import torch
        >>> from zeropoint.ao.ns import compare_model_stub
        >>> from zeropoint.ao.quantization import quantize_dynamic
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()
        >>> stats = compare_model_stub(model, quantize_dynamic(model), [torch.nn.Linear], torch.ones(3, 4))
        >>> list(stats), stats["0.stats"]["float"][0].shape
        (['0.stats'], torch.Size([3, 2]))
    """
    classes = _classes(module_swap_list, "module_swap_list")
    holder, float_holder = nn.Module(), nn.Module()  # so that a root of a listed class has a place too
    holder.model, float_holder.model = q_model, float_model
    placed = list(_place_shadows(float_holder, holder, classes, logger_cls))
    try:
        with torch.no_grad():
            holder.model(*data)
        return get_logger_dict(holder.model)
    finally:
        for parent, name, shadow in placed:
            parent._modules[name] = shadow.orig_module


# --- activations ----------------------------------------------------------------------------------------------------


def prepare_model_outputs(
    float_module: nn.Module,
    q_module: nn.Module,
    logger_cls: Callable[[], nn.Module] = OutputLogger,
    allow_list: Collection[type[nn.Module]] | None = None,
) -> None:
    """Gives the modules of both models loggers of their outputs, in place.

    A fused module is logged as one. Of a ``FloatFunctional`` or ``QFunctional``, the operations that have a grid of
    their own are logged: all but those with a number. A logger that a module has already is replaced by an empty one.

    Args:
        float_module, q_module: the models.
        logger_cls: makes each logger.
        allow_list: classes to log; their subclasses count. None: every class that the default mappings name, but the
            stubs at the end of a quantized part.

    Raises:
        TypeError: the list holds something that is not a class.
    """
    for model in (float_module, q_module):
        _attach_loggers(model, logger_cls, allow_list)


def _attach_loggers(
    model: nn.Module, logger_cls: Callable[[], nn.Module], allow_list: Collection[type[nn.Module]] | None
) -> list[Callable[[], None]]:
    """Attaches loggers; returns what takes them away again."""
    classes = _classes(get_default_compare_output_module_list() if allow_list is None else allow_list, "allow_list")
    undo: list[Callable[[], None]] = []
    for module in list(_logged_modules(model, classes)):
        _detach_logger(module)
        module.add_module(_LOGGER, logger_cls())
        _source(module).register_forward_hook(_LogOutput(module))
        undo.append(lambda module=module: _detach_logger(module))  # type: ignore[misc]
    return undo


_FUNCTIONAL = (nnq.FloatFunctional, nnq.QFunctional)
_UNLOGGED = (DeQuantStub, nnq.DeQuantize, ObservingModule)


def _logged_modules(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    """The modules to log, each once; what is logged as one is not entered."""
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen or isinstance(module, _UNLOGGED):
            return
        seen.add(id(module))
        kind = type_before_parametrizations(module)
        container = isinstance(module, nn.Sequential) and not isinstance(module, FusedModule)
        if issubclass(kind, classes) and not container:
            yield module
            return
        if not isinstance(module, FusedModule):
            for child in module.children():
                yield from walk(child)

    return walk(model)


class _LogOutput:
    """A forward hook that shows the output to the logger of a module."""

    _observes = True  # so conversion and fusion drop it, as they drop observers' hooks

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        logger = self.owner._modules.get(_LOGGER)
        if logger is not None:
            logger(output)


def _source(module: nn.Module) -> nn.Module:
    """The module whose output is logged: a functional one is never called itself, its results pass through a child."""
    return module.activation_post_process if isinstance(module, _FUNCTIONAL) else module


def _detach_logger(module: nn.Module) -> None:
    hooks = _source(module)._forward_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _LogOutput)]:
        del hooks[key]
    module._modules.pop(_LOGGER, None)


def get_matching_activations(float_module: nn.Module, q_module: nn.Module) -> Pairs:
    """What the loggers of two models recorded, matched by path.

    Args:
        float_module, q_module: models that :func:`prepare_model_outputs` prepared, and that were run.

    Returns:
        ``{"<path>.stats": {"float": [output, …], "quantized": [output, …]}}``; a module that recorded nothing in one
        of the models is left out.
    """
    floating, quantized = get_logger_dict(float_module), get_logger_dict(q_module)
    return {
        key: {"float": floating[key]["tensor_val"], "quantized": stats["tensor_val"]}
        for key, stats in quantized.items()
        if stats.get("tensor_val") and floating.get(key, {}).get("tensor_val")
    }


def compare_model_outputs(
    float_model: nn.Module,
    q_model: nn.Module,
    *data: Any,
    logger_cls: Callable[[], nn.Module] = OutputLogger,
    allow_list: Collection[type[nn.Module]] | None = None,
) -> Pairs:
    """The outputs of the modules of two models on the same input, side by side.

    Args:
        float_model: the float model, fused as the quantized one was.
        q_model: the quantized model, or one prepared for training.
        data: the inputs of one call of the models.
        logger_cls: makes each logger.
        allow_list: as for :func:`prepare_model_outputs`.

    Returns:
        ``{"<path>.stats": {"float": [output, …], "quantized": [output, …]}}``, whole tensors, one entry a call of the
        module. Both models are afterwards as they were.

    Raises:
        TypeError: the list holds something that is not a class.

    Example:
        >>> import torch
        >>> from zeropoint.ao.ns import compare_model_outputs
        >>> from zeropoint.ao.quantization import quantize_dynamic
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2)).eval()
        >>> stats = compare_model_outputs(model, quantize_dynamic(model), torch.ones(3, 4))
        >>> list(stats), stats["0.stats"]["quantized"][0].shape
        (['0.stats'], torch.Size([3, 2]))
    """
    undo: list[Callable[[], None]] = []
    try:
        for model in (float_model, q_model):
            undo += _attach_loggers(model, logger_cls, allow_list)
        with torch.no_grad():
            float_model(*data)
            q_model(*data)
        return get_matching_activations(float_model, q_model)
    finally:
        for detach in undo:
            detach()
