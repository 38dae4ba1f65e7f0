"""Code in the documentation runs: docstrings as doctests, Markdown's Python blocks from top to bottom."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zeropoint

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(zeropoint.__path__, "zeropoint.")
    if not module.name.endswith(("__main__", "zeropoint_native"))
    # the kernels for CUDA import triton, which may be missing
    and not (module.name.startswith("zeropoint.backends.triton.") and importlib.util.find_spec("triton") is None)
)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share their names, as a reader would type them; fragments say on their first line why not."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        code = block.group(1)
        if code.startswith(("# not run: ", "# in a program that torchrun starts")):
            continue
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + code, str(page), "exec"), names)


def test_tables_of_benchmarks_are_those_of_the_results() -> None:
    check = [sys.executable, "-W", "ignore", "-m", "benchmarks.tables", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
