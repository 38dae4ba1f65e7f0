"""What users name on the command line: a model, calibration data, an accuracy, a qconfig.

``module:name`` names Python of the user's own, which is imported and called; ``folder/file.py:name`` as well. Files are
never executed: no pickle is run.

May import: everything but commands.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import itertools
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeropoint import checkpoint
from zeropoint.ao import quantization
from zeropoint.cli._console import without_python

__all__ = ["FORMS", "load_data", "load_function", "load_model", "make_qconfig"]

FORMS = """\b
PROGRAM is module:factory or folder/file.py:factory: a function or class that makes the float model, trained weights
included, when called without arguments; or the model itself. The current folder is searched first.

\b
DATA is one of
  FILE.npz, .npy       arrays of samples along dimension 0. Several arrays are the model's arguments: by name, or in
                       order where they are called arr_0, arr_1 … float64 is taken as float32
  FILE.pt, .pth        a tensor of samples, a dict of them by argument name, or a list of batches
  FILE.safetensors     tensors of samples by argument name
  module:function      returns any of these, or gives batches one by one, as a DataLoader does
A batch is a tensor, a tuple of arguments, or a dict of named ones."""
"""What PROGRAM and DATA may be, for help texts."""

OBSERVERS = {
    "histogram": quantization.HistogramObserver,
    "minmax": quantization.MinMaxObserver,
    "moving-average": quantization.MovingAverageMinMaxObserver,
    "mse": quantization.MSEObserver,
    "percentile": quantization.PercentileObserver,
    "entropy": quantization.EntropyObserver,
}
"""Names of activation observers on the command line."""


# --- names in modules ---------------------------------------------------------------------------------------------


def _find(spec: str, what: str) -> Any:
    """The object that ``module:name`` names. Raises ValueError in words for the user of the command line."""
    module_name, separator, name = spec.rpartition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"{what} {spec!r}: write module:name, such as mypackage.nets:make_net, or file.py:make_net")
    found: Any = _import(module_name, spec, what)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_")]
            near = difflib.get_close_matches(part, names, 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{what} {spec!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _import(name: str, spec: str, what: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"{what} {spec!r}: there is no module {error.name!r} here or in {sys.prefix}") from error
        raise _broken(what, spec, f"importing {name}", error) from error
    except FileNotFoundError as error:
        if error.filename == name:
            raise ValueError(f"{what} {spec!r}: there is no file {name}") from error
        raise _broken(what, spec, f"importing {name}", error) from error
    except (Exception, SystemExit) as error:
        raise _broken(what, spec, f"importing {name}", error) from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where the file's own imports are
    location = importlib.util.spec_from_file_location(path.stem, path)
    assert location is not None
    assert location.loader is not None
    module = importlib.util.module_from_spec(location)
    sys.modules[path.stem] = module  # pickle and dataclasses look there
    location.loader.exec_module(module)
    return module


def _broken(what: str, spec: str, doing: str, error: BaseException) -> ValueError:
    """What the user's own code raised, and where."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith("<") and file != __file__:
            place = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = (str(error).strip().splitlines() or [""])[0]
    return ValueError(f"{what} {spec!r}: {doing} raised {type(error).__name__}: {text}{place}")


def _check_no_arguments(function: Callable[..., Any], what: str, spec: str) -> None:
    """Raises ValueError where a function cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C: the call tells
        return
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(
            f"{what} {spec!r}: it is called without arguments, but needs {', '.join(needed)}: write a function "
            f"without arguments that calls it"
        )


def load_model(spec: str) -> nn.Module:
    """The model that PROGRAM names, in evaluation mode.

    Raises:
        ValueError: what is wrong with it, in words for the user.
    """
    found = _find(spec, "PROGRAM")
    if isinstance(found, nn.Module):
        return found.eval()
    if not callable(found):
        raise ValueError(f"PROGRAM {spec!r}: a {type(found).__name__} makes no model: name a function or a class")
    _check_no_arguments(found, "PROGRAM", spec)
    try:
        model = found()
    except (Exception, SystemExit) as error:
        raise _broken("PROGRAM", spec, "calling it", error) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"PROGRAM {spec!r}: it returned {_article(model)}, not a torch.nn.Module")
    return model.eval()


def load_function(spec: str) -> Callable[[nn.Module], float]:
    """The accuracy that ``module:function`` names; what it raises is put into words."""
    function = _find(spec, "--evaluate")
    if not callable(function):
        raise ValueError(f"--evaluate {spec!r}: a {type(function).__name__} is no function")

    def evaluate(model: nn.Module) -> float:
        try:
            return float(function(model))
        except (Exception, SystemExit) as error:
            raise _broken("--evaluate", spec, "calling it", error) from error

    return evaluate


def make_qconfig(method: str, spec: str | None, observer: str | None, weights: str | None) -> Any:
    """The qconfig that the options describe; None for the default one.

    Raises:
        ValueError: options that exclude each other, or no such qconfig.
    """
    if spec is not None:
        if observer is not None or weights is not None:
            raise ValueError("--qconfig says everything: leave out --observer and --weights")
        found = _find(spec, "--qconfig") if ":" in spec else getattr(quantization, spec, None)
        if not isinstance(found, quantization.QConfig):
            names = [name for name, value in vars(quantization).items() if isinstance(value, quantization.QConfig)]
            raise ValueError(f"--qconfig {spec!r} is no QConfig: write module:name, or one of {', '.join(names)}")
        return found
    if method == "dynamic":
        if observer is not None:
            raise ValueError("--observer is for static quantization: a dynamic layer measures its input at every call")
        return quantization.default_dynamic_qconfig if weights == "tensor" else None
    if observer is None and weights is None:
        return None
    per = {
        "channel": quantization.default_per_channel_weight_observer,
        "tensor": quantization.default_weight_observer,
    }
    return quantization.QConfig(OBSERVERS[observer or "histogram"], per[weights or "channel"])


# --- data ---------------------------------------------------------------------------------------------------------


def load_data(
    spec: str,
    *,
    batch_size: int = 32,
    batches: int | None = None,
    inputs: int | None = None,
    progress: bool = False,
) -> list[Any]:
    """The batches that DATA names.

    Args:
        spec: a file or ``module:function``.
        batch_size: samples a batch, where DATA is samples.
        batches: the most batches; None: all.
        inputs: how many tensors of a tuple are the model's arguments; None: all of them.
        progress: show a progress bar.

    Raises:
        ValueError: what is wrong with it, in words for the user.
    """
    path = Path(spec)
    readers = {".npz": _read_numpy, ".npy": _read_numpy, ".pt": _read_torch, ".pth": _read_torch}
    reader = {**readers, ".safetensors": _read_safetensors}.get(path.suffix)
    if reader is not None and ":" not in path.name:
        if not path.is_file():
            raise ValueError(f"DATA {spec!r}: there is no such file")
        found = reader(path)
    elif ":" not in spec:
        raise ValueError(f"DATA {spec!r} is no .npz, .npy, .pt, .pth or .safetensors file, and no module:function")
    else:
        found = _find(spec, "DATA")
        if callable(found):
            _check_no_arguments(found, "DATA", spec)
            try:
                found = found()
            except (Exception, SystemExit) as error:
                raise _broken("DATA", spec, "calling it", error) from error
    listed = _split(found, spec, batch_size)
    try:
        chosen = list(_watched(itertools.islice(listed, batches), batches, progress))
    except (Exception, SystemExit) as error:
        raise _broken("DATA", spec, "going through it", error) from error
    if not chosen:
        raise ValueError(f"DATA {spec!r} is empty: calibration needs at least one batch")
    return [_arguments(batch, spec, inputs) for batch in chosen]


def _watched(batches: Iterable[Any], count: int | None, progress: bool) -> Iterable[Any]:
    """The batches behind a progress bar: a function of the user's may take its time."""
    if not progress:
        return batches
    from rich.console import Console
    from rich.progress import track

    return track(batches, "loading data", total=count, console=Console(stderr=True), transient=True)


def _read_numpy(path: Path) -> Any:
    try:
        loaded: Any = np.load(path, allow_pickle=False)
        arrays = {"arr_0": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"DATA {path}: no file of numpy arrays, or damaged: {error}") from error
    tensors = {}
    for name, array in arrays.items():
        try:
            tensor = torch.from_numpy(np.ascontiguousarray(array))
        except TypeError as error:
            raise ValueError(f"DATA {path}: array {name!r} holds {array.dtype}, no input of a model") from error
        tensors[name] = tensor.float() if tensor.dtype == torch.float64 else tensor
    if len(tensors) == 1:
        return next(iter(tensors.values()))
    if all(name.startswith("arr_") for name in tensors):
        return tuple(tensors.values())
    return tensors


def _read_torch(path: Path) -> Any:
    try:
        found = checkpoint.load(path)
    except checkpoint.CheckpointError as error:
        raise ValueError(f"DATA {path}: {without_python(error)}") from error
    return found if isinstance(found, (Tensor, Mapping, list)) else [found]


def _read_safetensors(path: Path) -> Any:
    try:
        found = dict(checkpoint.load_file(path))
    except checkpoint.CheckpointError as error:
        raise ValueError(f"DATA {path}: {error}") from error
    return next(iter(found.values())) if len(found) == 1 else found


def _split(found: Any, spec: str, batch_size: int) -> Iterable[Any]:
    """Batches: of samples along dimension 0, or as they come."""
    if not isinstance(found, (Tensor, Mapping, tuple)):
        if isinstance(found, Iterable) and not isinstance(found, (str, bytes)):
            return found
        raise ValueError(f"DATA {spec!r}: {_article(found)} is neither tensors nor batches")
    parts = [found] if isinstance(found, Tensor) else list(found.values() if isinstance(found, Mapping) else found)
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        if isinstance(found, tuple):
            return found  # batches that lie in a tuple
        raise ValueError(f"DATA {spec!r}: samples are tensors with the samples along dimension 0")
    lengths = {len(part) for part in parts}
    if len(lengths) > 1:
        raise ValueError(f"DATA {spec!r}: the tensors have different numbers of samples: {sorted(lengths)}")
    pieces = zip(*(part.split(batch_size) for part in parts if len(part)), strict=True)
    if isinstance(found, Tensor):
        return (piece[0] for piece in pieces)
    if isinstance(found, Mapping):
        return (dict(zip(found, piece, strict=True)) for piece in pieces)
    return pieces


def _arguments(batch: Any, spec: str, inputs: int | None) -> Any:
    if isinstance(batch, (tuple, list)) and inputs is not None:
        batch = tuple(batch[:inputs])
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        batch = batch[0]
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if not isinstance(batch, (Tensor, tuple, list, Mapping)):
        raise ValueError(f"DATA {spec!r}: a batch is {_article(batch)}, not a tensor, a tuple or a dict of tensors")
    return batch


def _article(x: Any) -> str:
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
