"""``python -m benchmarks [--suite NAME ...] [--quick]``: runs the suites, all by default."""

from __future__ import annotations

import argparse
import sys
import warnings
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, SETTINGS

SUITES = {
    "quantized_packing": "packed weights: direct, cached, rebuilt; fused and separate rectification",
    "linear": "linear layers of real networks, static and dynamic",
    "conv": "convolutions of real networks",
    "networks": "whole networks",
    "scaling": "a second thread inside a call, and ten Python threads that share a module",
    "elementwise": "quantize, dequantize, add, norms, activations",
    "recurrent": "LSTM and GRU with int8 weights",
    "ddp": "gradient compression over a network of 100 Mbit/s",
    "fake_quantize": "fake quantize and observers, forward and backward",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures zeropoint against its peers.")
    parser.add_argument(
        "--suite",
        action="append",
        choices=SUITES,
        metavar="NAME",
        help="; ".join(f"{name}: {what}" for name, what in SUITES.items()),
    )
    parser.add_argument("--quick", action="store_true", help="few cases, to see that a suite runs; writes nothing")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads, default 1 2")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: where others use the machine too"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: on the GPU, by its own events")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder that takes the results")
    arguments = parser.parse_args()
    SETTINGS.threads, SETTINGS.clock = tuple(arguments.threads), arguments.clock
    SETTINGS.results = arguments.results
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device here")
        SETTINGS.device, SETTINGS.threads = torch.device("cuda", torch.cuda.current_device()), (1,)
    warnings.filterwarnings("ignore", message=".*torch.ao.quantization is deprecated.*")
    warnings.filterwarnings("ignore", message=".*deprecated and will be removed.*")
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    for name in arguments.suite or SUITES:
        suite = import_module(f"benchmarks.bench_{name}").run(quick=arguments.quick)
        if not arguments.quick:
            suite.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
