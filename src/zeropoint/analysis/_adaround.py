"""AdaRound: whether each weight is rounded up or down is learned, layer by layer.

May import: floors 1 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeropoint.analysis._channel_clamp import ChannelClamp
from zeropoint.analysis._data import as_batches, run, with_progress
from zeropoint.analysis._flow import layer_channels
from zeropoint.analysis._simulate import layer_of, observed_modules, set_weight, weight_axis
from zeropoint.ao.nn.intrinsic import FusedModule
from zeropoint.ao.nn.quantized._from_float import quantized_weight
from zeropoint.ao.quantization import QConfig
from zeropoint.ao.quantization.observers.base import ObserverBase
from zeropoint.ao.quantization.utils import clone_model

__all__ = ["adaround"]

_STRETCH_LOW, _STRETCH_HIGH = -0.1, 1.1  # gamma and zeta of the rectified sigmoid, section 3.3
_START_BETA, _END_BETA = 20.0, 2.0
_WARM_UP = 0.2  # the part of the iterations without the regularizer


def adaround(
    prepared: nn.Module,
    data: Any,
    *,
    iterations: int = 1000,
    batch_size: int = 32,
    learning_rate: float = 1e-2,
    strength: float = 0.01,
    names: Sequence[str] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Learns which way to round each weight, so that each layer's output comes closest to the float one.

    The layers are taken in turn. Each sees what the layers before it, already rounded, give, and is to return what the
    float layer returned. Weights stay on the grid that the qconfig's observer lays over the float weight.

    M. Nagel, R. A. Amjad, M. van Baalen, C. Louizos, T. Blankevoort, "Up or Down? Adaptive Rounding for Post-Training
    Quantization", 2020, equations 21 to 25.

    Args:
        prepared: a prepared, calibrated model; it is left as it is.
        data: calibration data: a tensor, or batches.
        iterations: steps of Adam for each layer.
        batch_size: samples a step.
        learning_rate: of Adam.
        strength: weight of the term that drives every weight up or down.
        names: the layers to round, by path; None: all.
        progress: show a progress bar, if tqdm or rich is installed.

    Returns:
        A prepared copy with rounded weights, to convert: their codes are those that were learned.

    Raises:
        ValueError: no such layer, or settings out of range.
    """
    if iterations < 1 or batch_size < 1 or learning_rate <= 0 or strength < 0:
        raise ValueError("iterations and batch_size must be 1 or more, learning_rate above 0, strength 0 or more")
    batches = as_batches(data)
    rounded, floating = clone_model(prepared).eval(), clone_model(prepared).eval()
    able = {
        name: module
        for name, module in observed_modules(rounded).items()
        if weight_axis(module) is not None and layer_channels(layer_of(module) or module) is not None
    }
    chosen = list(able) if names is None else list(names)
    unknown = [name for name in chosen if name not in able]
    if unknown or not chosen:
        raise ValueError(f"no linear layer or convolution to round: {unknown or 'the model has none'}")
    for name in with_progress(chosen, "rounding", progress):
        inputs, _ = _seen(rounded, layer_of(able[name]), batches)
        wanted = _seen(floating, layer_of(floating.get_submodule(name)), batches)[1]
        _round(able[name], inputs, wanted, iterations, batch_size, learning_rate, strength)
    return rounded


class _KeptGrid(ObserverBase):
    """The grid of another observer, whatever is shown to it."""

    def __init__(self, scale: Any, zero_point: Any, observer: Any) -> None:
        super().__init__(observer.dtype)
        self.quant_min, self.quant_max = int(observer.quant_min), int(observer.quant_max)
        self.qscheme = observer.qscheme
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.float64))
        self.register_buffer("zero_point", torch.as_tensor(zero_point))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, **kwargs: Any) -> Any:
        return self.scale, self.zero_point


def _seen(model: nn.Module, layer: nn.Module | None, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """What goes into a layer and what comes out of it, all batches joined."""
    assert layer is not None
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        inputs.append(args[0].detach())
        outputs.append(output.detach())

    handle = layer.register_forward_hook(hook, prepend=True)
    run(model, batches)
    handle.remove()
    return torch.cat(inputs), torch.cat(outputs)


def _apply(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, weight, layer.bias)
    result: Tensor = layer._conv_forward(x, weight, layer.bias)
    return result


def _round(
    module: Any, x: Tensor, wanted: Tensor, iterations: int, batch_size: int, learning_rate: float, strength: float
) -> None:
    layer: Any = layer_of(module)
    weight = layer.weight.detach()
    observer = module.qconfig.weight().to(weight.device)
    nearest = quantized_weight(weight, observer, 0)  # shows the weight to the observer, too
    scale, zero_point = nearest._broadcast_grid()
    step = torch.as_tensor(scale, dtype=torch.float32)
    zero = torch.as_tensor(zero_point, dtype=torch.float32)
    position = weight / step + zero
    low = torch.floor(position)
    fraction = (position - low).clamp(0.01, 0.99)
    start = torch.logit((fraction - _STRETCH_LOW) / (_STRETCH_HIGH - _STRETCH_LOW))
    v = nn.Parameter(start)
    after = module[1] if isinstance(module, FusedModule) and len(module.PARTS) == 2 else nn.Identity()
    after = after if isinstance(after, (nn.ReLU, nn.ReLU6, ChannelClamp)) else nn.Identity()
    code_min, code_max = int(observer.quant_min), int(observer.quant_max)

    def up() -> Tensor:
        return (torch.sigmoid(v) * (_STRETCH_HIGH - _STRETCH_LOW) + _STRETCH_LOW).clamp(0, 1)

    def on_grid(choice: Tensor) -> Tensor:
        return ((low + choice).clamp(code_min, code_max) - zero) * step

    optimizer = torch.optim.Adam([v], lr=learning_rate)
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for iteration in range(iterations):
            rows = torch.randint(len(x), (min(batch_size, len(x)),), generator=generator)
            choice = up()
            difference = after(_apply(layer, x[rows], on_grid(choice))) - after(wanted[rows])
            loss = difference.square().flatten(1).sum(1).mean() if difference.dim() > 1 else difference.square().sum()
            progress = (iteration / iterations - _WARM_UP) / (1 - _WARM_UP)
            if progress > 0:
                beta = _END_BETA + 0.5 * (_START_BETA - _END_BETA) * (
                    1 + float(torch.cos(torch.tensor(progress * torch.pi)))
                )
                loss = loss + strength * (1 - (2 * choice - 1).abs().pow(beta)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    # Only if it is nearer to the float layer than rounding to nearest on all of the data.
    with torch.no_grad():
        learned, plain = on_grid((up() >= 0.5).to(torch.float32)), nearest.dequantize()
        errors = [float((after(_apply(layer, x, w)) - after(wanted)).square().sum()) for w in (learned, plain)]
        set_weight(layer, (learned if errors[0] < errors[1] else plain).to(weight.dtype))
    kept = _KeptGrid.with_args(scale=nearest.scale, zero_point=nearest.zero_point, observer=observer)
    module.qconfig = QConfig(module.qconfig.activation, kept)
