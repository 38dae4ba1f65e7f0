"""Quantized embeddings: rows of 8 and 4 bits, bags of every kind, state, workflow, equal numbers on every backend."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropoint.ao.nn import qat
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import (
    convert,
    default_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
    prepare,
    quantize_dynamic,
)
from zeropoint.backends import cpu
from zeropoint.ops.embedding import embedding_bag_reference, embedding_reference

BITS = [pytest.param(8, id="8-bit"), pytest.param(4, id="4-bit")]


def twin(module: Any, bits: int = 8) -> Any:
    module = copy.deepcopy(module)
    module.qconfig = float_qparams_weight_only_qconfig if bits == 8 else float_qparams_weight_only_qconfig_4bit
    return getattr(nnq, type(module).__name__).from_float(module)


def sqnr(reference: Tensor, other: Tensor) -> float:
    reference, other = reference.detach(), other.detach()
    return float(20 * torch.log10(reference.norm() / (reference - other).norm()))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_rows_come_back_within_half_a_step(bits: int, columns: int) -> None:
    table = nn.Embedding(20, columns)
    with torch.no_grad():
        table.weight.add_(5)  # ranges that do not hold 0 are widened to it
    quantized = twin(table, bits)
    every = torch.arange(20).reshape(4, 5)
    error = (quantized(every) - table(every)).abs().amax(-1).reshape(-1)
    assert (error <= 0.51 * quantized.weight_scale).all()
    assert quantized.state_dict()["weight"].shape == (20, columns if bits == 8 else (columns + 1) // 2)
    assert torch.equal(quantized.weight().dequantize(), quantized(torch.arange(20)))


def test_indices_of_every_kind() -> None:
    quantized = twin(nn.Embedding(20, 6))
    at = torch.tensor([[3, 19], [0, 3]])
    assert torch.equal(quantized(at), quantized(at.int()))
    assert torch.equal(quantized(at.t()), quantized(at.t().contiguous()))
    assert quantized(torch.tensor(3)).shape == (6,)
    assert quantized(torch.zeros(0, dtype=torch.int64)).shape == (0, 6)
    for wrong in (20, -1):
        with pytest.raises((IndexError, RuntimeError), match=r"must lie in \[0, 20\)"):
            quantized(torch.tensor([wrong]))
    with pytest.raises(TypeError, match="takes int32 or int64 indices"):
        quantized(torch.tensor([1.0]))


# --- bags ---------------------------------------------------------------------------------------------------------

OFFSETS = [
    pytest.param([0, 2, 3], False, id="plain"),
    pytest.param([0, 0, 3], False, id="empty-first"),
    pytest.param([0, 2, 2], False, id="empty-middle"),
    pytest.param([0, 2, 6], False, id="empty-last"),
    pytest.param([0, 0, 2, 2], True, id="last-offset-and-empty"),
    pytest.param([0, 2, 6], True, id="last-offset"),
    pytest.param([0], True, id="last-offset-only"),
    pytest.param([], False, id="no-bag"),
]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("offsets", "last"), OFFSETS)
def test_bags_follow_their_rows(offsets: list[int], last: bool, mode: str, bits: int) -> None:
    quantized = twin(nn.EmbeddingBag(20, 6, mode=mode, include_last_offset=last), bits)
    indices = torch.tensor([3, 19, 3, 0, 7, 7])
    made = quantized(indices, torch.tensor(offsets, dtype=torch.int64))
    rows = quantized.weight.dequantize()
    ends = [*offsets, *([] if last else [6])][1:]
    assert made.shape == (len(ends), 6)
    for bag, (begin, end) in enumerate(zip(offsets, ends, strict=False)):
        picked = rows[indices[begin:end]]
        if begin == end:
            wanted = torch.zeros(6)
        else:
            wanted = picked.amax(0) if mode == "max" else picked.sum(0) / (end - begin if mode == "mean" else 1)
        assert torch.allclose(made[bag], wanted, atol=1e-6)


@pytest.mark.parametrize("last", [False, True])
def test_indices_of_two_dimensions(last: bool) -> None:
    bag = nn.EmbeddingBag(20, 6, mode="sum", include_last_offset=last)
    quantized, indices = twin(bag), torch.tensor([[3, 19, 3], [0, 7, 7]])
    assert sqnr(bag.weight[indices].sum(1), quantized(indices)) > 35
    assert quantized(indices[:, :0]).equal(torch.zeros(2, 6))
    assert quantized(indices[:0]).shape == (0, 6)
    with pytest.raises(ValueError, match="no offsets with indices of two dimensions"):
        quantized(indices, torch.tensor([0, 3]))


def test_weights_of_samples_and_an_index_that_does_not_count() -> None:
    bag = nn.EmbeddingBag(20, 6, mode="sum", padding_idx=3)
    indices, offsets, weights = torch.tensor([3, 19, 3, 0, 7, 7]), torch.tensor([0, 1, 3]), torch.randn(6)
    quantized = twin(bag)
    assert sqnr(bag(indices, offsets, weights), quantized(indices, offsets, weights)) > 35
    assert torch.equal(quantized(indices, offsets)[0], torch.zeros(6))
    with pytest.raises(ValueError, match="per_sample_weights must have the shape"):
        quantized(indices, offsets, weights[:3])
    with pytest.raises(ValueError, match="go with mode='sum'"):
        twin(nn.EmbeddingBag(20, 6))(indices, offsets, weights)


def test_offsets_that_do_not_fit_are_refused() -> None:
    quantized, indices = twin(nn.EmbeddingBag(20, 6, mode="sum")), torch.tensor([3, 19, 3])
    for offsets in ([1, 2], [0, 4], [0, 2, 1]):
        with pytest.raises(ValueError, match="offsets must rise from 0"):
            quantized(indices, torch.tensor(offsets))
    with pytest.raises(ValueError, match="takes offsets with indices of one dimension"):
        quantized(indices)
    with pytest.raises(ValueError, match="hold at least the end"):
        twin(nn.EmbeddingBag(20, 6, include_last_offset=True))(indices, torch.zeros(0, dtype=torch.int64))


# --- state and workflow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_state_is_flat_and_goes_round(bits: int) -> None:
    table = nn.Embedding(20, 7)
    quantized = twin(table, bits)
    assert {name: value.dtype for name, value in quantized.state_dict().items()} == {
        "weight": torch.uint8,
        "weight_scale": torch.float32,
        "weight_zero_point": torch.float32,
    }
    fresh = nnq.Embedding(20, 7, dtype=quantized.weight.qdtype if bits == 8 else "quint4x2")
    fresh.load_state_dict(quantized.state_dict())
    stream = io.BytesIO()
    torch.save(quantized, stream)
    stream.seek(0)
    every = torch.arange(20)
    for other in (fresh, copy.deepcopy(quantized), torch.load(stream, weights_only=False)):
        assert torch.equal(other(every), quantized(every))
    assert repr(quantized) == f"QuantizedEmbedding(20, 7, bits={bits})"


def test_rows_of_torch_ao_load() -> None:
    quantized = twin(nn.Embedding(20, 7), 4)
    state = {"_packed_params._packed_weight": quantized.weight(), "_packed_params.dtype": "quint4x2"}
    for dtype in ("quint4x2", "quint8"):
        fresh = nnq.Embedding(20, 7, dtype=dtype)
        fresh.load_state_dict(dict(state))
        assert torch.equal(fresh(torch.arange(20)), quantized(torch.arange(20)))
    with pytest.raises(ValueError, match="4 bits, got codes up to"):
        nnq.Embedding(20, 7, dtype="quint4x2").set_weight(twin(nn.Embedding(20, 7)).weight())
    with pytest.raises(ValueError, match="with one grid each"):
        nnq.Embedding(20, 6).set_weight(quantized.weight())
    with pytest.raises(TypeError, match="takes quint8 rows"):
        nnq.Embedding(20, 6).set_weight(torch.zeros(20, 6))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag, self.head = nn.Embedding(20, 8), nn.EmbeddingBag(20, 8), nn.Linear(16, 2)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(torch.cat((self.table(indices[:, 0]), self.bag(indices)), 1))


def test_the_default_dynamic_spec_takes_embeddings() -> None:
    model = Recommender().eval()
    quantized = quantize_dynamic(model)
    assert (type(quantized.table), type(quantized.bag)) == (nnq.Embedding, nnq.EmbeddingBag)
    indices = torch.randint(0, 20, (9, 4))
    assert sqnr(model(indices), quantized(indices)) > 30
    only = quantize_dynamic(model, {nn.Linear})
    assert type(only.table) is nn.Embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_stays_narrow(dtype: torch.dtype) -> None:
    model = Recommender().eval().to(dtype)
    spec = dict.fromkeys((nn.Embedding, nn.EmbeddingBag), float_qparams_weight_only_qconfig)
    quantized, indices = quantize_dynamic(model, spec), torch.randint(0, 20, (9, 4))
    assert quantized.table(indices).dtype == quantized.bag(indices).dtype == quantized(indices).dtype == dtype
    assert sqnr(model(indices).float(), quantized(indices).float()) > 30
    assert torch.equal(copy.deepcopy(quantized)(indices), quantized(indices))
    assert f"output_dtype={dtype}" in repr(quantized.table)
    wide = quantize_dynamic(Recommender().eval(), spec)
    wide.load_state_dict(quantized.state_dict())
    assert wide(indices).dtype == torch.float32
    assert torch.equal(wide.to(dtype)(indices), quantized(indices))
    assert quantized.table.weight_scale.dtype == wide.table.weight_scale.dtype == torch.float32


def test_the_static_flow_takes_them_with_any_qconfig() -> None:
    model = nn.Sequential(nn.Embedding(20, 8)).eval()
    model.qconfig = default_qconfig
    assert type(convert(prepare(model))[0]) is nnq.Embedding
    model[0].qconfig = float_qparams_weight_only_qconfig_4bit
    four = convert(prepare(model))[0]
    assert four.bits == 4


def test_trained_rows_keep_their_grids() -> None:
    trained = qat.Embedding(20, 8)
    every = torch.arange(20)
    simulated = trained(every)
    model = nn.Sequential(trained)
    trained.qconfig = float_qparams_weight_only_qconfig
    quantized = convert(model.eval())[0]
    assert type(quantized) is nnq.Embedding
    assert torch.allclose(quantized(every), simulated, atol=1e-6)


def test_what_is_refused_is_told() -> None:
    with pytest.raises(ValueError, match="max_norm"):
        nnq.Embedding.from_float(nn.Embedding(4, 5, max_norm=1.0))
    with pytest.raises(ValueError, match="quint8 or quint4x2 rows"):
        nnq.Embedding(4, 5, dtype=torch.int8)
    with pytest.raises(ValueError, match="mode must be one of"):
        nnq.EmbeddingBag(4, 5, mode="min")
    with pytest.raises(TypeError, match="got EmbeddingBag"):
        nnq.Embedding.from_float(nn.EmbeddingBag(4, 5))


# --- backends -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not cpu.is_native(), reason="runs on the reference backend")
@pytest.mark.parametrize("isa", cpu.available_isas())
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [0, 1, 33, 128])
def test_native_equals_reference(isa: str, bits: int, columns: int) -> None:
    before = cpu.active_isa()
    weight = torch.randint(0, 256, (50, columns if bits == 8 else (columns + 1) // 2), dtype=torch.uint8)
    table = (weight, torch.rand(50), torch.rand(50) * 255, bits, columns)
    indices, weights = torch.randint(0, 50, (64,)), torch.randn(64)
    bounds = torch.tensor([0, 0, 5, 5, 37, 64])
    try:
        cpu.set_isa(isa)
        assert torch.equal(torch.ops.zeropoint.embedding.default(indices, *table), embedding_reference(indices, *table))
        for mode, factors, padding in (("sum", weights, None), ("mean", None, 7), ("max", None, None)):
            arguments = (indices, bounds, *table, mode, factors, padding)
            found = torch.ops.zeropoint.embedding_bag.default(*arguments)
            assert torch.equal(found, embedding_bag_reference(*arguments))
    finally:
        cpu.set_isa(before)


@pytest.mark.skipif(not cpu.is_native(), reason="runs on the reference backend")
def test_native_code_checks_every_size() -> None:
    def call(**changes: Any) -> None:
        named = {"indices": torch.tensor([1]), "bounds": torch.tensor([0, 1]), "weight": torch.zeros(3, 4).byte()}
        grids = {"scale": torch.ones(3), "zero_point": torch.zeros(3), "bits": 8, "columns": 4, "mode": "sum"}
        named |= {**grids, "weights": None, "padding": None, **changes}
        torch.ops.zeropoint.embedding_bag.default(*named.values())

    call()
    for changes in (
        {"indices": torch.tensor([3])},
        {"bounds": torch.tensor([0, 2])},
        {"bounds": torch.tensor([1, 0])},
        {"bounds": torch.tensor([], dtype=torch.int64)},
        {"weight": torch.zeros(3, 5).byte()},
        {"scale": torch.ones(2)},
        {"bits": 3},
        {"bits": 4},
        {"mode": "no"},
        {"weights": torch.ones(2)},
    ):
        with pytest.raises(RuntimeError, match="embedding"):
            call(**changes)


def test_bags_are_what_torch_computes_from_the_same_rows() -> None:
    quantized = twin(nn.EmbeddingBag(20, 6, mode="mean"))
    indices, offsets = torch.randint(0, 20, (30,)), torch.tensor([0, 3, 3, 20])
    known = F.embedding_bag(indices, quantized.weight.dequantize(), offsets, mode="mean")
    assert torch.allclose(quantized(indices, offsets), known, atol=1e-6)
