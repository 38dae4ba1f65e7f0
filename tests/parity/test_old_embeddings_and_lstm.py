"""A state dict that torch.ao wrote of embeddings, an LSTM and a linear layer loads into ours and computes the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
import zeropoint.ao.quantization as zp_quantization

torch_quantization = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(20, 8), nn.EmbeddingBag(20, 8, mode="sum")
        self.lstm, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, words: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.lstm(self.words(words))[0]), self.bags(words.flatten(), offsets)


def quantized(model: nn.Module, side: ModuleType) -> nn.Module:
    rows, dynamic = side.float_qparams_weight_only_qconfig, side.default_dynamic_qconfig
    return side.quantize_dynamic(
        model.eval(), {nn.Embedding: rows, nn.EmbeddingBag: rows, nn.LSTM: dynamic, nn.Linear: dynamic}
    )


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "stream"])
def test_an_old_state_dict_loads_and_computes_the_same(tmp_path: Path, zip_format: bool) -> None:
    old = quantized(Words(), torch_quantization)
    torch.save(old.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=zip_format)
    new = quantized(Words(), zp_quantization)
    new.load_state_dict(zp.checkpoint.load(tmp_path / "old.pt"))
    words, offsets = torch.randint(0, 20, (2, 5)), torch.tensor([0, 3, 3])
    with torch.no_grad():
        (states, bags), (old_states, old_bags) = new(words, offsets), old(words, offsets)
    assert (new.words(words) - old.words(words)).abs().max() < 1e-6
    assert (bags - old_bags).abs().max() < 1e-6
    assert (states - old_states).abs().max() < 2**-6  # torch.ao quantizes the state to seven bits at each step
