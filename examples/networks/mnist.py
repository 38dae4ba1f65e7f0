"""A small convolutional network for handwritten digits with trained weights, written for eager quantization.

The digits to try it on are scikit-learn's, 8x8 and from other writers than it was trained on: enlarged, they are hard.
"""

from __future__ import annotations

import gzip

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks.data import package_file
from zeropoint.ao.quantization import DeQuantStub, QuantStub

__all__ = ["DigitNetwork", "digits", "load"]


class DigitNetwork(nn.Module):
    """(N, 1, 28, 28) pictures to (N, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        stages = [(1, 32), (32, 64), (64, 128)]
        self.conv_layers = nn.Sequential(
            *(part for a, b in stages for part in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, 2)))
        )
        self.fc_layers = nn.Sequential(nn.Linear(128 * 3 * 3, 256), nn.ReLU(), nn.Linear(256, 10))
        self.quant, self.dequant = QuantStub(), DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.dequant(self.fc_layers(self.conv_layers(self.quant(x)).flatten(1)))


def load() -> DigitNetwork:
    """The network with the weights of the package ``digit-recognizer-py``, in eval mode."""
    network = DigitNetwork()
    path = package_file("digit_recognizer", "models/handwriting_model.pth")
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def digits() -> tuple[Tensor, Tensor]:
    """1797 digits, (N, 1, 28, 28) normalized as the network expects, and what they are."""
    with gzip.open(package_file("sklearn", "datasets/data/digits.csv.gz"), "rt") as file:
        rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    small = rows[:, :-1].reshape(-1, 1, 8, 8) / 16.0
    large = F.pad(F.interpolate(small, size=(20, 20), mode="bilinear"), (4, 4, 4, 4))
    return (large - 0.1307) / 0.3081, rows[:, -1].to(torch.int64)
