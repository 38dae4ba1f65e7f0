"""Writes the files in ``fixtures/`` with torch 2.13's ``torch.ao``: what users have, with what it computed.

    python tests/checkpoint/make_fixtures.py

The tests only read the files, so they need neither ``torch.ao`` nor torch's quantized dtypes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

warnings.simplefilter("ignore")

import torch.ao.nn.quantized as nnq  # noqa: E402
import torch.ao.quantization as tq  # noqa: E402

FOLDER = Path(__file__).parent / "fixtures"


def write(name: str, value: Any) -> None:
    torch.save(value, FOLDER / f"{name}.pt")
    torch.save(value, FOLDER / f"{name}_legacy.pt", _use_new_zipfile_serialization=False)


def facts(q: Tensor) -> dict[str, Any]:
    """A quantized tensor in plain tensors."""
    known: dict[str, Any] = {"values": q.dequantize(), "stride": list(q.stride()), "offset": q.storage_offset()}
    if q.dtype != torch.quint4x2:
        known["codes"] = q.int_repr()
    return known


def tensors() -> dict[str, Any]:
    values = torch.randn(4, 6)
    whole = torch.quantize_per_tensor(values, 0.05, 3, torch.quint8)
    held = {
        "whole": whole,
        "transposed": whole.t(),
        "part": whole[1:, 2:5],
        "signed": torch.quantize_per_tensor(values, 0.02, -7, torch.qint8),
        "wide": torch.quantize_per_tensor(values, 1e-6, 0, torch.qint32),
        "channels": torch.quantize_per_channel(values, torch.rand(6) + 0.01, torch.arange(6), 1, torch.qint8),
        "floating": torch.quantize_per_channel(values, torch.rand(4) + 0.01, torch.rand(4) * 9, 0, torch.quint8),
        "four_bits": torch.quantize_per_channel(values, torch.rand(4) + 0.2, torch.rand(4) * 9, 0, torch.quint4x2),
    }
    write("tensors", held)
    return {name: facts(q) for name, q in held.items()}


def static() -> dict[str, Any]:
    model = nn.Sequential(
        tq.QuantStub(),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(64, 5),
        tq.DeQuantStub(),
    ).eval()
    tq.fuse_modules(model, [["1", "2"]], inplace=True)
    model.qconfig = tq.get_default_qconfig("x86")
    tq.prepare(model, inplace=True)
    for _ in range(4):
        model(torch.randn(3, 2, 6, 6))
    tq.convert(model, inplace=True)
    write("static", model.state_dict())
    torch.save(model, FOLDER / "static_whole.pt")  # as a stream it would hold the source code of every class
    x = torch.randn(3, 2, 6, 6)
    return {"input": x, "output": model(x), "step": torch.tensor(model[5].scale)}


class Tagger(nn.Module):
    """A small recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(10, 4)
        self.cell = nn.LSTMCell(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(self.lstm(x)[0])
        return self.head(self.cell(y[-1])[0])


def dynamic() -> dict[str, Any]:
    model = tq.quantize_dynamic(Tagger().eval(), {nn.LSTM, nn.GRU, nn.LSTMCell, nn.Linear}, dtype=torch.qint8)
    write("dynamic", {"epoch": 3, "state_dict": model.state_dict()})
    x = torch.randn(7, 2, 6)
    known: dict[str, Any] = {"input": x, "output": model(x), "lstm": model.lstm(x)[0]}
    known["gru"] = model.gru(known["lstm"])[0]
    known["linear_input"] = torch.randn(4, 3)
    known["linear"] = model.head(known["linear_input"])
    return known


def embeddings() -> dict[str, Any]:
    one, bag = nnq.Embedding(6, 8), nnq.EmbeddingBag(6, 8, dtype=torch.quint4x2, include_last_offset=False)
    for module, dtype in ((one, torch.quint8), (bag, torch.quint4x2)):
        observer = tq.PerChannelMinMaxObserver(
            dtype=dtype,
            qscheme=torch.per_channel_affine_float_qparams,
            ch_axis=0,
            **({} if dtype == torch.quint8 else {"quant_min": 0, "quant_max": 15}),
        )
        weight = torch.randn(6, 8)
        observer(weight)
        scales, zero_points = observer.calculate_qparams()
        module.set_weight(torch.quantize_per_channel(weight, scales, zero_points, 0, dtype))
    write("embedding", {"one": one.state_dict(), "bag": bag.state_dict()})
    index, offsets = torch.tensor([0, 5, 3, 3, 1]), torch.tensor([0, 2])
    return {"index": index, "offsets": offsets, "one": one(index), "bag": bag(index, offsets)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    torch.backends.quantized.engine = "x86"
    expected = {"tensors": tensors(), "static": static(), "dynamic": dynamic(), "embedding": embeddings()}
    torch.save(expected, FOLDER / "expected.pt")


if __name__ == "__main__":
    main()
