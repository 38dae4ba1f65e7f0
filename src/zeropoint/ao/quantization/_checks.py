"""What the workflow asks of a model and of what the caller names, before anything is changed.

May import: ``tensor``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Final

from torch import nn

from zeropoint.tensor import QTensor

__all__ = ["check_names", "refuse_codes_in_float", "refuse_torch_ao"]

_HOMES: Final = {
    "QuantStub": "zeropoint.ao.quantization",
    "DeQuantStub": "zeropoint.ao.quantization",
    "QuantWrapper": "zeropoint.ao.quantization",
    "FloatFunctional": "zeropoint.ao.nn.quantized",
    "FXFloatFunctional": "zeropoint.ao.nn.quantized",
    "QFunctional": "zeropoint.ao.nn.quantized",
}
"""The classes of torch.ao that mark a model, and where their namesakes are."""


def refuse_torch_ao(model: nn.Module) -> None:
    """Raises TypeError if a stub or an arithmetic module of ``torch.ao`` is in the model: nothing here would see it.

    They are told by the names of their classes and modules, so that torch need not have them.
    """
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            home = kind.__module__
            if kind.__name__ in _HOMES and home.startswith(("torch.ao.", "torch.quantization.", "torch.nn.quantized")):
                raise TypeError(
                    f"{name or 'the model'!r} is torch's {home}.{kind.__name__}, which means nothing here: import "
                    f"{kind.__name__} from {_HOMES[kind.__name__]} instead (`python -m zeropoint migrate` rewrites "
                    "the imports of whole files)"
                )


def check_names(model: nn.Module, names: Iterable[Any], argument: str) -> None:
    """Raises ValueError if one of the strings names no module of the model."""
    known = [name for name, _ in model.named_modules(remove_duplicate=False)]
    unknown = [name for name in names if isinstance(name, str) and name not in known]
    if not unknown:
        return
    words = []
    for name in unknown:
        ends = [path for path in known if path.rpartition(".")[2] == name]
        near = ends or difflib.get_close_matches(name, known, n=3)
        words.append(f"{name!r}" + (f" (is {' or '.join(map(repr, near[:3]))} meant?)" if near else ""))
    raise ValueError(f"{argument} names modules that the model does not have: {', '.join(words)}")


def refuse_codes_in_float(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook of float layers that would fail on codes with words that name neither layer nor cure."""
    if any(isinstance(value, QTensor) for value in (*args, *kwargs.values())):
        raise TypeError(
            f"{type(module).__name__} {module.module_path!r} stayed in float and got a quantized tensor: put a "
            "DeQuantStub in front of it and a QuantStub behind it before prepare(), and quantize_dynamic it if its "
            "weights are to be int8"
        )
