"""One call from a float model to a quantized one, to a file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint import checkpoint, recipe
from zeropoint.analysis import FloatIsland, find_fusable, output_sqnr
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import DeQuantStub, QuantStub


class Block(nn.Module):
    """A residual block without stubs, as a user has it; its rectifiers write into their input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.add = FloatFunctional()
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.conv(x)))
        return self.head(self.add.add(y, self.bn2(self.conv2(y))))


class Spectrum(nn.Module):
    """What cannot compute on codes: it stays float by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x**2 + 1)


@pytest.fixture
def model() -> nn.Module:
    block = Block()
    for _ in range(20):
        block(torch.randn(16, 3, 8, 8))
    return block.eval()


@pytest.fixture
def data() -> list[Tensor]:
    return [torch.randn(8, 3, 8, 8) for _ in range(4)]


def test_rows_to_fuse_are_found(model: nn.Module, data: list[Tensor]) -> None:
    assert find_fusable(model, data) == [["conv", "bn", "relu"], ["conv2", "bn2"]]
    assert model.relu.inplace
    model.extra = model.bn  # used by another name: still called once
    twice = nn.Sequential(nn.Conv2d(3, 3, 1), relu := nn.ReLU(), nn.Conv2d(3, 3, 1), relu).eval()
    assert find_fusable(twice, data) == []


@pytest.mark.parametrize("ending", [".pt", ".pth", ".safetensors"])
@pytest.mark.parametrize("method", ["static", "static, a layer in float", "dynamic"])
def test_a_file_brings_the_model_back(
    model: nn.Module, data: list[Tensor], tmp_path: Path, ending: str, method: str
) -> None:
    if ending == ".safetensors":
        pytest.importorskip("safetensors")
    if method == "dynamic":
        quantized = recipe.quantize_dynamic(model)
    else:
        kept = ["bn2", "head"] if "float" in method else []
        quantized = recipe.quantize_static(model, data, keep_float=kept)
        assert list(quantized.recipe.islands) == (["module.conv2", "module.head.2"] if kept else [])
    assert output_sqnr(model(data[0]), quantized.model(data[0])) > 18
    assert output_sqnr(model(data[0]), quantized.reference(data[0])) > 90
    recipe.save(quantized, tmp_path / f"model{ending}")
    again = recipe.load(Block(), tmp_path / f"model{ending}")
    assert torch.equal(again.model(data[1]), quantized.model(data[1]))
    assert again.recipe == quantized.recipe == recipe.read_recipe(tmp_path / f"model{ending}")
    assert [file.name for file in tmp_path.iterdir()] == [f"model{ending}"]


def test_what_cannot_compute_on_codes_comes_back_as_an_island(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Spectrum(), nn.Linear(8, 4)).eval()
    x = torch.randn(64, 8)
    quantized = recipe.quantize_static(model, x)
    assert isinstance(quantized.model.module[1], FloatIsland)
    assert quantized.model.quantization_summary.skipped["module.1"].before == "Spectrum"
    recipe.save(quantized, tmp_path / "m.pt")
    assert torch.equal(recipe.load(model, tmp_path / "m.pt").model(x), quantized.model(x))


def test_numbers_that_are_none_are_refused_but_masks_are_taken() -> None:
    model, nan = nn.Linear(4, 4), torch.full((2, 4), float("nan"))
    with pytest.raises(ValueError, match=r"batch 1 of the data, float32 \(2, 4\), holds 8 NaN and 0 infinities"):
        recipe.quantize_static(model, [torch.randn(2, 4), nan])
    with pytest.raises(ValueError, match="holds 0 NaN and 1 infinities among 2 values"):
        recipe.check_data(nn.Bilinear(1, 1, 1), [(torch.ones(2, 1), torch.tensor([[1.0], [float("inf")]]))])
    recipe.check_data(nn.Bilinear(1, 1, 1), [(torch.ones(2, 1), torch.tensor([[0.0], [float("-inf")]]))])


class Composed(nn.Module):
    """Layers that are taken apart to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("kept", ["lstm", "attention"])
def test_a_layer_that_is_taken_apart_is_kept_by_its_own_name(kept: str, tmp_path: Path) -> None:
    model, x = Composed().eval(), torch.randn(5, 2, 8)
    quantized = recipe.quantize_static(model, x, keep_float=[kept])
    assert quantized.recipe.islands
    assert all(name.startswith(f"module.{kept}.") for name in quantized.recipe.islands)
    recipe.save(quantized, tmp_path / "model.pt")
    assert torch.equal(recipe.load(Composed(), tmp_path / "model.pt").model(x), quantized.model(x))


def test_stubs_of_the_model_are_kept_and_named_arguments_taken() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
            self.add, self.fc = FloatFunctional(), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.dequant(self.fc(self.add.add(self.a(x), self.b(y))))

    quantized = recipe.quantize_static(Two(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)})
    assert not quantized.recipe.wrap
    with pytest.raises(ValueError, match="arithmetic"):
        recipe.quantize_static(Two(), [(torch.randn(8, 4), torch.randn(8, 4))], keep_float=["add"])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "no batch"),
        (torch.randn(2, 5, 8, 8), r"batch 0 .*float32 \(2, 5, 8, 8\), does not fit Block"),
        ([torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)], r"batch 1 .*float32 \(2, 1, 8, 8\), does not fit"),
        ([{"x": torch.randn(2, 3, 8, 8)}], "no single tensor"),
    ],
)
def test_data_that_does_not_fit(model: nn.Module, data: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        recipe.quantize_static(model, data)


def test_names_that_are_no_layers(model: nn.Module, data: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=r"no layer 'conv3'.*conv, "):
        recipe.quantize_static(model, data, keep_float=["conv3"])
    with pytest.raises(ValueError, match="no layer 'conv'"):
        recipe.quantize_dynamic(model, keep_float=["conv"])
    with pytest.raises(ValueError, match="no layer to quantize"):
        recipe.quantize_dynamic(model, keep_float=["head"])


def test_files_of_other_models(model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    recipe.save(recipe.quantize_static(model, data), tmp_path / "m.pt")
    with pytest.raises(ValueError, match="no module 'conv'"):
        recipe.load(nn.Sequential(nn.Linear(2, 2)), tmp_path / "m.pt")
    recipe.save(recipe.quantize_dynamic(nn.Sequential(nn.Linear(4, 4))), tmp_path / "n.pt")
    with pytest.raises(ValueError, match="belongs to another model"):
        recipe.load(nn.Sequential(nn.Linear(2, 2)), tmp_path / "n.pt")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    with pytest.raises(checkpoint.CheckpointError, match="does not say how"):
        recipe.load(model, tmp_path / "plain.pt")
    with pytest.raises(ValueError, match="must end in"):
        recipe.save(recipe.quantize_dynamic(model), tmp_path / "m.bin")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"method": "static", "fuse": [[1]]}', "[" * 100000])
def test_damaged_recipes(text: str) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="recipe is damaged"):
        recipe.Recipe.from_json(text)
