"""What a user of the command line has: a model, data, an accuracy; and ways to get them wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zeropoint.ao.nn.quantized import Linear as QuantizedLinear


class Net(nn.Module):
    """No stubs, nothing fused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.pool, self.flatten, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.pool(self.relu(self.bn(self.conv(x))))))


class Speech(nn.Module):
    """Layers that are taken apart to be quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attention = nn.LSTM(8, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x.flatten(1, 2))[0]
        return self.attention(x, x, x)[0]


class Text(nn.Module):
    """Two inputs, the first of them tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.fc((self.embedding(tokens) * mask.unsqueeze(-1)).sum(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def speech() -> nn.Module:
    torch.manual_seed(0)
    return Speech()


def text() -> nn.Module:
    torch.manual_seed(0)
    return Text()


made = make()
size = 3


def labelled() -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(3):
        yield torch.randn(8, 3, 8, 8), torch.zeros(8)


def endless() -> Iterator[Tensor]:
    """So slow that a test can interrupt it; it says when it has begun."""
    for index in range(10_000):
        print(f"batch {index}", flush=True)
        time.sleep(0.02)
        yield torch.randn(8, 3, 8, 8)


def accuracy(model: nn.Module) -> float:
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return -float((model(x) - made.eval()(x)).square().mean().sqrt() / made(x).std())


def speech_accuracy(model: nn.Module) -> float:
    """Only a model whose LSTM has float weights is good."""
    quantized = [name for name, part in model.named_modules() if isinstance(part, QuantizedLinear)]
    return float(not any("lstm" in name for name in quantized))


def no_model() -> dict[str, int]:
    return {}


def needs_more(width: int) -> nn.Module:
    return nn.Linear(width, width)


def broken() -> nn.Module:
    raise FileNotFoundError("weights.pth is not here")


def broken_data() -> Iterator[Tensor]:
    yield torch.randn(8, 3, 8, 8)
    raise OSError("the camera is off")


def leaves() -> nn.Module:
    raise SystemExit(0)


def nothing() -> list[Tensor]:
    return []
