"""EfficientNet-Lite0 with trained weights through the whole static workflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint import QTensor

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def float_network(example: Callable[..., Any]) -> nn.Module:
    return example("networks.efficientnet_lite0", "load")


@pytest.fixture(scope="module")
def pictures(example: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    return example("networks.data", "imagenet_pictures")


@pytest.fixture(scope="module")
def int8_network(example: Callable[..., Any], float_network: nn.Module) -> nn.Module:
    calibration = example("networks.data", "calibration_crops", 32)
    return example("imagenet", "quantize_static", float_network, calibration)


@torch.inference_mode()
def logits(network: Any, x: Tensor) -> Tensor:
    return torch.cat([network(batch) for batch in x.split(20)])


def test_float_network_is_the_published_one(float_network: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x, labels = pictures
    assert int((logits(float_network, x).argmax(1) == labels).sum()) == 18
    assert sum(p.numel() for p in float_network.parameters()) == 4_652_008


def test_int8_names_the_pictures_as_float_does(
    int8_network: nn.Module, float_network: nn.Module, pictures: tuple[Tensor, Tensor]
) -> None:
    x, labels = pictures
    named = logits(int8_network, x).argmax(1)
    assert int((named == labels).sum()) >= 17
    assert int((named == logits(float_network, x).argmax(1)).sum()) >= 18


def test_int8_is_close_to_float_on_other_crops(
    int8_network: nn.Module, float_network: nn.Module, example: Callable[..., Any]
) -> None:
    crops = example("networks.data", "other_crops", 3)
    wanted, got = logits(float_network, crops), logits(int8_network, crops)
    assert float((wanted.argmax(1) == got.argmax(1)).double().mean()) >= 0.92
    assert example("networks.measure", "sqnr", wanted, got) >= 15.0


def test_every_layer_became_an_integer_one(int8_network: nn.Module) -> None:
    left = [name for name, m in int8_network.named_modules() if type(m) in (nn.Conv2d, nn.Linear, nn.BatchNorm2d)]
    assert left == []
    convolutions = [m for m in int8_network.modules() if hasattr(m, "weight") and m.weight.dim() == 4]
    assert len(convolutions) == 49


def test_native_and_reference_give_the_same_codes_in_every_block(
    int8_network: nn.Module, pictures: tuple[Tensor, Tensor], reference_backend: Any
) -> None:
    def codes(x: Tensor) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                if isinstance(output, QTensor):
                    seen[name] = output.int_repr().clone()

            return hook

        handles = [m.register_forward_hook(keep(name)) for name, m in int8_network.named_modules() if name]
        int8_network(x)
        for handle in handles:
            handle.remove()
        return seen

    with torch.inference_mode():
        native = codes(pictures[0][:1])
        with reference_backend:
            reference = codes(pictures[0][:1])
    assert len(native) > 60
    assert native.keys() == reference.keys()
    assert [name for name in native if not torch.equal(native[name], reference[name])] == []


def test_state_dict_is_small_and_restores_the_network(
    int8_network: nn.Module, pictures: tuple[Tensor, Tensor], example: Callable[..., Any], tmp_path: Any
) -> None:
    torch.save(int8_network.state_dict(), tmp_path / "int8.pt")
    assert (tmp_path / "int8.pt").stat().st_size < 5.5e6
    x = pictures[0][:2]
    other = example("imagenet", "quantize_static", example("networks.efficientnet_lite0", "load"), x)
    other.load_state_dict(torch.load(tmp_path / "int8.pt", weights_only=True))
    assert torch.equal(logits(other, x), logits(int8_network, x))


def test_compiled_network_gives_the_eager_integers(int8_network: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x = pictures[0][:2]
    compiled = torch.compile(int8_network, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), int8_network(x))


def test_exported_network_gives_the_eager_integers(int8_network: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x = pictures[0][:2]
    with torch.no_grad():
        exported = torch.export.export(int8_network, (x,)).module()
        assert torch.equal(exported(x), int8_network(x))
