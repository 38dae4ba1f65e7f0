"""Every module, by every way of saving it: the same output to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint import QTensor, checkpoint

from .module_examples import classes, examples, used

EXAMPLES = examples()
Way = Callable[[nn.Module, nn.Module, Path], nn.Module]
"""From a module and a fresh one of the same arguments to one that should compute as the first does."""

WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


@way
def state_dict(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    fresh.load_state_dict(module.state_dict())
    return fresh


@way
def assigned_state_dict(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    fresh.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    return fresh


@way
def not_strict(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    found = fresh.load_state_dict({**module.state_dict(), "unknown": torch.ones(1)}, strict=False)
    assert found.unexpected_keys == ["unknown"]
    assert not found.missing_keys
    return fresh


@way
def weights_only_file(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    fresh.load_state_dict(torch.load(saved(module.state_dict()), weights_only=True))
    return fresh


@way
def mapped_file(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    torch.save(module.state_dict(), folder / "weights.pt")
    fresh.load_state_dict(torch.load(folder / "weights.pt", mmap=True, weights_only=True), assign=True)
    return fresh


@way
def stream(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    file = saved(module.state_dict(), _use_new_zipfile_serialization=False)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


@way
def own_reader(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    fresh.load_state_dict(checkpoint.load(saved(module.state_dict())))
    return fresh


@way
def own_reader_of_a_whole_module(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    fresh.load_state_dict(checkpoint.load(saved(module)).state_dict())
    return fresh


@way
def whole_module(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    with zp.serialization.safe_globals():
        loaded: nn.Module = torch.load(saved(module), weights_only=True)
    return loaded


@way
def whole_module_in_a_stream(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    loaded: nn.Module = torch.load(saved(module, _use_new_zipfile_serialization=False), weights_only=False)
    return loaded


@way
def safetensors(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    pytest.importorskip("safetensors")
    checkpoint.save_file(module, folder / "weights.safetensors")
    fresh.load_state_dict(checkpoint.load_file(folder / "weights.safetensors"))
    return fresh


@way
def deep_copy(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    return copy.deepcopy(module)


@way
def pickled(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(module))
    return loaded


@way
def from_meta(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    """Made without memory, filled from a file: how large models are loaded."""
    fresh = fresh.to("meta")
    fresh.load_state_dict(checkpoint.load(saved(module.state_dict())), assign=True)
    return fresh


@way
def there_and_back(module: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    """Another device, where there is one."""
    moved = copy.deepcopy(module)
    if torch.cuda.is_available():
        moved = moved.cuda()
        file = saved(moved.state_dict())
        fresh.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return fresh
    return moved.to("cpu")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, QTensor) != isinstance(b, QTensor):
        return False
    return torch.equal(a, b)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("saving", WAYS)
def test_outputs_are_equal_to_the_bit(name: str, saving: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    module = used(example)
    inputs = example.inputs()
    with torch.no_grad():
        expected = example.call(module, *inputs)
        restored = WAYS[saving](module, example.make().eval(), tmp_path)
        assert same(example.call(restored, *inputs), expected)
        assert same(example.call(module, *inputs), expected)


def test_every_module_has_an_example() -> None:
    missing = [f"{package}.{name}" for package, name, _ in classes() if f"{package}.{name}" not in EXAMPLES]
    assert not missing, "add an example to module_examples.py"


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The buffers with int8 codes."""
    persistent = module.state_dict().keys()
    return {name: b for name, b in module.named_buffers() if b.dtype == torch.int8 and name in persistent and b.dim()}


WEIGHTED = [name for name, example in EXAMPLES.items() if weights(example.make())]


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_state_is_flat_plain_tensors_without_caches(name: str) -> None:
    module = used(EXAMPLES[name])
    for key, value in module.state_dict().items():
        assert type(value) is Tensor, key
        assert "packed" not in key
    state = checkpoint.load(saved(module).getvalue()).state
    for cache in state["_non_persistent_buffers_set"]:
        assert state["_buffers"][cache] is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", WEIGHTED)
def test_a_stale_cache_is_impossible(name: str, mode: Any) -> None:
    example = EXAMPLES[name]
    with mode():
        module = used(example)
        inputs = example.inputs()
        before = example.call(module, *inputs)
        for codes in weights(module).values():
            codes.neg_()
        if hasattr(module, "scale"):
            module._buffers["scale"].mul_(2)  # type: ignore[union-attr]
        after = example.call(module, *inputs)
        assert not same(after, before)
    fresh = example.make()
    fresh.load_state_dict(module.state_dict())
    assert same(after, example.call(fresh, *inputs))


@pytest.mark.parametrize("name", WEIGHTED)
def test_tied_weights_stay_tied(name: str) -> None:
    first = used(EXAMPLES[name])
    model = nn.ModuleList([first, first])
    with zp.serialization.safe_globals():
        loaded = torch.load(saved(model), weights_only=True)
    assert loaded[0] is loaded[1]
    copied = copy.deepcopy(model)
    assert copied[0] is copied[1]
    found = torch.load(saved(model.state_dict()), weights_only=True)
    for key in weights(first):
        assert found[f"0.{key}"].data_ptr() == found[f"1.{key}"].data_ptr()


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("strict", [True, False])
def test_float_weights_are_refused(name: str, strict: bool) -> None:
    """Copied into codes they would be cut to whole numbers."""
    module = used(EXAMPLES[name])
    key, codes = next(iter(weights(module).items()))
    before = codes.clone()
    with pytest.raises(TypeError, match=r"is torch\.float32, and a quantized .* loads int8 codes"):
        module.load_state_dict({**module.state_dict(), key: before.float()}, strict=strict)
    assert torch.equal(module.state_dict()[key], before)


def test_versions_may_be_missing() -> None:
    """Files from before modules had versions, or through tools that drop them."""
    for name in WEIGHTED:
        module = used(EXAMPLES[name])
        plain = dict(module.state_dict())
        fresh = EXAMPLES[name].make()
        fresh.load_state_dict(plain)
        inputs = EXAMPLES[name].inputs()
        assert same(EXAMPLES[name].call(fresh, *inputs), EXAMPLES[name].call(module, *inputs))
