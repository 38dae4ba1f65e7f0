"""``info``: what is installed and what runs."""

# Annotations are evaluated here: typer reads the options from them.

from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    import typer

__all__ = ["register"]

_HELP = """Show version, backend, instruction set and threads.

\b
EXAMPLES
  zeropoint info
  zeropoint info --json | jq -r .isa
  ZEROPOINT_ISA=avx2 zeropoint info
"""


def register(app: "typer.Typer") -> None:
    """Adds the command to ``app``."""
    import typer

    from zeropoint.cli._console import command

    @command(app, "info", help=_HELP)
    def info(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        from zeropoint.cli._console import show_json, table

        facts = _facts()
        if json:
            show_json(facts)
            return
        optional = facts.pop("optional")
        rows = [(name.replace("_", " "), _words(value)) for name, value in facts.items()]
        packages = ", ".join(f"{name} {found or '(missing)'}" for name, found in optional.items())
        table(("", ""), [*rows, ("optional packages", packages)])


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def _facts() -> dict[str, Any]:
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import zeropoint

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    described = zeropoint.backends.describe()
    return {
        "zeropoint": zeropoint.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "backend": described["backend"],
        "isa": zeropoint.backends.active_isa(),
        "available": list(zeropoint.backends.available_isas()),
        **({"why": described["why"]} if "why" in described else {}),
        "threads": torch.get_num_threads(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cuda": torch.cuda.is_available(),
        "torch_ao": _has_torch_ao(),
        "optional": {
            name: installed(name) for name in ("safetensors", "jinja2", "tqdm", "onnx", "onnxscript", "onnxruntime")
        },
    }


def _has_torch_ao() -> bool:
    """Whether this torch still has ``torch.ao``'s quantization; it is looked for, not imported."""
    from pathlib import Path

    import torch

    return any((Path(folder) / "ao" / "quantization").is_dir() for folder in torch.__path__)
