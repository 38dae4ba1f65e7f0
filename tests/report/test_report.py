"""The report: what it says, in three formats, and what it leaves behind when it fails."""

from __future__ import annotations

import builtins
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint import report
from zeropoint.analysis import sensitivity
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    get_default_qconfig,
    prepare,
    quantize_dynamic,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.after = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.dequant(self.last(self.first(self.quant(x)))))[0]


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    floating, x = Net().eval(), torch.randn(32, 8)
    floating.after.qconfig = None
    floating.qconfig = get_default_qconfig()
    prepared = prepare(floating)
    prepared(x)
    return convert(prepared), floating, x


def test_what_is_measured(pair: tuple[nn.Module, nn.Module, Tensor]) -> None:
    found = report.collect(*pair)
    assert [layer.name for layer in found.layers if layer.weight] == ["first", "last"]
    assert found.output > 20
    first = next(layer for layer in found.layers if layer.name == "first")
    assert first.milliseconds is not None
    assert first.size == 8 * 16 + 16 * (4 + 4 + 4) + 8 + 1  # codes; scales, zero points, biases; the output's grid
    assert first.weight_histogram is not None
    assert sum(first.weight_histogram.counts) == 8 * 16
    assert first.activation_histogram is not None
    assert sum(first.activation_histogram.counts) == 32 * 16
    assert [name for name, _, _ in found.skipped] == ["after"]


def test_json_is_json(pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path) -> None:
    found = report.write(*pair, tmp_path / "r.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert read["layers"][1]["name"] == found.layers[1].name
    assert read["skipped"] == [list(row) for row in found.skipped]


def test_markdown_names_layers_and_reasons(pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path) -> None:
    found = report.write(*pair, tmp_path / "r.md", title="A net")
    text = (tmp_path / "r.md").read_text()
    assert text.startswith("# A net: what quantization cost\n")
    assert "| first | QuantizedLinear |" in text
    assert f"| after | LSTM | {found.skipped[0][2]} |" in text


def test_the_page_is_whole_and_needs_no_network(pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    model, floating, x = pair
    ranking = sensitivity(floating, x, progress=False)
    report.write(model, floating, list(x.split(16)), tmp_path / "r.html", sensitivity=ranking, title="<A&B>")
    page = (tmp_path / "r.html").read_text()
    assert "<h1>&lt;A&amp;B&gt;: what quantization cost</h1>" in page
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)
    assert page.count("<svg") == page.count("</svg>") >= 4
    assert "prefers-color-scheme: dark" in page
    assert "it alone in float" in page
    assert "nan" not in re.sub(r"<[^>]*>", "", page).lower().split()


def test_dynamic_models_and_named_arguments(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 2)

        def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
            return {"y": self.fc(x + shift)}

    model = Two().train()
    found = report.write(
        quantize_dynamic(model), model, [{"x": torch.randn(4, 8), "shift": torch.ones(8)}], tmp_path / "r.md"
    )
    assert [layer.name for layer in found.layers] == ["fc"]
    assert model.training


@pytest.mark.parametrize("name", ["report.pdf", "report"])
def test_another_ending(pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"must end in \.html, \.md or \.json, got '{name}'"):
        report.write(*pair, tmp_path / name)


def test_what_fails_leaves_nothing(pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        report.write(*pair, tmp_path / "missing" / "r.md")
    _, floating, x = pair
    with pytest.raises(ValueError, match="no quantized layer"):
        report.write(floating, floating, x, tmp_path / "r.md")
    assert list(tmp_path.iterdir()) == []


def test_without_jinja2(
    pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"zeropoint\[report\]"):
        report.write(*pair, tmp_path / "r.html")
    report.write(*pair, tmp_path / "r.md")


@pytest.mark.parametrize(("seconds", "calls_at_once"), [(0.0, 2), (1e9, 200)])
def test_the_time_of_a_call_is_the_best_of_many(
    monkeypatch: pytest.MonkeyPatch, seconds: float, calls_at_once: int
) -> None:
    from zeropoint.report import _collect

    calls: list[str] = []

    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(self._get_name())
            return x

    class Other(Counted):
        pass

    monkeypatch.setattr(_collect, "SECONDS", seconds)
    _collect._times((Counted(), Other()), torch.ones(1))
    one, other = ["Counted"] * calls_at_once, ["Other"] * calls_at_once
    assert calls == (one + other) * _collect.ROUNDS


def test_what_the_ranking_leaves_out_is_named(pair: tuple[nn.Module, nn.Module, Tensor], tmp_path: Path) -> None:
    ranking = sensitivity(pair[1], pair[2], progress=False)
    assert ranking.skipped == (("after", "LSTM"),)
    for ending in ("md", "html") if find_spec("jinja2") else ("md",):
        report.write(*pair, tmp_path / f"page.{ending}", sensitivity=ranking)
        assert "and so not measured: after (LSTM)." in (tmp_path / f"page.{ending}").read_text(encoding="utf-8")
