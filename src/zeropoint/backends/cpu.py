"""Loads the native CPU library, if it was built, and tells what runs.

Environment: ``ZEROPOINT_NATIVE=0`` keeps to the reference backend; ``ZEROPOINT_NATIVE=<path>`` loads that library
file; ``ZEROPOINT_ISA`` (portable, avx2, avx_vnni, avx512_vnni, amx_int8) lowers the instruction set.

May import: torch only. ``zeropoint.ops`` must be imported first: it defines the schemas.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

__all__ = ["ISA_NAMES", "active_isa", "available_isas", "describe", "is_native", "load", "set_isa"]

ISA_NAMES = ("portable", "avx2", "avx_vnni", "avx512_vnni", "amx_int8", "neon_dot", "neon_i8mm")
"""Instruction sets of the native library, by number."""

_LOG = logging.getLogger("zeropoint")

_loaded: Path | None = None
_why_not = "not loaded yet"


def _find() -> Path | None:
    wish = os.environ.get("ZEROPOINT_NATIVE", "")
    if wish not in ("", "0", "1"):
        return Path(wish)
    import zeropoint

    for folder in zeropoint.__path__:
        candidate = Path(folder) / "zeropoint_native.so"
        if candidate.is_file():
            return candidate
    return None


def load() -> bool:
    """Loads the native library once. Without it the reference backend serves, and one line in the log says so."""
    global _loaded, _why_not
    if _loaded is not None:
        return True
    library = None if os.environ.get("ZEROPOINT_NATIVE") == "0" else _find()
    if os.environ.get("ZEROPOINT_NATIVE") == "0":
        _why_not = "ZEROPOINT_NATIVE=0"
    elif library is None:
        _why_not = "the package was built without a C++ compiler"
    else:
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            _why_not = f"{library.name} could not be loaded: {error}"
        else:
            _loaded = library
            _check_kernels()
            _check_wish()
            return True
    _LOG.warning("running on the reference backend, which is exact but slow: %s", _why_not)
    return False


def _check_kernels() -> None:
    """Multiplies a small matrix; kernels that give other integers than plain C++ here are put out of use."""
    chosen = active_isa()
    if not torch.ops.zeropoint._isa_selfcheck():
        _LOG.warning("the %s kernels failed their check on this processor: %s runs instead", chosen, active_isa())


def _check_wish() -> None:
    """A wish that the library could not follow is named: it runs the best instruction set then."""
    wish = os.environ.get("ZEROPOINT_ISA", "")
    if wish and wish not in available_isas():
        _LOG.warning(
            "ZEROPOINT_ISA=%s is %s: %s runs; here are %s",
            wish,
            "not available on this processor" if wish in ISA_NAMES else "no instruction set that is known",
            active_isa(),
            ", ".join(available_isas()),
        )


def is_native() -> bool:
    """Whether the native kernels serve the CPU."""
    return _loaded is not None


def active_isa() -> str:
    """The instruction set that runs now, or "reference" without the native library."""
    return ISA_NAMES[torch.ops.zeropoint._isa_active()] if is_native() else "reference"


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this processor and this build can run."""
    if not is_native():
        return ()
    return tuple(name for i, name in enumerate(ISA_NAMES) if torch.ops.zeropoint._isa_available(i))


def set_isa(name: str) -> None:
    """Runs another instruction set from now on: for tests and measurements.

    Weights packed for another set are packed anew where they meet it.

    Raises:
        ValueError: the processor or the build does not have it.
    """
    if name not in ISA_NAMES or not is_native() or not torch.ops.zeropoint._isa_set(ISA_NAMES.index(name)):
        raise ValueError(f"instruction set {name!r} is not available here, choose from {available_isas()}")


def describe() -> dict[str, object]:
    """What runs on the CPU: backend, instruction set, threads."""
    if is_native():
        return {
            "backend": "native",
            "isa": active_isa(),
            "available": available_isas(),
            "threads": torch.get_num_threads(),
        }
    return {"backend": "reference", "why": _why_not, "threads": torch.get_num_threads()}
