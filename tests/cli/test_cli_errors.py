"""What goes wrong is one line on stderr, a status, and nothing left behind."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_process import environment

QUANTIZE = ("quantize", "nets:make", "--data", "x.npz", "-o", "net.pt", "--report", "net.md")


def files(folder: Path) -> list[str]:
    """What a command may have left: hidden files count."""
    return sorted(file.name for file in folder.iterdir() if file.is_file() and file.name not in ("nets.py", "x.npz"))


def one_line(done: Any, status: int = 1) -> str:
    assert (done.returncode if hasattr(done, "returncode") else done.exit_code) == status, done.stderr
    said = said_by(done.stderr)
    assert said.count("\n") == 1, said
    assert said.startswith("error: ")
    return said


def said_by(stderr: str) -> str:
    """Without the line that tells of the reference backend where the native one was not built."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "reference backend" not in line)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("nets", "write module:name"),
        ("net:make", "there is no module 'net'"),
        ("net.py:make", "there is no file net.py"),
        ("nets:mak", "nets has no 'mak'; did you mean make"),
        ("nets:no_model", "returned a dict, not a torch.nn.Module"),
        ("nets:needs_more", "it is called without arguments, but needs width: write a function without"),
        ("nets:broken", r"calling it raised FileNotFoundError: weights.pth is not here ("),
        ("nets:leaves", "calling it raised SystemExit"),
        ("nets:size", "a int makes no model"),
        ("wrong.py:make", "importing wrong.py raised SyntaxError"),
        ("needs.py:make", "raised ModuleNotFoundError: No module named 'a_package_that_is_missing'"),
    ],
)
def test_wrong_programs(invoke: Callable[..., Any], folder: Path, program: str, text: str) -> None:
    (folder / "wrong.py").write_text("def make(:\n")
    (folder / "needs.py").write_text("import a_package_that_is_missing\n")
    assert text in one_line(invoke("quantize", program, "--data", "x.npz", "-o", "net.pt"))
    assert files(folder) == ["needs.py", "wrong.py"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("missing.npz", "there is no such file"),
        ("notes.txt", "is no .npz, .npy, .pt, .pth or .safetensors file"),
        ("damaged.npz", "no file of numpy arrays, or damaged"),
        ("objects.npy", "no file of numpy arrays, or damaged"),
        ("words.npy", "holds <U3, no input of a model"),
        ("damaged.pt", "DATA damaged.pt: this is no file of torch.save"),
        ("damaged.safetensors", "DATA damaged.safetensors: "),
        ("nan.npy", "batch 0 of the data, float32 (4, 3, 8, 8), holds 768 NaN and 0 infinities among 768 values"),
        ("partly.npy", "batch 1 of the data, float32 (8, 3, 8, 8), holds 1 NaN and 1 infinities among 1536 values"),
        ("nets:needs_more", "it is called without arguments, but needs width"),
        ("empty.npz", "is empty: calibration needs at least one batch"),
        ("nets:nothing", "is empty: calibration needs at least one batch"),
        ("uneven.npz", "different numbers of samples: [2, 3]"),
        ("gray.npz", "batch 0 of the data, float32 (4, 1, 8, 8), does not fit Net: RuntimeError"),
        ("changing.pt", "batch 1 of the data, float32 (4, 1, 8, 8), does not fit"),
        ("nets:size", "an int is neither tensors nor batches"),
        ("nets:broken_data", "going through it raised OSError: the camera is off"),
        ("nets:labelled", "(8,), does not fit Net: TypeError"),
        ("evil.pt", "error: "),
    ],
)
def test_wrong_data(invoke: Callable[..., Any], folder: Path, data: str, text: str) -> None:
    for name in ("damaged.npz", "damaged.pt", "damaged.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"\x01\x02 not what it says")
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    np.save("words.npy", np.array(["one"]))
    np.save("nan.npy", np.full((4, 3, 8, 8), np.nan, np.float32))
    partly = np.zeros((40, 3, 8, 8), np.float32)
    partly[33, 0, 0, :2] = np.nan, np.inf
    np.save("partly.npy", partly)
    np.savez("empty.npz", np.zeros((0, 3, 8, 8)))
    np.savez("uneven.npz", a=np.zeros(2), b=np.zeros(3))
    np.savez("gray.npz", np.zeros((4, 1, 8, 8)))
    torch.save([torch.ones(4, 3, 8, 8), torch.ones(4, 1, 8, 8)], "changing.pt")
    (folder / "evil.pt").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    before = files(folder)
    assert text in one_line(invoke("quantize", "nets:make", "--data", data, "-o", "net.pt"))
    assert files(folder) == before


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("quantize", "nets:make", "-o", "net.pt"), "static quantization needs --data"),
        (("quantize", "nets:make", "-o", "net.bin"), "must end in .safetensors, .pt or .pth"),
        (("quantize", "nets:make", "-o", "there/net.pt"), "there is no folder there"),
        (("quantize", "nets:make", "-o", "nets.pt"), "nets.pt exists"),
        (("quantize", "nets:make", "-o", "net.pt", "--report", "net.pdf"), "must end in .html, .md or .json"),
        ((*QUANTIZE, "--qconfig", "default_qconfi"), "is no QConfig"),
        ((*QUANTIZE, "--qconfig", "default_qconfig", "--weights", "tensor"), "says everything"),
        ((*QUANTIZE, "--method", "dynamic", "--observer", "mse"), "is for static quantization"),
        ((*QUANTIZE, "--keep-float", "head"), "has no layer 'head'"),
        ((*QUANTIZE, "--max-drop", "0.1"), "belong together"),
        (
            (*QUANTIZE, "--max-drop", "1", "--evaluate", "nets:no_model"),
            "--evaluate 'nets:no_model': calling it raised",
        ),
        (("convert-checkpoint", "nets.pt", "new.foo"), "new.foo: the name must end in .safetensors"),
        (("convert-checkpoint", "missing.pt", "new.safetensors"), "error: missing.pt: there is no such file"),
        (("convert-checkpoint", ".", "new.safetensors"), "error: .: this is no file"),
        (("migrate", "missing.py"), "error: missing.py: there is no such file or folder"),
        (("migrate", "nets.py", "missing", "--json"), "error: missing: there is no such file or folder"),
        (("inspect", "missing.pt"), "error: missing.pt: there is no such file"),
        (("inspect", "."), "error: .: this is no file"),
        (("inspect", "nets.py"), "this is no file of torch.save"),
        (
            ("report", "nets:make", "missing.pt", "-d", "x.npz", "-o", "r.md"),
            "error: missing.pt: there is no such file",
        ),
        (("report", "nets:make", ".", "-d", "x.npz", "-o", "r.md"), "error: .: this is no file"),
        (("bench", "nets:make", "-d", "x.npz", "--checkpoint", "missing.pt"), "missing.pt: there is no such file"),
        (("report", "nets:make", "nets.pt", "-d", "x.npz", "-o", "r.md"), "error: "),
    ],
)
def test_wrong_words(invoke: Callable[..., Any], folder: Path, words: tuple[str, ...], text: str) -> None:
    (folder / "nets.pt").touch()
    assert text in one_line(invoke(*words))
    assert files(folder) == ["nets.pt"]


def test_nothing_is_rewritten_where_a_path_is_missing(invoke: Callable[..., Any], folder: Path) -> None:
    (folder / "old.py").write_text("import torch.ao.quantization\n")
    assert "missing: there is no such file or folder" in one_line(invoke("migrate", "old.py", "missing", "--write"))
    assert (folder / "old.py").read_text() == "import torch.ao.quantization\n"


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "made.pt"),
        ("convert-checkpoint", "made.pt", "new.safetensors"),
    ],
)
def test_classes_of_the_users_own_are_read_with_an_option(
    invoke: Callable[..., Any], folder: Path, words: tuple[str, ...]
) -> None:
    torch.save({"settings": Settings()}, "made.pt")
    name = f"{Settings.__module__}.Settings"
    said = one_line(invoke(*words))
    assert said.startswith(f"error: made.pt: the file refers to {name}, which is not in the list")
    assert f"save a state_dict instead, or pass --allow {name} to read it as an inert record" in said
    assert "allow=" not in said
    assert invoke(*words, "--allow", name).exit_code == 0


def test_commands_without_that_option_do_not_name_it(invoke: Callable[..., Any], folder: Path) -> None:
    torch.save({"settings": Settings()}, "made.pt")
    for words in (
        ("quantize", "nets:make", "--data", "made.pt", "-o", "net.pt"),
        ("report", "nets:make", "made.pt", "-d", "x.npz", "-o", "r.md"),
        ("bench", "nets:make", "-d", "x.npz", "--checkpoint", "made.pt"),
    ):
        said = one_line(invoke(*words))
        assert "which is not in the list of what this reader builds: save a state_dict instead\n" in said


class Settings:
    """What somebody keeps beside the weights."""


def test_a_checkpoint_of_another_model(invoke: Callable[..., Any], folder: Path) -> None:
    assert invoke(*QUANTIZE).exit_code == 0
    done = invoke("report", "nets:text", "net.pt", "-d", "x.npz", "-o", "r.md")
    assert "does not fit Text" in one_line(done)
    (folder / "other.py").write_text("from torch import nn\ndef make(): return nn.Conv2d(3, 4, 1)\n")
    done = invoke("bench", "other.py:make", "-d", "x.npz", "--checkpoint", "net.pt")
    assert "no module 'conv'" in one_line(done) or "belongs to another model" in done.stderr


@pytest.mark.slow
def test_wrong_options_have_a_status_of_their_own(shell: Callable[..., Any]) -> None:
    done = shell("quantize", "nets:make", "--methd", "dynamic", "-o", "net.pt")
    assert done.returncode == 2
    assert "--methd" in done.stderr


def test_the_status_of_a_wrong_command_line(invoke: Callable[..., Any]) -> None:
    for words in (
        ("inspekt", "x"),
        ("inspect",),
        ("migrate",),
        ("quantize", "nets:make", "-o", "n.pt", "--method", "x"),
    ):
        done = invoke(*words)
        assert (done.exit_code, "Usage: " in done.stderr) == (2, True), words


@pytest.mark.slow
def test_a_traceback_on_request(shell: Callable[..., Any], folder: Path) -> None:
    command = [sys.executable, "-m", "zeropoint", "quantize", "nets:broken", "-d", "x.npz", "-o", "net.pt"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(ZEROPOINT_TRACEBACK="1"), check=False
    )
    assert "Traceback" in done.stderr
    assert 'in broken\n    raise FileNotFoundError("weights.pth is not here")' in done.stderr


# --- what no check beforehand can see -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of one page, which a file fills."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)], check=False, stderr=-3)
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    (disk / "old.md").write_bytes(b"-" * 4096)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_full_disk(shell: Callable[..., Any], small_disk: Path, ending: str) -> None:
    if ending == "safetensors":
        pytest.importorskip("safetensors")
    target = small_disk / f"net.{ending}"
    done = shell("quantize", "nets:make", "--data", "x.npz", "-o", target)
    assert one_line(done) == f"error: {target}: the disk is full\n"
    assert [file.name for file in small_disk.iterdir()] == ["old.md"]


@pytest.mark.slow
def test_a_full_disk_keeps_the_old_file(shell: Callable[..., Any], folder: Path, small_disk: Path) -> None:
    target = small_disk / "old.md"
    done = shell("quantize", "nets:make", "--data", "x.npz", "-o", "net.pt", "--report", target, "--overwrite")
    assert one_line(done) == f"error: {target}: the disk is full\n"
    assert target.read_bytes() == b"-" * 4096
    assert [file.name for file in small_disk.iterdir()] == ["old.md"]
    assert files(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(("target", "most"), [("net.pt", 2000), ("net.safetensors", 2000), ("net.json", 6500)])
def test_a_write_that_fails_in_the_middle(shell: Callable[..., Any], folder: Path, target: str, most: int) -> None:
    if target.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    where = ["-o", target] if not target.endswith(".json") else ["-o", "net.pt", "--report", target]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    done = shell("quantize", "nets:make", "--data", "x.npz", *where, preexec_fn=limit)
    assert f"{target}: file too large" in one_line(done)
    assert files(folder) == []


def can_be_interrupted() -> None:
    """In a new process: a shell's job in the background has children that ignore interruptions."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_an_interrupted_calibration(folder: Path, number: signal.Signals, status: int, word: str) -> None:
    command = ["quantize", "nets:make", "--data", "nets:endless", "-o", "net.pt", "--report", "net.md"]
    with subprocess.Popen(
        [sys.executable, "-m", "zeropoint", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=can_be_interrupted,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "batch 0\n"  # it calibrates now
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == status
    assert said_by(stderr) == (f"error: {word}\n")
    assert files(folder) == []


@pytest.mark.slow
def test_an_interruption_while_a_file_is_written(folder: Path) -> None:
    program = """
import os, signal, sys
import zeropoint.files
real = os.fsync
def interrupted(handle):
    signal.raise_signal(signal.SIGINT)
    real(handle)
zeropoint.files.os.fsync = interrupted
sys.argv = ["zeropoint", "quantize", "nets:make", "--data", "x.npz", "-o", "net.pt"]
from zeropoint.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        preexec_fn=can_be_interrupted,
    )
    assert one_line(done, 130) == "error: interrupted\n"
    assert files(folder) == []


def test_a_device_is_not_replaced(invoke: Callable[..., Any], folder: Path) -> None:
    (folder / "net.pt").symlink_to("/dev/full")
    done = invoke("quantize", "nets:make", "--data", "x.npz", "-o", "net.pt", "--overwrite")
    assert "net.pt is no regular file" in one_line(done)
    assert Path("/dev/full").is_char_device()


@pytest.mark.slow
def test_a_reader_that_has_enough(shell: Callable[..., Any], folder: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m zeropoint quantize --help | head -1",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert said_by(done.stderr) == ""
