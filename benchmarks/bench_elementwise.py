"""Everything between the matrices: quantize, dequantize, addition, pooling, norms, activations."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import zeropoint as zp
from benchmarks import peers
from benchmarks.harness import SETTINGS, Suite, threads
from zeropoint.ops import activation, arithmetic, norm

Call = Callable[[], object]
SHAPE = (8, 64, 56, 56)
TOKENS = (32, 512, 768)
SCORES, KEYS = (12, 12, 128, 128), (12, 12, 128, 32)
A, B, OUT = (0.03, 120), (0.04, 130), (0.06, 125)


def run(quick: bool = False) -> Suite:
    suite = Suite("elementwise", "Element-wise operations, pooling and norms on uint8 codes")
    for count in SETTINGS.threads:
        with threads(count):
            cases = {**_affine(), **_arithmetic(), **_norms()}
            round_trips = _round_trips()
            theirs: dict[str, Call] = {}
            try:
                peers.torch_ao()
                if SETTINGS.on_gpu:
                    raise peers.Absent("torch.ao has few quantized operators on CUDA")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    theirs = _torch_ao()
            except peers.Absent as error:
                suite.missing("torch.ao", error)
            for name, (ours, floating) in list(cases.items())[: 3 if quick else None]:
                calls = {"zeropoint": ours, "copy of the input" if "quantize" in name else "float32": floating}
                if name in round_trips:
                    calls["dequantize, float32, quantize"] = round_trips[name]
                if name in theirs:
                    calls["torch.ao"] = theirs[name]
                suite.add(f"{name}, {SETTINGS.label(count)}", calls, {"threads": count})
    return suite


def _pictures() -> torch.Tensor:
    return torch.randn(SHAPE).to(SETTINGS.device, memory_format=torch.channels_last)


def _affine() -> dict[str, tuple[Call, Call]]:
    x, scales = _pictures(), (torch.rand(64) * 0.01 + 0.02).to(SETTINGS.device)
    zeros = torch.randint(-5, 5, (64,)).to(SETTINGS.device)
    q, half = zp.quantize_per_tensor(x, *A, zp.quint8), x.to(torch.bfloat16)
    channels = zp.quantize_per_channel(x, scales, zeros, 1, zp.qint8)
    return {  # against what a copy of the float tensor costs
        "quantize per tensor": (lambda: zp.quantize_per_tensor(x, *A, zp.quint8), x.clone),
        "quantize per tensor, bfloat16": (lambda: zp.quantize_per_tensor(half, *A, zp.quint8), half.clone),
        "quantize per channel": (lambda: zp.quantize_per_channel(x, scales, zeros, 1, zp.qint8), x.clone),
        "dequantize per tensor": (q.dequantize, x.clone),
        "dequantize per channel": (channels.dequantize, x.clone),
        "quantize per tensor, dynamic": (lambda: zp.quantize_per_tensor_dynamic(x, zp.quint8, False), x.clone),
    }


def _arithmetic() -> dict[str, tuple[Call, Call]]:
    x, y = _pictures(), _pictures()
    a, b = zp.quantize_per_tensor(x, *A, zp.quint8), zp.quantize_per_tensor(y, *B, zp.quint8)
    slopes, scores, keys = torch.rand(64), torch.randn(SCORES), torch.randn(KEYS)
    s, k = (zp.quantize_per_tensor(t, *A, zp.quint8) for t in (scores, keys))
    return {
        "add": (lambda: arithmetic.add(a, b, *OUT), lambda: x + y),
        "add and ReLU": (lambda: arithmetic.add(a, b, *OUT, relu=True), lambda: torch.relu(x + y)),
        "mul": (lambda: arithmetic.mul(a, b, *OUT), lambda: x * y),
        "cat": (lambda: arithmetic.cat([a, b], 1, *OUT), lambda: torch.cat([x, y], 1)),
        "ReLU": (lambda: torch.relu(a), lambda: torch.relu(x)),
        "sigmoid": (lambda: activation.sigmoid(a), lambda: torch.sigmoid(x)),
        "hardswish": (lambda: activation.hardswish(a, *OUT), lambda: F.hardswish(x)),
        "PReLU": (lambda: activation.prelu(a, slopes, *OUT), lambda: F.prelu(x, slopes)),
        "nearest, twice as large": (lambda: F.interpolate(a, scale_factor=2), lambda: F.interpolate(x, scale_factor=2)),
        "bilinear, twice as large": (
            lambda: F.interpolate(a, scale_factor=2, mode="bilinear"),
            lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
        ),
        "softmax of 128 scores": (lambda: activation.softmax(s, -1), lambda: scores.softmax(-1)),
        "scores of 128 queries and keys": (lambda: arithmetic.matmul(k, k.mT, *OUT), lambda: keys @ keys.mT),
        "max pool 3x3": (lambda: F.max_pool2d(a, 3, 2, 1), lambda: F.max_pool2d(x, 3, 2, 1)),
        "average pool 3x3": (lambda: F.avg_pool2d(a, 3, 2, 1), lambda: F.avg_pool2d(x, 3, 2, 1)),
        "average over the picture": (lambda: F.adaptive_avg_pool2d(a, 1), lambda: F.adaptive_avg_pool2d(x, 1)),
    }


def _norms() -> dict[str, tuple[Call, Call]]:
    x, batch, group = (
        _pictures(),
        nn.BatchNorm2d(64).eval().to(SETTINGS.device),
        nn.GroupNorm(8, 64).to(SETTINGS.device),
    )
    a = zp.quantize_per_tensor(x, *A, zp.quint8)
    tokens, layer = torch.randn(TOKENS).to(SETTINGS.device), nn.LayerNorm(TOKENS[-1]).to(SETTINGS.device)
    t = zp.quantize_per_tensor(tokens, *A, zp.quint8)
    statistics = (batch.running_mean, batch.running_var)
    return {
        "batch norm": (
            lambda: norm.batch_norm(a, batch.weight, batch.bias, *statistics, batch.eps, *OUT),
            lambda: batch(x),
        ),
        "group norm": (lambda: norm.group_norm(a, 8, group.weight, group.bias, group.eps, *OUT), lambda: group(x)),
        "layer norm": (
            lambda: norm.layer_norm(t, TOKENS[-1:], layer.weight, layer.bias, layer.eps, *OUT),
            lambda: layer(tokens),
        ),
    }


def _round_trips() -> dict[str, Call]:
    """Norms as they are done without integer kernels: through a float copy of the input."""
    group, layer = nn.GroupNorm(8, 64).to(SETTINGS.device), nn.LayerNorm(TOKENS[-1]).to(SETTINGS.device)
    a, t = (
        zp.quantize_per_tensor(_pictures(), *A, zp.quint8),
        zp.quantize_per_tensor(torch.randn(TOKENS).to(SETTINGS.device), *A, zp.quint8),
    )
    return {
        "group norm": lambda: zp.quantize_per_tensor(group(a.dequantize()), *OUT, zp.quint8),
        "layer norm": lambda: zp.quantize_per_tensor(layer(t.dequantize()), *OUT, zp.quint8),
    }


def _torch_ao() -> dict[str, Call]:
    q, x, y, tokens = torch.ops.quantized, _pictures(), _pictures(), torch.randn(TOKENS)
    scales, zeros = torch.rand(64) * 0.01 + 0.02, torch.randint(-5, 5, (64,))
    a, b = torch.quantize_per_tensor(x, *A, torch.quint8), torch.quantize_per_tensor(y, *B, torch.quint8)
    channels = torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8)
    t = torch.quantize_per_tensor(tokens, *A, torch.quint8)
    ones, noughts = torch.ones(64), torch.zeros(64)
    s, k = (torch.quantize_per_tensor(torch.randn(shape), *A, torch.quint8) for shape in (SCORES, KEYS))
    weight, bias = torch.ones(TOKENS[-1]), torch.zeros(TOKENS[-1])
    return {
        "quantize per tensor": lambda: torch.quantize_per_tensor(x, *A, torch.quint8),
        "quantize per channel": lambda: torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8),
        "dequantize per tensor": a.dequantize,
        "dequantize per channel": channels.dequantize,
        "quantize per tensor, dynamic": lambda: torch.quantize_per_tensor_dynamic(x, torch.quint8, False),
        "add": lambda: q.add(a, b, *OUT),
        "add and ReLU": lambda: q.add_relu(a, b, *OUT),
        "mul": lambda: q.mul(a, b, *OUT),
        "cat": lambda: q.cat([a, b], 1, *OUT),
        "ReLU": lambda: torch.relu(a),
        "sigmoid": lambda: torch.sigmoid(a),
        "hardswish": lambda: q.hardswish(a, *OUT),
        "nearest, twice as large": lambda: F.interpolate(a, scale_factor=2),
        "bilinear, twice as large": lambda: F.interpolate(a, scale_factor=2, mode="bilinear"),
        "softmax of 128 scores": lambda: q.softmax(s, -1, 1 / 256, 0),
        "scores of 128 queries and keys": lambda: q.matmul(k, k.transpose(-1, -2), *OUT),
        "max pool 3x3": lambda: F.max_pool2d(a, 3, 2, 1),
        "average pool 3x3": lambda: F.avg_pool2d(a, 3, 2, 1),
        "average over the picture": lambda: F.adaptive_avg_pool2d(a, 1),
        "batch norm": lambda: q.batch_norm2d(a, ones, noughts, noughts, ones, 1e-5, *OUT),
        "group norm": lambda: q.group_norm(a, 8, ones, noughts, 1e-5, *OUT),
        "layer norm": lambda: q.layer_norm(t, TOKENS[-1:], weight, bias, 1e-5, *OUT),
    }
