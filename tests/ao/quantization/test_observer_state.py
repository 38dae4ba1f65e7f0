"""What observers saw can be saved, loaded, merged over runs, and synchronized over processes."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.ao.quantization import (
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelFakeQuantize,
    PerChannelMinMaxObserver,
    get_observer_state_dict,
    load_observer_state_dict,
    merge_observer_state_dicts,
    sync_observers,
)


class Prepared(nn.Module):
    """A model as ``prepare`` and ``prepare_qat`` leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.fc.activation_post_process = HistogramObserver(bins=256)
        self.fc.weight_fake_quant = PerChannelFakeQuantize()
        self.activation_post_process = FakeQuantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fc.weight_fake_quant(self.fc.weight)
        return self.activation_post_process(self.fc.activation_post_process(self.fc(x)))


def equal_states(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[key], second[key]) for key in first)


def test_state_holds_observers_only_under_the_models_keys():
    model = Prepared()
    model(torch.randn(2, 3))
    state = get_observer_state_dict(model)
    assert equal_states(state, {k: v for k, v in model.state_dict().items() if k not in ("fc.weight", "fc.bias")})
    assert "fc.activation_post_process.histogram" in state


def test_loading_into_a_fresh_model_restores_everything():
    model, fresh = Prepared(), Prepared()
    model(torch.randn(20, 3))
    load_observer_state_dict(fresh, get_observer_state_dict(model))
    assert equal_states(get_observer_state_dict(model), get_observer_state_dict(fresh))


def test_a_single_observer_is_its_own_model():
    observer, fresh = MinMaxObserver(), MinMaxObserver()
    observer(torch.randn(4))
    load_observer_state_dict(fresh, get_observer_state_dict(observer))
    assert torch.equal(fresh.min_val, observer.min_val)


def test_keys_that_do_not_fit_are_named_and_nothing_is_loaded():
    model = Prepared()
    state = get_observer_state_dict(model)
    state["other.min_val"] = state.pop("activation_post_process.activation_post_process.min_val")
    model(torch.randn(2, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"missing .*min_val.*unexpected .*other"):
        load_observer_state_dict(model, state)
    assert equal_states(before, model.state_dict())


def test_weights_grids_may_be_absent():
    model = Prepared()
    model(torch.randn(2, 3))
    state = {k: v for k, v in get_observer_state_dict(model).items() if "activation_post_process" in k}
    load_observer_state_dict(Prepared(), state)


def test_merging_equals_one_run_for_ranges():
    runs = [torch.randn(5, 4), torch.randn(5, 4) * 3]
    one, states = PerChannelMinMaxObserver(), []
    for x in runs:
        one(x)
        each = PerChannelMinMaxObserver()
        each(x)
        states.append(get_observer_state_dict(each))
    assert equal_states(merge_observer_state_dicts(*states), get_observer_state_dict(one))


def test_merging_adds_histograms_over_the_union():
    states = []
    for factor in (1.0, 5.0):
        observer = HistogramObserver()
        observer(torch.randn(1000) * factor)
        states.append(get_observer_state_dict(observer))
    merged = HistogramObserver()
    load_observer_state_dict(merged, merge_observer_state_dicts(*states))
    assert merged.histogram.sum().item() == pytest.approx(2000)
    assert merged.min_val == min(state["min_val"] for state in states)
    assert merged.max_val == max(state["max_val"] for state in states)


def test_a_run_that_saw_nothing_adds_nothing():
    observer = PerChannelMinMaxObserver()
    observer(torch.randn(3, 2))
    seen, empty = get_observer_state_dict(observer), get_observer_state_dict(PerChannelMinMaxObserver())
    for order in ((seen, empty), (empty, seen)):
        assert torch.equal(merge_observer_state_dicts(*order)["min_val"], observer.min_val)


def test_merging_a_whole_model_keeps_its_keys():
    states = []
    for _ in range(3):
        model = Prepared()
        model(torch.randn(4, 3))
        states.append(get_observer_state_dict(model))
    merged = merge_observer_state_dicts(*states)
    load_observer_state_dict(Prepared(), merged)
    assert set(merged) == set(states[0])


def test_merging_does_not_touch_the_states():
    observer = MinMaxObserver()
    observer(torch.ones(2))
    state = get_observer_state_dict(observer)
    merge_observer_state_dicts(state, {**state, "max_val": torch.tensor(9.0)})
    assert state["max_val"].item() == 1.0


@pytest.mark.parametrize("other", [{}, {"min_val": torch.zeros(2), "max_val": torch.zeros(2), "eps": torch.ones(1)}])
def test_states_that_do_not_fit_each_other_are_refused(other):
    observer = PerChannelMinMaxObserver()
    observer(torch.randn(3, 2))
    with pytest.raises(ValueError):
        merge_observer_state_dicts(get_observer_state_dict(observer), other)


def test_merging_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        merge_observer_state_dicts()


def test_synchronizing_without_a_group_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        MinMaxObserver().sync()


# --- two processes ------------------------------------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.range = MinMaxObserver()
        self.average = MovingAverageMinMaxObserver()
        self.histogram = HistogramObserver()
        self.channels = PerChannelMinMaxObserver()
        self.fake = FakeQuantize()

    def forward(self, x: torch.Tensor) -> None:
        for module in self.children():
            module(x)


def _data(rank: int) -> torch.Tensor:
    return torch.linspace(-1.0 - rank, 2.0 + 3 * rank, 12).reshape(3, 4)


def _worker(rank: int, port: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model, lonely = Several(), MinMaxObserver()
    model(_data(rank))
    if rank == 1:
        lonely(_data(1))
    sync_observers(model)
    lonely.sync()
    assert (model.range.min_val.item(), model.range.max_val.item()) == (-2.0, 5.0)
    assert (model.average.min_val.item(), model.average.max_val.item()) == (-1.5, 3.5)
    assert (model.histogram.min_val.item(), model.histogram.max_val.item()) == (-2.0, 5.0)
    assert abs(model.histogram.histogram.sum().item() - 24) < 1e-9
    assert torch.equal(model.channels.min_val, torch.minimum(_data(0).amin(1), _data(1).amin(1)))
    assert torch.equal(model.fake.scale, model.average.calculate_qparams()[0])
    assert (lonely.min_val.item(), lonely.max_val.item()) == (-2.0, 5.0)
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    torch.distributed.all_gather_object(states, dict(model.state_dict()))
    assert equal_states(*states)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_every_process_gets_the_union():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(_worker, args=(port,), nprocs=2, start_method="spawn")


def test_dtypes_of_statistics_survive_a_merge():
    observer = HistogramObserver(dtype=zp.qint8)
    observer(torch.randn(10))
    state = get_observer_state_dict(observer)
    merged = merge_observer_state_dicts(state, state)
    assert {k: v.dtype for k, v in merged.items()} == {k: v.dtype for k, v in state.items()}
