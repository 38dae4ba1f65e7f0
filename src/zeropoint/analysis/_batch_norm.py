"""Batch norm statistics, measured anew with the rounding in place.

May import: floors 1 to 4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zeropoint.analysis._data import as_batches, run, with_progress
from zeropoint.ao.quantization.fake_quantize import FakeQuantizeBase
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["reestimate_batch_norm"]


def reestimate_batch_norm(model: nn.Module, data: Any, *, progress: bool = False) -> nn.Module:
    """Gives batch norms the statistics of the data, as the model is now.

    Running statistics lag behind the weights, and in quantization-aware training the rounding that weights cross from
    step to step moves the means by more than they can follow. Run this before ``convert``. Fake quantizers simulate as
    they do, and observe nothing.

    M. Nagel, M. Fournarakis, Y. Bondarenko, T. Blankevoort, "Overcoming Oscillations in Quantization-Aware Training",
    2022, section 5.3.

    Args:
        model: a float model, or one that ``prepare_qat`` prepared; it is left as it is.
        data: a tensor, or batches, of more than one value a channel; their statistics are averaged.
        progress: show a progress bar, if tqdm or rich is installed.

    Returns:
        The copy with new statistics.

    Raises:
        ValueError: no batch norm with running statistics.
    """
    batches = as_batches(data)
    model = clone_model(model)
    modes = {module: module.training for module in model.modules()}
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        raise ValueError("the model has no batch norm with running statistics: call this before they are folded")
    momenta = [norm.momentum for norm in norms]
    observing = [(m, m.observer_enabled.clone()) for m in model.modules() if isinstance(m, FakeQuantizeBase)]
    model.eval()
    for fake_quantize, _ in observing:
        fake_quantize.observer_enabled.zero_()
    seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {norm: [] for norm in norms}

    def measure(norm: nn.Module, args: Any, output: Any) -> None:
        values = args[0].detach().to(torch.float64).transpose(0, 1).flatten(1)
        seen[norm].append((values.mean(1), values.var(1)))

    handles = [norm.register_forward_hook(measure) for norm in norms]
    for norm in norms:
        norm.training = True  # so what follows sees the new statistics
        norm.momentum = 0.0  # but the old ones stay meanwhile: simulated layers fold them into their weights
    for batch in with_progress(batches, "batch norm statistics", progress):
        run(model, [batch])
    for norm, momentum, handle in zip(norms, momenta, handles, strict=True):
        handle.remove()
        norm.momentum = momentum
        if seen[norm] and norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.copy_(torch.stack([mean for mean, _ in seen[norm]]).mean(0))
            norm.running_var.copy_(torch.stack([var for _, var in seen[norm]]).mean(0))
    for fake_quantize, enabled in observing:
        fake_quantize.observer_enabled.copy_(enabled)
    for module, training in modes.items():
        module.training = training
    return model
