"""The three networks of a face detector with trained weights: PReLU, ceil-mode pooling, softmax."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeropoint.ao.quantization import convert, get_default_qconfig, prepare

pytestmark = [pytest.mark.real, pytest.mark.slow]

Networks = tuple[nn.Module, nn.Module, Tensor]


@pytest.fixture(scope="module", params=["pnet", "rnet", "onet"])
def networks(request: pytest.FixtureRequest, example: Callable[..., Any]) -> Networks:
    """Float network, int8 network, and windows that it was not calibrated on."""
    floating = example("networks.mtcnn", "load", request.param)
    side = {"pnet": 12, "rnet": 24, "onet": 48}[request.param]
    calibration, others = (example("networks.mtcnn", "windows", side, 300, seed) for seed in (0, 1))
    model = copy.deepcopy(floating)
    model.qconfig = get_default_qconfig("x86")
    prepared = prepare(model)
    with torch.inference_mode():
        prepared(calibration)
    return floating, convert(prepared), others


@torch.inference_mode()
def test_int8_finds_the_faces_that_float_finds(networks: Networks, example: Callable[..., Any]) -> None:
    floating, integer, x = networks
    (face, box), (face8, box8) = floating(x), integer(x)
    found, found8 = face[:, 1] > 0.6, face8[:, 1] > 0.6
    assert 0.1 < float(found.float().mean()) < 0.9
    assert float((found == found8).float().mean()) >= 0.97
    assert example("networks.measure", "sqnr", box[found.reshape(len(x))], box8[found.reshape(len(x))]) >= 20


def test_every_layer_runs_on_codes(networks: Networks) -> None:
    summary = networks[1].quantization_summary
    assert summary.skipped == {}
    assert any(record.after == "QuantizedPReLU" for record in summary)


@torch.inference_mode()
def test_native_and_reference_give_the_same_outputs(networks: Networks, reference_backend: Any) -> None:
    _, integer, x = networks
    native = integer(x[:4])
    with reference_backend:
        assert all(map(torch.equal, integer(x[:4]), native))
