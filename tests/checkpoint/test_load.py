"""What comes back from files: values, grids, strides, sharing, devices."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint import QTensor, checkpoint

Save = Callable[[Any], bytes]


@pytest.fixture(params=["zip", "stream"])
def save(request: pytest.FixtureRequest) -> Save:
    def write(value: Any) -> bytes:
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=request.param == "zip")
        return file.getvalue()

    return write


def quantized(kind: str) -> QTensor:
    values = torch.randn(4, 6)
    scales, zeros = torch.rand(6) + 0.1, torch.arange(6)
    if kind == "tensor":
        return zp.quantize_per_tensor(values, 0.1, 3, zp.quint8)
    if kind == "channel":
        return zp.quantize_per_channel(values, scales, zeros, 1, zp.qint8)
    return zp.quantize_per_channel(values, scales, zeros + 0.5, 1, zp.quint8)


@pytest.mark.parametrize("kind", ["tensor", "channel", "floating"])
@pytest.mark.parametrize("loader", ["torch", "own"])
def test_quantized_tensors_of_this_package(save: Save, kind: str, loader: str) -> None:
    q = quantized(kind)
    held = {"q": q, "t": q.t(), "part": q[1:, 2:5]}
    data = save(held)
    found = torch.load(io.BytesIO(data), weights_only=True) if loader == "torch" else checkpoint.load(data)
    for name, before in held.items():
        after = found[name]
        assert torch.equal(after, before), name
        assert after.stride() == before.stride()
        assert after.storage_offset() == before.storage_offset()
    assert len({part.untyped_storage().data_ptr() for part in found.values()}) == 1


def test_plain_objects(save: Save) -> None:
    held = {
        "numbers": [1, -(2**40), 2.5, True, None, "text", b"bytes"],
        "set": {1, 2},
        "numpy": np.float64(0.75),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scheme": zp.QScheme.per_tensor_affine.name,
        "parameter": nn.Parameter(torch.ones(2)),
        "half": torch.ones(2, dtype=torch.float16),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1).expand(1000),
    }
    found = checkpoint.load(save(held))
    assert list(found) == list(held)
    for name, value in held.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value)
            assert found[name].dtype == value.dtype
            assert found[name].requires_grad == value.requires_grad
        else:
            assert found[name] == value
    assert isinstance(found["parameter"], nn.Parameter)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol: int) -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(3), "long": "x" * 300}, file, pickle_protocol=protocol)
    assert checkpoint.load(file.getvalue())["a"].tolist() == [0, 1, 2]


def test_dtypes_without_a_storage_class_of_their_own() -> None:
    file = io.BytesIO()
    torch.save({"wide": torch.tensor([0, 1, 2], dtype=torch.uint16)}, file)
    assert checkpoint.load(file.getvalue())["wide"].tolist() == [0, 1, 2]


def test_files_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        file = io.BytesIO()
        torch.save(torch.arange(3), file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert checkpoint.load(file.getvalue()).tolist() == [0, 1, 2]


def test_paths_open_files_and_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"q": quantized("channel"), "empty": torch.empty(0)}, path)
    before = path.read_bytes()
    from_path = checkpoint.load(path)["q"]
    with path.open("rb") as file:
        assert torch.equal(checkpoint.load(file)["q"], from_path)
    mapped = checkpoint.load(path, mmap=True)["q"]
    assert torch.equal(mapped, from_path)
    mapped.codes().fill_(1)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="mmap=True needs a path"):
        checkpoint.load(before, mmap=True)
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "nothing.pt")
    with pytest.raises(TypeError, match="a path, an open binary file or bytes"):
        checkpoint.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tensor", "channel", "floating"])
def test_map_location_moves_codes_and_grid(save: Save, kind: str) -> None:
    data = save({"q": quantized(kind)})
    for location in ("meta", torch.device("meta"), {"cpu": "meta"}, lambda saved: "meta"):
        try:
            q = checkpoint.load(data, map_location=location)["q"]
        except checkpoint.CheckpointError:
            assert kind != "tensor"  # the grid of channels is checked, which meta tensors do not allow
        else:
            assert q.device.type == "meta"
    assert checkpoint.load(data, map_location=None)["q"].device.type == "cpu"
    with pytest.raises(RuntimeError):
        checkpoint.load(data, map_location="nowhere")


def test_a_whole_module_is_read_as_a_record_with_its_state_dict(save: Save) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    record = checkpoint.load(save(model))
    found = record.state_dict()
    assert list(found) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value)
    assert repr(record) == "SavedModule('torch.nn.modules.container.Sequential')"


def test_multiprocessing() -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    sent = [quantized(kind) for kind in ("tensor", "channel", "floating")]
    process = context.Process(target=_send_back, args=(queue, sent))
    process.start()
    results = queue.get()
    process.join()
    assert process.exitcode == 0
    for before, values in zip(sent, results, strict=True):
        assert torch.equal(before.dequantize(), torch.tensor(values))


def _send_back(queue: Any, received: list[QTensor]) -> None:
    queue.put([q.dequantize().tolist() for q in received])
