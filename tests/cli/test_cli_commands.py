"""What each command does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zeropoint as zp
from zeropoint import backends, checkpoint, recipe
from zeropoint.cli import COMMANDS

FIXTURES = Path(__file__).parents[1] / "checkpoint" / "fixtures"
QUANTIZE = ("quantize", "nets:make", "--data", "x.npz", "-o", "net.pt")


def test_every_command_has_a_page_with_examples(invoke: Callable[..., Any]) -> None:
    overview = invoke("--help").stdout
    assert "EXIT STATUS" in overview
    names = re.findall(r"^  ([a-z-]+)  ", overview.partition("Commands:")[2], flags=re.MULTILINE)
    assert len(names) == len(COMMANDS)
    for name in names:
        page = invoke(name, "--help").stdout
        assert "EXAMPLES\n    " in page
        assert f"zeropoint {name}" in page


def test_info(invoke: Callable[..., Any]) -> None:
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["isa"] == backends.active_isa()
    assert facts["threads"] == torch.get_num_threads()
    assert f"torch              {torch.__version__}\n" in invoke("info").stdout


def test_an_instruction_set_that_is_not_there_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeropoint.backends import cpu

    monkeypatch.setattr(cpu, "available_isas", lambda: ("portable",))
    for wish, words in (("foo", "no instruction set that is known"), ("neon_dot", "not available")):
        monkeypatch.setenv("ZEROPOINT_ISA", wish)
        caplog.clear()
        cpu._check_wish()
        assert f"ZEROPOINT_ISA={wish} is {words}" in caplog.text
        assert "here are portable" in caplog.text
    monkeypatch.setenv("ZEROPOINT_ISA", "portable")
    caplog.clear()
    cpu._check_wish()
    assert caplog.text == ""


@pytest.mark.slow
def test_completion_is_offered(shell: Callable[..., Any]) -> None:
    assert "--show-completion" in shell("--help").stdout


# --- inspect ------------------------------------------------------------------------------------------------------


def test_inspect_shows_grids_of_a_checkpoint_of_ours(invoke: Callable[..., Any]) -> None:
    assert invoke(*QUANTIZE).exit_code == 0
    found = json.loads(invoke("inspect", "net.pt", "--json").stdout)
    weight = next(entry for entry in found["tensors"] if entry["name"].endswith("module.conv.weight"))
    assert (weight["dtype"], weight["shape"], weight["grid"]["grids"]) == ("qint8", [8, 3, 3, 3], 8)
    assert weight["bytes"] == 8 * 27 + 8 * (4 + 4)
    assert found["recipe"]["fuse"] == [["conv", "bn", "relu"]]
    words = invoke("inspect", "net.pt").stdout
    assert "made by zeropoint quantize: static, 1 row fused" in words
    assert "8 grids, scale" in words


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.pt")), ids=lambda file: file.stem)
def test_inspect_reads_old_files_of_torch_ao(invoke: Callable[..., Any], file: Path) -> None:
    done = invoke("inspect", file, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["tensors"]
    assert found["quantized_tensors"] >= (0 if file.stem == "expected" else 1)
    assert invoke("inspect", file).exit_code == 0


def test_inspect_reads_safetensors_of_others(invoke: Callable[..., Any], folder: Path) -> None:
    from_torch = pytest.importorskip("safetensors.torch")
    from_torch.save_file({"a": torch.ones(2, 3)}, folder / "a.safetensors")
    assert json.loads(invoke("inspect", "a.safetensors", "--json").stdout)["tensors"] == [
        {"name": "a", "dtype": "float32", "shape": [2, 3], "bytes": 24, "grid": None}
    ]


def test_inspect_counts_in_words(invoke: Callable[..., Any], folder: Path) -> None:
    codes = zp.quantize_per_tensor(torch.ones(2), 1.0, 0, zp.qint8)
    torch.save({"codes": codes, "floats": torch.ones(2)}, "one.pt")
    words = invoke("inspect", "one.pt").stdout.splitlines()[-1]
    assert ": 1 quantized tensor (" in words
    assert ", 1 other (" in words
    torch.save({}, "none.pt")
    words = invoke("inspect", "none.pt").stdout.splitlines()[-1]
    assert ": 0 quantized tensors (" in words
    assert ", 0 others (" in words


def test_inspect_runs_nothing_from_a_file(invoke: Callable[..., Any], folder: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "ran",)

    (folder / "evil.pt").write_bytes(pickle.dumps(Evil()))
    done = invoke("inspect", "evil.pt")
    assert done.exit_code == 1
    assert not (folder / "ran").exists()


# --- quantize -----------------------------------------------------------------------------------------------------


def test_static(invoke: Callable[..., Any], folder: Path) -> None:
    import nets

    done = invoke(*QUANTIZE, "--report", "net.md")
    assert done.exit_code == 0, done.output
    assert "fused   1 row, such as conv + bn + relu" in done.stdout
    assert done.stdout.endswith("wrote net.pt and net.md\n")
    assert (folder / "net.md").read_text().startswith("# Net: what quantization cost")
    loaded = recipe.load(nets.make(), "net.pt")
    x = torch.randn(4, 3, 8, 8)
    assert (loaded.model(x) - nets.make().eval()(x)).abs().max() < 0.05
    assert sorted(file.name for file in folder.iterdir() if file.is_file()) == ["net.md", "net.pt", "nets.py", "x.npz"]


def test_json_says_what_was_done(invoke: Callable[..., Any]) -> None:
    facts = json.loads(invoke(*QUANTIZE, "--json", "--weights", "tensor", "--observer", "minmax").stdout)
    assert facts["settings"] == {"observer": "minmax", "weights": "one grid a tensor"}
    assert {before for _, before, _ in facts["quantized"]} == {"QuantStub", "ConvReLU2d", "Linear", "DeQuantStub"}
    assert facts["output_sqnr_db"] > 20
    assert checkpoint.load("net.pt")["state_dict"]["module.conv.weight_scale"].dim() == 0


@pytest.mark.parametrize(
    "data", ["x.npz", "x.npy", "x.pt", "list.pt", "x.safetensors", "nets:labelled", "nets.py:labelled"]
)
def test_sources_of_data(invoke: Callable[..., Any], folder: Path, data: str) -> None:
    x = torch.randn(20, 3, 8, 8)
    np.save("x.npy", x.double().numpy())
    torch.save(x, "x.pt")
    torch.save([x[:7], x[7:]], "list.pt")
    if data.endswith(".safetensors"):
        pytest.importorskip("safetensors.torch").save_file({"x": x}, data)
    inputs = ["--inputs", "1"] if "labelled" in data else []
    done = invoke("quantize", "nets.py:make", "--data", data, "-o", "net.pt", *inputs)
    assert done.exit_code == 0, done.output


def test_layers_that_stay_in_float(invoke: Callable[..., Any]) -> None:
    done = invoke(*QUANTIZE, "--keep-float", "bn")
    assert "module.conv    ConvReLU2d  kept in float" in done.stdout, done.output
    assert recipe.read_recipe("net.pt").islands == {"module.conv": True}


def test_dynamic_with_named_arguments(invoke: Callable[..., Any], folder: Path) -> None:
    np.savez("t.npz", tokens=np.ones((6, 5), dtype=np.int64), mask=np.ones((6, 5), dtype=bool))
    words = ("quantize", "nets:text", "--method", "dynamic", "-o")
    assert invoke(*words, "plain.pt").exit_code == 0
    done = invoke(*words, "t.pt", "--data", "t.npz", "--report", "t.json", "--sensitivity")
    assert done.exit_code == 0, done.output
    found = json.loads((folder / "t.json").read_text())
    assert [layer["name"] for layer in found["layers"]] == ["embedding", "fc"]
    assert found["layers"][1]["activation"]["sqnr"] > 20
    assert {layer["name"] for layer in found["sensitivity"]["layers"]} == {"embedding", "fc"}


def test_as_much_as_accuracy_allows(invoke: Callable[..., Any], folder: Path) -> None:
    words = (*QUANTIZE, "--evaluate", "nets:accuracy")
    facts = json.loads(invoke(*words, "--max-drop", "0.1", "--json").stdout)
    assert facts["accuracy"]["quantized"] >= -0.1
    import nets

    assert nets.accuracy(recipe.load(nets.make(), "net.pt").model) == facts["accuracy"]["quantized"]
    done = invoke(*words, "--max-drop", "0", "--overwrite")
    assert done.exit_code == 3
    assert "no quantized model comes within 0 of the float accuracy" in done.stderr


@pytest.mark.slow
def test_layers_that_are_taken_apart(invoke: Callable[..., Any], folder: Path) -> None:
    np.save("speech.npy", np.random.default_rng(0).normal(size=(8, 6, 1, 8)).astype(np.float32))
    words = ("quantize", "nets:speech", "--data", "speech.npy", "-o")
    done = invoke(*words, "all.pt", "--report", "all.md", "--sensitivity")
    assert done.exit_code == 0, done.output
    ranking = (folder / "all.md").read_text().split("## Sensitivity")[1].split("\n## ")[0]
    assert "| module.lstm | LSTM |" in ranking
    assert "| module.attention | MultiheadAttention |" in ranking
    words = (*words, "part.pt", "--evaluate", "nets:speech_accuracy", "--max-drop", "0.5", "--json")
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["accuracy"]["kept_in_float"] == ["module.lstm"]
    again = invoke("report", "nets:speech", "part.pt", "--data", "speech.npy", "-o", "part.md")
    assert again.exit_code == 0, again.output


# --- report, bench ------------------------------------------------------------------------------------------------


def test_report_of_a_file(invoke: Callable[..., Any], folder: Path) -> None:
    assert invoke(*QUANTIZE).exit_code == 0
    words = ("report", "nets:make", "net.pt", "--data", "x.npz", "-o")
    done = invoke(*words, "net.md", "--sensitivity")
    assert done.exit_code == 0, done.output
    assert "## Sensitivity" in (folder / "net.md").read_text()
    assert json.loads(invoke(*words, "net.json", "--json").stdout)["output"] > 20


@pytest.mark.parametrize("checkpoint", [False, True])
def test_bench(invoke: Callable[..., Any], checkpoint: bool) -> None:
    assert invoke(*QUANTIZE).exit_code == 0
    words = ["bench", "nets:make", "--data", "x.npz", "--threads", "1", "--threads", "2", "--seconds", "0.01"]
    done = invoke(*words, *(["--checkpoint", "net.pt"] if checkpoint else []), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    models = ["float", "quantized", *(["compiled"] if backends.is_native() else [])]
    assert [(row["model"], row["threads"]) for row in found["rows"]] == [(m, t) for t in (1, 2) for m in models]
    assert all(0 < row["best_ms"] <= row["median_ms"] for row in found["rows"])
    assert "times float" in invoke(*words).stdout
