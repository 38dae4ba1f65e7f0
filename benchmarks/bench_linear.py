"""Linear layers of real networks: static int8, dynamic int8, and float32."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import zeropoint.ao
from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, threads

SHAPES = {  # rows, inputs, outputs
    "classifier, EfficientNet-Lite0": (1, 1280, 1000),
    "attention, MiniLM, 128 tokens": (128, 384, 384),
    "feed-forward in, MiniLM, 128 tokens": (128, 384, 1536),
    "feed-forward out, MiniLM, 128 tokens": (128, 1536, 384),
    "one token, width 2048": (1, 2048, 2048),
    "32 tokens, width 1024": (32, 1024, 4096),
}


def run(quick: bool = False) -> Suite:
    suite = Suite("linear", "Linear layers, int8 and float32")
    for name, (rows, inputs, outputs) in list(SHAPES.items())[: 1 if quick else None]:
        layer, x = nn.Linear(inputs, outputs).eval(), torch.randn(rows, inputs)
        for count in SETTINGS.threads:
            with threads(count):
                _static(suite, f"static: {name}, {count} thread(s)", layer, x, count)
                _dynamic(suite, f"dynamic: {name}, {count} thread(s)", layer, x, count)
    return suite


def _static(suite: Suite, case: str, layer: nn.Linear, x: torch.Tensor, count: int) -> None:
    ours, codes = peers.quantized_layer(zeropoint.ao, layer, x)
    calls = {"zeropoint": partial(ours, codes), "float32": partial(layer, x)}
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                calls[f"torch.ao {engine}"] = partial(*peers.quantized_layer(ao, layer, x, engine))
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    try:
        calls["ONNX Runtime"] = peers.onnx_linear(
            codes.int_repr(),
            codes.q_scale(),
            codes.q_zero_point(),
            ours.weight().int_repr(),
            ours.weight().q_per_channel_scales(),
            ours.scale,
            ours.zero_point,
            count,
        )
    except peers.Absent as error:
        suite.missing("ONNX Runtime", error)
    suite.add(case, calls, {"threads": count, "kind": "static"})


def _dynamic(suite: Suite, case: str, layer: nn.Linear, x: torch.Tensor, count: int) -> None:
    def quantized(ao):  # type: ignore[no-untyped-def]
        qconfig = ao.quantization.per_channel_dynamic_qconfig
        return ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear: qconfig})[0]

    ours = quantized(zeropoint.ao)
    calls = {"zeropoint": partial(ours, x), "float32": partial(layer, x)}
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                calls[f"torch.ao {engine}"] = partial(quantized(ao), x)
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    try:
        calls["ONNX Runtime"] = peers.onnx_linear_dynamic(
            x, ours.weight().int_repr(), ours.weight().q_per_channel_scales(), layer.bias, count
        )
    except peers.Absent as error:
        suite.missing("ONNX Runtime", error)
    suite.add(case, calls, {"threads": count, "kind": "dynamic"})
