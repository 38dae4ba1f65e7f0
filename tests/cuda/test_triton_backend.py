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
