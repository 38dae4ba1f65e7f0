"""What training and calibration pay: fake quantize forward and backward, and the observers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor, nn

import zeropoint.ao
import zeropoint.ao.quantization
from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, threads

ACTIVATION, WEIGHT = (8, 64, 56, 56), (512, 256, 3, 3)
SHAPES = {"activation": ACTIVATION, "weight": WEIGHT}


def run(quick: bool = False) -> Suite:
    suite = Suite("fake_quantize", "Fake quantize and observers")
    libraries = {"zeropoint": zeropoint.ao}
    try:
        libraries["torch.ao"] = peers.torch_ao()
    except peers.Absent as error:
        suite.missing("torch.ao", error)
    inputs = {kind: torch.randn(shape).to(SETTINGS.device) for kind, shape in SHAPES.items()}
    for count in SETTINGS.threads:
        with threads(count):
            for case, (kind, make) in list(_modules().items())[: 2 if quick else None]:
                x = inputs[kind]
                calls: dict[str, Callable[[], object]] = {}
                for name, ao in libraries.items():
                    module = make(ao).to(SETTINGS.device)
                    module(x)
                    calls[name] = partial(_train if isinstance(module, _Trained) else _observe, module, x)
                suite.add(f"{case}, {SETTINGS.label(count)}", calls, {"threads": count})
    return suite


class _Trained(nn.Module):
    """Marks a module whose backward is measured too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def _modules() -> dict[str, tuple[str, Callable[[ModuleType], nn.Module]]]:
    def fake(frozen: bool, name: str) -> Callable[[ModuleType], nn.Module]:
        def make(ao: ModuleType) -> nn.Module:
            module = getattr(ao.quantization, name)()
            if frozen:
                module(torch.randn(WEIGHT))
                module.disable_observer()
            return _Trained(module)

        return make

    def learned(observer: str, **settings: int) -> Callable[[ModuleType], nn.Module]:
        def make(ao: ModuleType) -> nn.Module:
            home = importlib.import_module(f"{ao.__name__}.quantization._learnable_fake_quantize")
            module = home._LearnableFakeQuantize(getattr(ao.quantization, observer), 0, 255, scale=0.02, **settings)
            module.enable_param_learning()
            return _Trained(module)

        return make

    def observer(name: str) -> Callable[[ModuleType], nn.Module]:
        return lambda ao: getattr(ao.quantization, name)()

    return {
        "per tensor, grid fixed": ("activation", fake(True, "default_fake_quant")),
        "per tensor, moving average": ("activation", fake(False, "default_fake_quant")),
        "per tensor, moving average, fused": ("activation", fake(False, "default_fused_act_fake_quant")),
        "per channel, grid fixed": ("weight", fake(True, "default_per_channel_weight_fake_quant")),
        "per channel, moving average, fused": ("weight", fake(False, "default_fused_per_channel_wt_fake_quant")),
        "per tensor, learned": ("activation", learned("MovingAverageMinMaxObserver")),
        "per channel, learned": ("weight", learned("MovingAveragePerChannelMinMaxObserver", channel_len=WEIGHT[0])),
        "min-max observer": ("activation", observer("MinMaxObserver")),
        "per-channel min-max observer": ("weight", observer("PerChannelMinMaxObserver")),
        "histogram observer": ("activation", observer("HistogramObserver")),
    }


def _train(module: nn.Module, x: Tensor) -> None:
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().requires_grad_()
        module(x).sum().backward()


def _observe(module: nn.Module, x: Tensor) -> None:
    module(x)
