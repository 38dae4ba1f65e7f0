"""Whole converted networks through the kernels: the codes that the CPU backend gives, in every layer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint import QTensor, backends

pytestmark = [pytest.mark.real, pytest.mark.slow]
EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture
def example() -> Iterator[Any]:
    """Imports a module of ``examples``; a missing package skips the test."""
    sys.path.insert(0, EXAMPLES)

    def load(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            pytest.skip(f"{error}: pip install --no-deps -r examples/requirements.txt")

    yield load
    sys.path.remove(EXAMPLES)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest, triton: Any) -> str:
    if request.param == "cuda" and (not torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU that torch sees, and no TRITON_INTERPRET")
    if request.param == "interpreter" and not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1 before triton is imported")
    return str(request.param)


def layers(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output of every layer, as codes where there are some."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen[name] = (output.int_repr() if isinstance(output, QTensor) else output).cpu().clone()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in network.named_modules()]
    with torch.no_grad():
        network(x)
    for hook in hooks:
        hook.remove()
    return seen


def there(network: nn.Module, x: Tensor, place: str) -> dict[str, Tensor]:
    if place == "cuda":
        return layers(network.cuda(), x.cuda())
    with backends.triton.interpreter():
        return layers(network, x)


def assert_equal_layers(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def test_efficientnet_lite0(example: Any, place: str) -> None:
    pictures = nn.functional.interpolate(example("networks.data").calibration_crops(2), size=(64, 64))
    network = example("imagenet").quantize_static(example("networks.efficientnet_lite0").load(), pictures)
    x = nn.functional.interpolate(pictures[:1], size=(32, 32))
    wanted = layers(network, x)
    assert len(wanted) > 200
    assert_equal_layers(there(network, x, place), wanted)


def test_minilm(example: Any, place: str) -> None:
    if place == "cuda":
        pytest.skip("its float layers sum in another order on a GPU, and dynamic grids follow them")
    network = example("imagenet").quantize_dynamic(example("networks.minilm").load())
    texts = ["a cat sat on the mat", "dogs"]
    embed = example("networks.minilm").embed
    with torch.no_grad():
        wanted = embed(network, texts)
        with backends.triton.interpreter():
            got = embed(network, texts)
    assert wanted.shape == (2, 384)
    assert torch.equal(got, wanted)
