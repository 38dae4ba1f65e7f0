"""How the backend comes in: late, only where it can serve, and as a program that a GPU's compiler takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeropoint as zp
from zeropoint import backends


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**inherited, **environment}, check=False
    )


def test_import_and_use_do_not_import_triton() -> None:
    program = """
import sys, torch, zeropoint as zp
zp.quantize_per_tensor(torch.ones(2), 0.1, 0)
assert "triton" not in sys.modules, "imported"
print(zp.backends.triton.describe()["backend"])
"""
    done = run("-W", "error", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("reference" if torch.version.cuda is None else "triton")


def test_every_operator_has_a_function_and_a_schema(triton: Any) -> None:
    for name in backends.triton.OPERATORS:
        schema = getattr(torch.ops.zeropoint, name).default._schema
        code = backends.triton.function(name).__code__
        assert list(code.co_varnames[: code.co_argcount]) == [argument.name for argument in schema.arguments], name


def test_the_interpreter_ends_with_its_context(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("the interpreter serves CPU tensors only")
    kernels = backends.triton.function("quantize_per_tensor").__globals__
    launched = []
    with kernels["launch"].__globals__["replaced_launch"](lambda kernel, *rest, **named: launched.append(kernel)):
        zp.quantize_per_tensor(torch.ones(2), 0.1, 0)
    assert len(launched) == 1


def test_modules_pack_anew_where_they_move_to(device: torch.device) -> None:
    from zeropoint.ao.nn import quantized as nnq

    module = nnq.Linear(8, 4)
    module.set_weight_bias(zp.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, zp.qint8), torch.randn(4))
    moved = module.to(device)
    x = zp.quantize_per_tensor(torch.randn(3, 8), 0.1, 128, zp.quint8)
    assert torch.equal(moved(x.to(device)).int_repr().cpu(), module.cpu()(x).int_repr())
    assert moved._buffers["_packed"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90"])
def test_every_kernel_compiles_for_a_gpu_and_keeps_every_rounding(triton: Any, arch: str) -> None:
    done = run("-W", "ignore", str(Path(__file__).with_name("triton_offline.py")), arch)
    assert done.returncode == 0, done.stderr
    assert "kernels" in done.stdout


@pytest.mark.slow
def test_torch_compile_traces_a_converted_model_to_the_kernels(device: torch.device) -> None:
    from zeropoint.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare

    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
    model = torch.nn.Sequential(QuantStub(), *layers, DeQuantStub()).eval()
    model.qconfig = get_default_qconfig()  # type: ignore[assignment]
    prepared = prepare(model)
    x = torch.randn(2, 3, 8, 8)
    prepared(x)
    quantized = convert(prepared).to(device)
    wanted = quantized(x.to(device))
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.to(device)), wanted)


@pytest.mark.cuda
def test_a_cuda_graph_captures_a_converted_model(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are of CUDA")
    from zeropoint.ao.quantization import DeQuantStub, QuantStub, convert, get_default_qconfig, prepare

    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.Hardswish(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
    model = torch.nn.Sequential(QuantStub(), *layers, DeQuantStub()).eval()
    model.qconfig = get_default_qconfig()  # type: ignore[assignment]
    prepared = prepare(model)
    pictures = torch.randn(2, 2, 3, 8, 8)
    prepared(pictures[0])
    quantized, given = convert(prepared).cuda(), pictures[0].cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            quantized(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = quantized(given)
    given.copy_(pictures[1])
    graph.replay()
    with torch.no_grad():
        assert torch.equal(out, quantized(pictures[1].cuda()))
