"""What an import may and may not do."""

from __future__ import annotations

import os
import subprocess
import sys

BLOCK_TORCH_AO = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.ao" or name.startswith(("torch.ao.", "torch.quantization")):
            raise ImportError(f"{name} has been removed")

import torch
for name in [n for n in sys.modules if n == "torch.ao" or n.startswith(("torch.ao.", "torch.quantization"))]:
    del sys.modules[name]
if hasattr(torch, "ao"):
    del torch.ao
sys.meta_path.insert(0, Blocked())
"""

BLOCK_NETWORK = """
import socket

def refuse(*args, **kwargs):
    raise AssertionError("the network was used")

socket.socket.connect = refuse
socket.getaddrinfo = refuse
"""


def run(program: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_import_gives_no_warning_and_uses_no_network() -> None:
    done = run(BLOCK_NETWORK + "import zeropoint, zeropoint.ao.quantization", "-W", "error")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_import_and_a_conversion_work_where_torch_ao_is_gone() -> None:
    program = (
        BLOCK_TORCH_AO
        + """
try:
    import torch.ao.quantization
except ImportError:
    pass
else:
    raise AssertionError("the block does not block")
import zeropoint as zp
from zeropoint.ao.quantization import quantize_dynamic
model = quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(8, 4)).eval())
assert model(torch.ones(2, 8)).shape == (2, 4)
assert "torch.ao" not in sys.modules
print("works")
"""
    )
    done = run(program, "-W", "error")
    assert done.stdout.strip() == "works", done.stderr


def test_the_reference_backend_says_so_once() -> None:
    program = (
        "import zeropoint as zp, torch; zp.quantize_per_tensor(torch.ones(2), 0.1, 0); print(zp.backends.describe())"
    )
    done = run(program, "-W", "error", ZEROPOINT_NATIVE="0")
    assert "'backend': 'reference'" in done.stdout
    assert done.stderr.count("reference backend") == 1


def test_import_changes_no_global_state_of_torch() -> None:
    program = """
import torch, warnings
def state():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), list(warnings.filters),
            torch.get_rng_state().tolist(), torch.are_deterministic_algorithms_enabled())
before = state()
import zeropoint, zeropoint.ao.quantization
assert state() == before
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_packages_are_attributes_and_an_import_stays_light() -> None:
    program = """
import sys, torch
before = set(sys.modules)  # torch takes tqdm where it is installed
import zeropoint as zp
for name in ("analysis", "report", "recipe", "ns", "cli"):
    assert f"zeropoint.{name}" not in sys.modules, name
assert zp.ns.compare_weights and zp.analysis.equalize and zp.report.write and zp.recipe.load and zp.ao.quantization
assert {"ns", "analysis", "report"} <= set(dir(zp))
try:
    zp.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
from zeropoint import report
for name in ("jinja2", "typer", "rich", "tqdm", "safetensors"):
    assert name not in set(sys.modules) - before, name
"""
    done = run(program, "-W", "error")
    assert done.returncode == 0, done.stderr
