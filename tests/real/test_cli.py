"""Two networks from the shell, as a new user would do it, and what the files then hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zeropoint import recipe

for package in ("typer", "rich", "safetensors", "jinja2"):
    pytest.importorskip(package)

pytestmark = [pytest.mark.real, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = """
from networks import data, minilm

def batches():
    texts, _ = data.lee_documents()
    tokenize = minilm.tokenizer()
    return [dict(zip(("tokens", "mask"), tokenize(texts[i : i + 8]), strict=True)) for i in (0, 8)]
"""


def shell(*words: object) -> dict[str, Any]:
    """What a command in the folder of the examples prints, which must be JSON."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [sys.executable, "-m", "zeropoint", *map(str, words), "--json"]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_efficientnet(example: Callable[..., Any], tmp_path: Path) -> None:
    network = example("networks.efficientnet_lite0", "load")
    pictures, labels = example("networks.data", "imagenet_pictures")
    file, page = tmp_path / "efficientnet.safetensors", tmp_path / "efficientnet.html"
    data = ("--data", "networks.data:calibration_crops", "--batch-size", 16)
    facts = shell("quantize", "networks.efficientnet_lite0:load", *data, "--batches", 2, "-o", file, "--report", page)
    assert len(facts["fused"]) == len(network.fuse_lists()) == 49
    assert facts["left_in_float"] == []
    assert facts["bytes"] < 0.3 * facts["float_bytes"]
    assert facts["output_sqnr_db"] > 14
    assert "EfficientNetLite0: what quantization cost" in page.read_text()
    loaded = recipe.load(network, file)
    with torch.inference_mode():
        assert int((loaded.model(pictures).argmax(1) == labels).sum()) >= 17
    shown = shell("inspect", file)
    assert shown["quantized_tensors"] == 50  # 49 convolutions and the linear layer
    assert shown["recipe"]["settings"] == {"observer": "histogram", "weights": "one grid a channel"}
    times = shell("bench", "networks.efficientnet_lite0:load", *data, "--checkpoint", file, "--seconds", 0.2)
    assert {row["model"] for row in times["rows"]} >= {"float", "quantized"}


def test_minilm(example: Callable[..., Any], tmp_path: Path) -> None:
    network = example("networks.minilm", "load")
    texts, _ = example("networks.data", "lee_documents")
    (tmp_path / "texts.py").write_text(TEXTS)
    file, page = tmp_path / "minilm.safetensors", tmp_path / "minilm.html"
    words = ("--method", "dynamic", "--data", f"{tmp_path / 'texts.py'}:batches", "-o", file, "--report", page)
    facts = shell("quantize", "networks.minilm:load", *words)
    assert len([after for _, _, after in facts["quantized"] if after == "DynamicQuantizedLinear"]) == 36
    assert facts["bytes"] < 0.7 * facts["float_bytes"]
    assert "MiniLM: what quantization cost" in page.read_text()
    wanted = example("networks.minilm", "embed", network, texts[:16])
    got = example("networks.minilm", "embed", recipe.load(network, file).model, texts[:16])
    assert float((wanted * got).sum(1).mean()) > 0.98
