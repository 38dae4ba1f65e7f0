"""Linear layers of real networks, and of round sizes: static and dynamic int8, and float32.

Static layers are measured with uint8 and with int8 activations. Their codes are compared with the portable kernels'
first.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn

import zeropoint.ao
from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, threads
from zeropoint import QTensor

SHAPES = {  # rows, inputs, outputs
    "classifier, EfficientNet-Lite0": (1, 1280, 1000),
    "attention, MiniLM, 128 tokens": (128, 384, 384),
    "feed-forward in, MiniLM, 128 tokens": (128, 384, 1536),
    "feed-forward out, MiniLM, 128 tokens": (128, 1536, 384),
    "one token, width 2048": (1, 2048, 2048),
    "32 tokens, width 1024": (32, 1024, 4096),
    "1 x 1024 to 512": (1, 1024, 512),
    "32 x 512 to 256": (32, 512, 256),
    "256 x 1024 to 512": (256, 1024, 512),
    "1024 x 1024 to 1024": (1024, 1024, 1024),
    "1 x 4096 to 4096": (1, 4096, 4096),
}
ON_GPU = {"square, 4096": (4096, 4096, 4096)}


def run(quick: bool = False) -> Suite:
    suite = Suite("linear", "Linear layers, int8 and float32")
    shapes = {**SHAPES, **(ON_GPU if SETTINGS.on_gpu else {})}
    for name, (rows, inputs, outputs) in list(shapes.items())[: 1 if quick else None]:
        layer, x = nn.Linear(inputs, outputs).eval(), torch.randn(rows, inputs)
        for count in SETTINGS.threads:
            with threads(count):
                _static(suite, f"static: {name}, {SETTINGS.label(count)}", layer, x, count)
                _dynamic(suite, f"dynamic: {name}, {SETTINGS.label(count)}", layer, x, count)
    return suite


def _static(suite: Suite, case: str, layer: nn.Linear, x: torch.Tensor, count: int) -> None:
    ours, codes = peers.quantized_layer(zeropoint.ao, layer, x)
    signed, signed_codes = peers.quantized_layer(zeropoint.ao, layer, x, signed=True)
    peers.check_codes(ours, codes)
    peers.check_codes(signed, signed_codes)
    layer, x = layer.to(SETTINGS.device), x.to(SETTINGS.device)
    calls = {
        "zeropoint": partial(ours, codes),
        "zeropoint, int8 activations": partial(signed, signed_codes),
        **peers.float_layers(layer, x),
    }
    if SETTINGS.on_gpu:
        _on_gpu(suite, calls, ours, codes)
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                calls[f"torch.ao {engine}"] = partial(*peers.quantized_layer(ao, layer, x, engine))
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    try:
        for name, made, given in (
            ("ONNX Runtime", ours, codes),
            ("ONNX Runtime, int8 activations", signed, signed_codes),
        ):
            calls[name] = peers.onnx_linear(
                given.int_repr().cpu(),
                given.q_scale(),
                given.q_zero_point(),
                made.weight().int_repr().cpu(),
                made.weight().q_per_channel_scales().cpu(),
                made.scale,
                made.zero_point,
                count,
            )
    except peers.Absent as error:
        suite.missing("ONNX Runtime", error)
    suite.add(case, calls, {"threads": count, "kind": "static"})


def _on_gpu(suite: Suite, calls: dict[str, Any], ours: Any, codes: QTensor) -> None:
    """Peers of a static layer on a GPU, and our other way to multiply."""
    wanted = ours(codes).int_repr()

    def by_int_mm() -> QTensor:
        before = os.environ.get("ZEROPOINT_CUDA_LINEAR")
        os.environ["ZEROPOINT_CUDA_LINEAR"] = "int_mm"
        try:
            return ours(codes)
        finally:
            os.environ.pop("ZEROPOINT_CUDA_LINEAR") if before is None else None

    weight = ours.weight()
    factor = (codes.q_scale() * weight.q_per_channel_scales() / ours.scale).to(torch.float32)
    try:
        peer = peers.int_mm(codes.int_repr(), codes.q_zero_point(), weight.int_repr(), factor, ours.zero_point)
        calls["torch._int_mm, separate epilogue"] = peer
        calls["zeropoint by torch._int_mm"] = by_int_mm
        if not torch.equal(by_int_mm().int_repr(), wanted):
            raise AssertionError("torch._int_mm and the kernels give different codes")
    except peers.Absent as error:
        print(f"   torch._int_mm: {error}")


def _dynamic(suite: Suite, case: str, layer: nn.Linear, x: torch.Tensor, count: int) -> None:
    def quantized(ao):  # type: ignore[no-untyped-def]
        qconfig = ao.quantization.per_channel_dynamic_qconfig
        return ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear: qconfig})[0]

    ours, x = quantized(zeropoint.ao).to(SETTINGS.device), x.to(SETTINGS.device)
    calls = {"zeropoint": partial(ours, x), **peers.float_layers(layer.to(SETTINGS.device), x)}
    if SETTINGS.on_gpu:
        try:
            calls["torchao int8 dynamic"] = peers.torchao_linear(layer, x)
        except peers.Absent as error:
            suite.missing("torchao", error)
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                calls[f"torch.ao {engine}"] = partial(quantized(ao), x)
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    try:
        calls["ONNX Runtime"] = peers.onnx_linear_dynamic(
            x.cpu(),
            ours.weight().int_repr().cpu(),
            ours.weight().q_per_channel_scales().cpu(),
            layer.bias.detach().cpu(),
            count,
        )
    except peers.Absent as error:
        suite.missing("ONNX Runtime", error)
    suite.add(case, calls, {"threads": count, "kind": "dynamic"})
