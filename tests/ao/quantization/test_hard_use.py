"""What converted and prepared models go through in other people's programs."""

from __future__ import annotations

import math
import pickle
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    default_per_channel_qat_qconfig,
    get_default_qconfig,
    prepare,
    prepare_qat,
    quantize_dynamic,
)


def quantized(model: nn.Module, x: Tensor) -> nn.Module:
    model.eval().qconfig = get_default_qconfig()  # type: ignore[union-attr]
    prepared = prepare(model)
    prepared(x)
    return convert(prepared)


def stubbed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(QuantStub(), *layers, DeQuantStub())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 8, 8)


@pytest.fixture
def network(x: Tensor) -> nn.Module:
    return quantized(stubbed(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), x)


def together(calls: list[Callable[[], object]]) -> list[BaseException]:
    """Runs the calls in threads that start at once, switching as often as Python can: what they raise."""
    barrier, raised = threading.Barrier(len(calls)), []

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return raised


def test_threads_may_share_a_model_from_its_first_call_on(network: nn.Module, x: Tensor) -> None:
    expected = network(x)
    for _ in range(10):
        fresh = pickle.loads(pickle.dumps(network))
        outputs: list[Tensor] = []
        assert together([lambda m=fresh, o=outputs: o.append(m(x))] * 6) == []  # type: ignore[misc]
        assert all(torch.equal(output, expected) for output in outputs)


def test_a_pickled_model_is_traced_without_a_call_before(network: nn.Module, x: Tensor) -> None:
    def fresh() -> nn.Module:
        return pickle.loads(pickle.dumps(network))

    expected = network(x)
    assert torch.equal(torch.compile(fresh(), fullgraph=True, backend="aot_eager")(x), expected)
    assert torch.equal(torch.export.export(fresh(), (x,)).module()(x), expected)
    if zp.backends.is_native():
        assert torch.equal(zp.compile(fresh(), x)(x), expected)
        assert together([lambda: zp.compile(fresh(), x)] * 3) == []


def test_a_run_under_inference_mode_does_not_end_training() -> None:
    model = stubbed(nn.Linear(16, 4)).train()
    model.qconfig = default_per_channel_qat_qconfig  # type: ignore[assignment]
    prepared = prepare_qat(model)
    with torch.inference_mode():
        prepared(torch.randn(2, 16))
    prepared(torch.randn(2, 16)).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters())


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.add, self.cat = nn.Conv2d(3, 3, 3, padding=1), FloatFunctional(), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        return self.dequant(self.cat.cat([self.add.add(x, self.conv(x)), x], 1))


@pytest.mark.slow
def test_models_of_one_class_compile_with_grids_of_their_own(x: Tensor) -> None:
    for factor in (1, 2, 3):
        network = quantized(Sums(), factor * x)
        assert torch.equal(torch.compile(network, fullgraph=True, backend="aot_eager")(x), network(x))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=True)(x), network(x))


@pytest.mark.parametrize("key", ["1.scale", "1.weight_scale", "0.scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_makes_no_grid_is_not_loaded(network: nn.Module, key: str, value: float) -> None:
    state = network.state_dict()
    state[key] = torch.full_like(state[key], value)
    with pytest.raises(ValueError, match=f"{key} must be finite and above 0"):
        network.load_state_dict(state)


def test_recurrent_layers_answer_what_float_models_call_in_their_forward_pass() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.lstm.flatten_parameters()
            return self.lstm(x)[0]

    assert quantize_dynamic(Model().eval())(torch.randn(2, 1, 4)).shape == (2, 1, 3)
