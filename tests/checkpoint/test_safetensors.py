"""Quantized models as safetensors: nothing is lost, nothing is pickled."""

from __future__ import annotations

import json
import runpy
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint import checkpoint, cli
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import quantize_dynamic
from zeropoint.checkpoint import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


def test_quantized_tensors_of_every_grid(path: Path) -> None:
    values = torch.randn(4, 6)
    state = {
        "tensor": zp.quantize_per_tensor(values, 0.1, 3, zp.quint8),
        "wide": zp.quantize_per_tensor(values, 1e-7, 0, zp.qint32),
        "channel": zp.quantize_per_channel(values, torch.rand(6) + 0.1, torch.arange(6), 1, zp.qint8),
        "floating": zp.quantize_per_channel(values, torch.rand(4) + 0.1, torch.rand(4), 0, zp.quint8),
        "empty": zp.quantize_per_tensor(torch.empty(0, 3), 0.1, 3, zp.quint8),
        "plain": values.t(),
        "number": 3,
        "text": "yes",
        "nothing": None,
    }
    checkpoint.save_file(state, path)
    found = checkpoint.load_file(path)
    assert set(found) == set(state)
    for name, value in state.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name
    plain = safetensors.load_file(path)
    assert torch.equal(plain["tensor"], state["tensor"].int_repr())
    assert plain["tensor_scale"].item() == 0.1


def test_a_model_keeps_its_versions_and_is_described(path: Path) -> None:
    model = quantize_dynamic(nn.Sequential(OrderedDict(first=nn.Linear(3, 4), norm=nn.BatchNorm1d(4))))
    checkpoint.save_file(model, path, {"author": "somebody"})
    found = checkpoint.load_file(path)
    assert found._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    described = checkpoint.read_facts(path)["modules"]["first"]
    assert described["class"] == "zeropoint.ao.nn.quantized.dynamic.linear.Linear"
    assert "in_features=3, out_features=4" in described["arguments"]
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["author"] == "somebody"


def test_tied_weights_are_written_once_and_tied_again(path: Path) -> None:
    first, second = nnq.Linear(4, 4), nnq.Linear(4, 4)
    first.set_weight_bias(zp.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, zp.qint8), torch.randn(4))
    second._buffers["weight"] = first._buffers["weight"]
    model = nn.Sequential(first, second)
    checkpoint.save_file(model, path)
    assert "1.weight" not in safetensors.load_file(path)
    found = checkpoint.load_file(path)
    assert found["1.weight"] is found["0.weight"]
    fresh = nn.Sequential(nnq.Linear(4, 4), nnq.Linear(4, 4))
    fresh.load_state_dict(found)
    x = zp.quantize_per_tensor(torch.randn(2, 4), 0.1, 0, zp.qint8)
    assert torch.equal(fresh(x), model(x))


def test_tensors_that_overlap_are_written_whole(path: Path) -> None:
    base = torch.arange(6.0)
    checkpoint.save_file({"head": base[:4], "tail": base[2:], "all": base}, path)
    found = checkpoint.load_file(path)
    assert found["head"].tolist() == [0, 1, 2, 3]
    assert found["tail"].tolist() == [2, 3, 4, 5]
    assert found["all"].tolist() == [0, 1, 2, 3, 4, 5]


def test_what_cannot_be_written(path: Path) -> None:
    with pytest.raises(TypeError, match="'module' is a Linear"):
        checkpoint.save_file({"module": nn.Linear(1, 1)}, path)
    with pytest.raises(TypeError, match="names are texts"):
        checkpoint.save_file({1: torch.ones(1)}, path)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="metadata maps texts to texts"):
        checkpoint.save_file({}, path, {"n": 1})  # type: ignore[dict-item]
    q = zp.quantize_per_tensor(torch.ones(1), 0.1, 0, zp.qint8)
    with pytest.raises(ValueError, match="'w_scale' is both"):
        checkpoint.save_file({"w_scale": torch.ones(1), "w": q}, path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ("not json", "damaged"),
        ("[" * 100_000, "damaged"),
        ("[]", "damaged"),
        ({"format": 99}, "later version"),
        ({"format": 1, "tensors": []}, "no table"),
        ({"format": 1, "tensors": {"x": {"dtype": "qint8"}}}, "'x' is not whole"),
        ({"format": 1, "tensors": {"w": {"dtype": "quint8", "axis": None}}}, "does not fit"),
        ({"format": 1, "tensors": {"w": {"dtype": "float", "axis": None}}}, "expected a quantized dtype"),
        ({"format": 1, "tensors": {"w": {"dtype": "qint8", "axis": 5}}}, "axis 5 is out of range"),
        ({"format": 1, "tensors": {"w": {"dtype": "qint8", "axis": "a"}}}, "does not fit"),
        ({"format": 1, "aliases": {"y": "z"}}, "not in the file"),
        ({"format": 1, "aliases": {"y": ["w"]}}, "not in the file"),
    ],
    ids=str,
)
def test_damaged_facts(path: Path, facts: object, text: str) -> None:
    tensors = {"w": torch.ones(2, dtype=torch.int8), "w_scale": torch.ones(2), "w_zero_point": torch.zeros(2).int()}
    safetensors.save_file(tensors, path, {"zeropoint": facts if isinstance(facts, str) else json.dumps(facts)})
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load_file(path)


def test_damaged_files(path: Path) -> None:
    path.write_bytes(b"nonsense" * 10)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        checkpoint.load_file(path)
    with pytest.raises(FileNotFoundError):
        checkpoint.load_file(path.with_name("nothing"))


def test_files_of_other_programs(path: Path) -> None:
    safetensors.save_file({"a": torch.ones(2)}, path)
    assert list(checkpoint.load_file(path)) == ["a"]
    assert checkpoint.read_facts(path) == {}


# --- conversion ---------------------------------------------------------------------------------------------------


def test_an_old_checkpoint_converted(path: Path) -> None:
    summary = checkpoint.convert_file(FIXTURES / "static.pt", path)
    assert summary.modules == {
        "1": "convolution, per channel",
        "3": "convolution, per channel",
        "5": "Linear, per channel",
    }
    assert not summary.left
    assert str(summary).startswith("3 packed modules, 0 quantized tensors")
    one = checkpoint.ConversionSummary(["a"], {"b": ""}, {"c": ""}, {"d": ""})
    assert str(one).startswith("1 packed module, 1 quantized tensor, 1 plain tensor converted; 1 entry left\n")
    found = checkpoint.load_file(path)
    assert found["5.weight"].dtype == torch.int8
    assert found["5.weight_scale"].shape == (5,)


def test_recurrent_layers_and_embeddings_converted(path: Path) -> None:
    summary = checkpoint.convert_file(FIXTURES / "dynamic.pt", path)
    assert summary.left == {"epoch": "beside the state dict"}
    found = checkpoint.load_file(path)
    cell = checkpoint.load(FIXTURES / "dynamic.pt")["state_dict"]["lstm._all_weight_values.1.param"].cell()
    for part, value in cell.items():
        assert torch.equal(found[f"lstm._all_weight_values.1.param.{part}"], value)
    assert found["cell.weight_ih"].dtype == zp.qint8
    assert found["cell.bias_hh"].shape == (12,)
    summary = checkpoint.convert_file(FIXTURES / "embedding.pt", path, key="bag")
    assert summary.modules == {"": "Embedding, one grid a row"}
    assert checkpoint.load_file(path)["weight"].shape == (6, 8)


def test_where_the_state_dict_is(path: Path, tmp_path: Path) -> None:
    weights = {"w": torch.ones(2)}
    for name, held in {"one": {"epoch": 3, "net": weights}, "two": {"a": weights, "b": weights}, "list": [1]}.items():
        torch.save(held, tmp_path / f"{name}.pt")
    assert checkpoint.convert_file(tmp_path / "one.pt", path).left == {"epoch": "beside the state dict"}
    assert list(checkpoint.load_file(path)) == ["w"]
    with pytest.raises(CheckpointError, match=r"2 state dicts \(a, b\)"):
        checkpoint.convert_file(tmp_path / "two.pt", path)
    checkpoint.convert_file(tmp_path / "two.pt", path, key="b")
    with pytest.raises(CheckpointError, match="no 'c'; at 'c' it has: a, b"):
        checkpoint.convert_file(tmp_path / "two.pt", path, key="c")
    with pytest.raises(CheckpointError, match="holds a list"):
        checkpoint.convert_file(tmp_path / "list.pt", path)


def test_the_command(path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    command = [cli.make_app(), ["convert-checkpoint", str(FIXTURES / "tensors.pt"), str(path)]]
    done = testing.CliRunner().invoke(*command)
    assert done.exit_code == 0, done.output
    assert "8 quantized tensors" in done.output
    assert "per_channel_affine_float_qparams" in done.output
    in_json = testing.CliRunner().invoke(command[0], [*command[1], "--overwrite", "--json"])
    said = json.loads(in_json.stdout)
    assert (len(said["quantized"]), said["bytes"]) == (8, path.stat().st_size)
    again = testing.CliRunner().invoke(*command)
    assert again.exit_code == 1
    assert "exists" in again.output
    damaged = path.with_name("damaged.pt")
    damaged.write_bytes(b"PK\x03\x04nonsense")
    refused = testing.CliRunner().invoke(command[0], ["convert-checkpoint", str(damaged), str(path), "--overwrite"])
    assert refused.exit_code == 1
    assert "damaged" in refused.output


def test_without_typer_the_command_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"pip install 'zeropoint\[cli\]'"):
        runpy.run_module("zeropoint", run_name="__main__")
