"""Whole networks: EfficientNet-Lite0 and MiniLM with trained weights, ResNet-18 and MobileNetV2 with random ones.

Every peer gets the same float network, the same calibration pictures and the same inputs. float32 is measured as the
network is written, and at its best: batch norm folded, channels_last. ONNX Runtime and OpenVINO run one int8 QDQ file,
made by ONNX Runtime's own tools.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import zeropoint.ao
from benchmarks import models, peers
from benchmarks.harness import SETTINGS, Suite, threads


def run(quick: bool = False) -> Suite:
    from networks import data, efficientnet_lite0  # the examples' folder is on the path

    suite = Suite("networks", "Whole networks, int8 and float32")
    calibration, (pictures, labels) = data.calibration_crops(8 if quick else 32), data.imagenet_pictures()
    makers = {
        "EfficientNet-Lite0": efficientnet_lite0.load,
        "ResNet-18": models.ResNet18,
        "MobileNetV2": models.MobileNetV2,
    }
    for name, make in list(makers.items())[: 1 if quick else None]:
        trained = labels if name == "EfficientNet-Lite0" else None
        _convolutional(suite, name, make, calibration, pictures, trained)
    _minilm(suite)
    return suite


def _static(network: Any, calibration: Tensor, ao: ModuleType, backend: str = "x86") -> nn.Module:
    network = copy.deepcopy(network)
    ours = ao is zeropoint.ao
    ao.quantization.fuse_modules(network, network.fuse_lists(relu6=ours), inplace=True)
    network.qconfig = ao.quantization.get_default_qconfig(backend)
    ao.quantization.prepare(network, inplace=True)
    with torch.inference_mode():
        for batch in calibration.split(8):
            network(batch)
    return ao.quantization.convert(network)


def _convolutional(
    suite: Suite,
    name: str,
    make: Callable[[ModuleType], nn.Module],
    calibration: Tensor,
    pictures: Tensor,
    labels: Tensor | None,
) -> None:
    float_network = make(zeropoint.ao)
    folded = copy.deepcopy(float_network)
    zeropoint.ao.quantization.fuse_modules(folded, folded.fuse_lists(), inplace=True)
    folded = folded.to(memory_format=torch.channels_last)
    ours = _static(float_network, calibration, zeropoint.ao)
    networks: dict[str, Callable[[Tensor], Tensor]] = {"zeropoint": ours}
    if SETTINGS.on_gpu:
        ours, folded, pictures = ours.to(SETTINGS.device), folded.to(SETTINGS.device), pictures.to(SETTINGS.device)
        float_network = copy.deepcopy(float_network).to(SETTINGS.device)
        labels = None if labels is None else labels.to(SETTINGS.device)
        networks["zeropoint, CUDA graph"] = peers.Graphed(ours)
        for half, dtype in peers.HALVES.items():
            networks[f"{half} folded, channels_last, CUDA graph"] = peers.Graphed(copy.deepcopy(folded), dtype)
    else:
        networks["zeropoint, compiled"] = zeropoint.compile(ours, pictures[:1])
    networks["float32"] = float_network
    networks["float32 folded, channels_last"] = lambda x: folded(x.contiguous(memory_format=torch.channels_last))
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                networks[f"torch.ao {engine}"] = _static(make(ao), calibration, ao, engine)
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    try:
        onnx = peers.OnnxNetwork(float_network, calibration) if not SETTINGS.on_gpu else None
    except peers.Absent as error:
        onnx = None
        suite.missing("ONNX Runtime", error)
        suite.missing("OpenVINO", error)
    for count in SETTINGS.threads:
        here = dict(networks)
        if onnx:
            here["ONNX Runtime int8"] = onnx.session(count)
            try:
                here["OpenVINO int8"] = peers.openvino_network(onnx.int8_file, count)
            except peers.Absent as error:
                suite.missing("OpenVINO", error)
        with threads(count), torch.inference_mode():
            facts: dict[str, Any] = {"threads": count}
            if labels is not None:
                facts["right"] = {n: int((call(pictures).argmax(1) == labels).sum()) for n, call in here.items()}
                facts["pictures"] = len(labels)
                print(f"\n   of {len(labels)} pictures right: {facts['right']}")
            for batch in (1, 8):
                calls = {n: partial(call, pictures[:batch]) for n, call in here.items()}
                case = f"{name}, batch {batch}, {SETTINGS.label(count)}"
                suite.add(case, calls, {**facts, "batch": batch}, batches=11, batch_seconds=0.12)


def _minilm(suite: Suite) -> None:
    try:
        from networks import data, minilm

        float_network = minilm.load()
    except ModuleNotFoundError as error:
        suite.missing("MiniLM", error)
        return

    def dynamic(ao: ModuleType) -> nn.Module:
        return ao.quantization.quantize_dynamic(float_network, {nn.Linear: ao.quantization.per_channel_dynamic_qconfig})

    networks = {"zeropoint": dynamic(zeropoint.ao).to(SETTINGS.device)}
    networks["float32"] = copy.deepcopy(float_network).to(SETTINGS.device)
    if SETTINGS.on_gpu:
        for half, dtype in peers.HALVES.items():
            networks[half] = copy.deepcopy(float_network).to(SETTINGS.device, dtype)
    for engine in peers.ENGINES:
        try:
            with peers.engine(engine) as ao:
                networks[f"torch.ao {engine}"] = dynamic(ao)
        except (peers.Absent, RuntimeError) as error:
            suite.missing(f"torch.ao {engine}", error)
    texts, _ = data.lee_documents()
    tokenize = minilm.tokenizer()
    for count in SETTINGS.threads:
        with threads(count):
            for batch in (1, 8):
                inputs = [value.to(SETTINGS.device) for value in tokenize(texts[:batch])]
                calls = {name: partial(network, *inputs) for name, network in networks.items()}
                case = f"MiniLM dynamic, {batch} text(s), {SETTINGS.label(count)}"
                suite.add(case, calls, {"threads": count, "batch": batch}, batches=11, batch_seconds=0.12)
