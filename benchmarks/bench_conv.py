"""Convolutions of real networks: int8 and float32 (channels_last, which is torch's fastest on processors).

Our codes are compared with the portable kernels' first.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import zeropoint.ao
from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, threads

SHAPES = {  # inputs, outputs, kernel, stride, groups, height and width
    "ResNet-18 stem 7x7": (3, 64, 7, 2, 1, 224),
    "ResNet-18 3x3, 64 at 56": (64, 64, 3, 1, 1, 56),
    "ResNet-18 3x3, 256 at 14": (256, 256, 3, 1, 1, 14),
    "EfficientNet stem 3x3": (3, 32, 3, 2, 1, 224),
    "EfficientNet expand 1x1, 24 to 144 at 56": (24, 144, 1, 1, 1, 56),
    "EfficientNet project 1x1, 672 to 112 at 14": (672, 112, 1, 1, 1, 14),
    "EfficientNet depthwise 3x3, 96 at 112, stride 2": (96, 96, 3, 2, 96, 112),
    "EfficientNet depthwise 5x5, 672 at 14": (672, 672, 5, 1, 672, 14),
}


def run(quick: bool = False) -> Suite:
    suite = Suite("conv", "Convolutions, int8 and float32")
    for name, (inputs, outputs, kernel, stride, groups, size) in list(SHAPES.items())[: 1 if quick else None]:
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups).eval()
        x = torch.randn(1, inputs, size, size).to(memory_format=torch.channels_last)
        for count in SETTINGS.threads:
            with threads(count):
                _case(suite, f"{name}, {SETTINGS.label(count)}", layer, x, count)
    return suite


def _case(suite: Suite, case: str, layer: nn.Conv2d, x: torch.Tensor, count: int) -> None:
    ours, codes = peers.quantized_layer(zeropoint.ao, layer, x)
    peers.check_codes(ours, codes)
    layer = layer.to(SETTINGS.device, memory_format=torch.channels_last)
    calls = {"zeropoint": partial(ours, codes), **peers.float_layers(layer, x.to(SETTINGS.device))}
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                calls[f"torch.ao {engine}"] = partial(*peers.quantized_layer(ao, layer, x, engine))
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    try:
        calls["ONNX Runtime"] = peers.onnx_conv(
            codes.int_repr().cpu(),
            codes.q_scale(),
            codes.q_zero_point(),
            layer,
            ours.weight().int_repr().cpu(),
            ours.weight().q_per_channel_scales().cpu(),
            ours.scale,
            ours.zero_point,
            count,
        )
    except peers.Absent as error:
        suite.missing("ONNX Runtime", error)
    suite.add(case, calls, {"threads": count})
