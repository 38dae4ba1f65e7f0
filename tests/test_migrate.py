"""The codemod: programs in the style of what depends on ``torch.ao`` run after it, and nothing else changes."""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropoint import cli
from zeropoint.ao.quantization import quantization_mappings
from zeropoint.migrate import Migration, migrate_paths, migrate_source, python_files

PROGRAMS = sorted((Path(__file__).parent / "migration_programs").glob("*.py"))


@pytest.fixture
def mappings() -> Any:
    """The default mappings, which a program may edit; they are as they were afterwards."""
    names = [name for name in vars(quantization_mappings) if name.startswith("DEFAULT_")]
    before = {name: copy.copy(getattr(quantization_mappings, name)) for name in names}
    yield
    for name, table in before.items():
        if isinstance(table, dict):
            getattr(quantization_mappings, name).clear()
            getattr(quantization_mappings, name).update(table)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("mappings")
def test_a_program_runs_after_migration(program: Path) -> None:
    migration = migrate_source(program.read_text())
    assert all(place.what.startswith("torch.backends.quantized") for place in migration.left)
    for name in ("torch.ao", "torch.quantization", "torch.nn.quantized", "torch.nn.intrinsic", "torch.nn.qat"):
        assert name not in migration.text
    names: dict[str, Any] = {"__name__": program.stem}
    exec(compile(migration.text, str(program), "exec"), names)
    for result, output in zip(names["results"], names["outputs"], strict=True):
        classes = {type(module) for module in result.modules()}
        assert any(found.__module__.startswith("zeropoint.ao.nn.") for found in classes)
        assert torch.isfinite(output).all()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_only_lines_with_names_of_torch_change(program: Path) -> None:
    before = program.read_text()
    migration = migrate_source(before)
    for line in difflib.ndiff(before.splitlines(), migration.text.splitlines()):
        if line.startswith("- "):
            assert "torch" in line or "nn." in line
    assert migrate_source(migration.text).changes == ()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch.ao.quantization as tq\ntq.prepare", "import zeropoint.ao.quantization as tq\ntq.prepare"),
        ("import torch.quantization", "import torch, zeropoint.ao.quantization"),
        ("import torch\nimport torch.quantization", "import torch\nimport zeropoint.ao.quantization"),
        ("import os, torch.nn.quantized as q", "import os, zeropoint.ao.nn.quantized as q"),
        ("from torch import quantization", "from zeropoint.ao import quantization"),
        ("from torch import nn, qint8 as q8", "from zeropoint import qint8 as q8\nfrom torch import nn"),
        (
            "from torch.ao.quantization import (\n    prepare,  # one\n    convert,\n)",
            "from zeropoint.ao.quantization import (\n    prepare,  # one\n    convert,\n)",
        ),
        ("from torch.nn.quantized.modules.linear import Linear", "from zeropoint.ao.nn.quantized import Linear"),
        ("import torch\nx = torch.qint8", "import torch\nimport zeropoint\nx = zeropoint.qint8"),
        ("import torch as t\nx = t.quint8", "import torch as t\nimport zeropoint\nx = zeropoint.quint8"),
        (
            "from torch import nn\nf = nn.quantized.FloatFunctional()",
            "from torch import nn\nimport zeropoint.ao.nn.quantized\nf = zeropoint.ao.nn.quantized.FloatFunctional()",
        ),
        (
            '"""Doc."""\nfrom __future__ import annotations\ndef f():\n    import torch\n    return torch.qint8',
            '"""Doc."""\nfrom __future__ import annotations\nimport zeropoint\ndef f():\n    import torch\n'
            "    return zeropoint.qint8",
        ),
        (
            "if x:\n    from torch.quantization import prepare, prepare_fx",
            "if x:\n    from zeropoint.ao.quantization import prepare\n    from torch.quantization import prepare_fx",
        ),
        ("import torch\r\ny = torch.qint8\r\n", "import torch\r\nimport zeropoint\r\ny = zeropoint.qint8\r\n"),
        ("ä = 'ö'; import torch; y = torch.qint8", "ä = 'ö'; import torch; y = zeropoint.qint8\nimport zeropoint"),
        ("import torch\ntorch.nn.Linear(1, 1)", "import torch\ntorch.nn.Linear(1, 1)"),
        ("from .quantization import prepare", "from .quantization import prepare"),
        ("quantization.prepare(1)", "quantization.prepare(1)"),
    ],
)
def test_edits(before: str, after: str) -> None:
    assert migrate_source(before).text == after


def left(source: str) -> list[tuple[int, str]]:
    migration = migrate_source(source)
    return [(place.line, place.what) for place in migration.left]


def test_what_is_not_known_stays_and_is_listed() -> None:
    source = """import torch
from torch.ao.quantization.quantize_fx import prepare_fx
import torch.ao.quantization as tq
a = torch.quantization.quantize_fx.convert_fx
b = torch.ops.quantized.add
c = "torch.quantization.QConfig"
d = tq.quantize_fx
e = tq.prepare
"""
    migration = migrate_source(source)
    assert migration.text == source.replace(
        "import torch\n", "import torch\nimport zeropoint.ao.quantization\n"
    ).replace("tq.prepare", "zeropoint.ao.quantization.prepare")
    assert [(place.line, place.what) for place in migration.left] == [
        (2, "torch.ao.quantization.quantize_fx.prepare_fx"),
        (3, "torch.ao.quantization"),
        (4, "torch.quantization.quantize_fx.convert_fx"),
        (5, "torch.ops.quantized.add"),
        (6, "'torch.quantization.QConfig'"),
        (7, "torch.ao.quantization.quantize_fx"),
    ]
    assert migration.left[0].why == "graph mode has no counterpart: use prepare and convert"


def test_names_that_cannot_be_replaced_in_place_are_listed() -> None:
    assert left("import torch\nx = (torch.\n     quantization.prepare)") == [(2, "torch.quantization.prepare")]
    assert left("import torch\ntorch = 3\ntorch.qint8") == [(3, "torch.qint8")]
    assert left("from torch.ao.nn.quantized.reference import Linear")
    assert left("from torch.quantization import *") == [(1, "from torch.quantization import *")]
    assert left("from torch.quantization.quantize_fx import *") == [(1, "torch.quantization.quantize_fx.*")]


# --- files and the command ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "package" / "a.py").write_bytes(b"# coding: latin-1\nimport torch # \xe4\nx = torch.qint8\n")
    (tmp_path / "package" / "b.py").write_text("import os\n")
    (tmp_path / "package" / "broken.py").write_text("import torch.quantization as\n")
    (tmp_path / "package" / "__pycache__" / "c.py").write_text("import torch.quantization\n")
    (tmp_path / ".git" / "d.py").write_text("import torch.quantization\n")
    return tmp_path


def test_files(tree: Path) -> None:
    assert [path.name for path in python_files([tree])] == ["a.py", "b.py", "broken.py"]
    with pytest.raises(FileNotFoundError):
        list(python_files([tree / "nothing"]))
    before = (tree / "package" / "a.py").read_bytes()
    found: dict[str, Migration] = {path.name: migration for path, _, migration in migrate_paths([tree])}
    assert list(found) == ["a.py", "broken.py"]
    assert "not read" in found["broken.py"].left[0].why
    assert (tree / "package" / "a.py").read_bytes() == before
    list(migrate_paths([tree], write=True))
    assert (tree / "package" / "a.py").read_bytes() == (
        b"# coding: latin-1\nimport torch # \xe4\nimport zeropoint\nx = zeropoint.qint8\n"
    )
    assert (tree / "package" / "broken.py").read_text() == "import torch.quantization as\n"


def test_the_command(tree: Path) -> None:
    testing = pytest.importorskip("typer.testing")

    def command(*options: str) -> str:
        done = testing.CliRunner().invoke(cli.make_app(), ["migrate", str(tree / "package" / "a.py"), *options])
        assert done.exit_code == 0, done.output
        return str(done.output)

    before = (tree / "package" / "a.py").read_bytes()
    assert "+x = zeropoint.qint8" in command("--diff")
    assert (tree / "package" / "a.py").read_bytes() == before
    assert "2 changes made in 1 file; 0 places left" in command("--write")
    assert b"zeropoint.qint8" in (tree / "package" / "a.py").read_bytes()


def test_the_command_in_json_names_what_it_could_not_read(tree: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    done = testing.CliRunner().invoke(cli.make_app(), ["migrate", str(tree), "--json", "--diff"])
    assert done.exit_code == 1
    assert "1 file could not be read as Python" in done.stderr
    assert "broken.py" in done.stderr
    found = json.loads(done.stdout)
    assert (found["written"], found["changes"], found["changed_files"]) == (False, 2, 1)
    assert [file["read"] for file in found["files"]] == [True, False]
    assert "+x = zeropoint.qint8" in found["files"][0]["diff"]
    assert [change["line"] for change in found["files"][0]["changes"]]
