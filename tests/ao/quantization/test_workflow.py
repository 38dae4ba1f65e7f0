"""prepare, calibrate, convert: what a user of the static workflow relies on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.nn import intrinsic as nni
from zeropoint.ao.nn import quantized as nnq
from zeropoint.ao.quantization import (
    DeQuantStub,
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    QuantStub,
    QuantWrapper,
    add_quant_dequant,
    convert,
    default_per_channel_qconfig,
    default_qconfig,
    default_weight_observer,
    default_weight_only_qconfig,
    fuse_modules,
    get_default_qconfig,
    prepare,
    quantize,
)


def sqnr(reference: Tensor, other: Tensor) -> float:
    """Signal to quantization noise, in dB."""
    reference, other = reference.detach(), other.detach()
    return float(20 * torch.log10(reference.norm() / (reference - other).norm()))


class Block(nn.Module):
    """A residual block with everything a small convolutional net has."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = QuantStub()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu2 = nn.ReLU6()
        self.add = nnq.FloatFunctional()
        self.pool = nn.MaxPool2d(2)
        self.avg = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.drop = nn.Dropout()
        self.fc = nn.Linear(8, 5)
        self.dequant = DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(self.quant(x))))
        y = self.relu2(self.bn2(self.conv2(x)))
        y = self.pool(self.add.add_relu(x, y))
        return self.dequant(self.fc(self.drop(self.flatten(self.avg(y)))))


def trained(model: nn.Module, *shape: int) -> nn.Module:
    """Batch norms with statistics that are not the initial ones, in eval mode."""
    model.train()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(*shape) * 2 + 0.5)
    return model.eval()


@pytest.fixture
def block() -> nn.Module:
    return trained(Block(), 16, 3, 8, 8)


ROWS = [["conv1", "bn1", "relu1"], ["conv2", "bn2", "relu2"]]


def static(model: nn.Module, x: Tensor, qconfig: QConfig = default_per_channel_qconfig) -> nn.Module:
    model.qconfig = qconfig
    prepared = prepare(model)
    with torch.no_grad():
        prepared(x)
    return convert(prepared)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("qconfig", [default_qconfig, default_per_channel_qconfig, get_default_qconfig()])
def test_a_residual_net_runs_on_integers_end_to_end(block: nn.Module, fused: bool, qconfig: QConfig) -> None:
    x = torch.randn(16, 3, 8, 8)
    expected = block(x)
    model = fuse_modules(block, ROWS) if fused else block
    seen = []
    quantized = static(model, x, qconfig)
    for module in quantized.modules():
        if isinstance(module, (nnq.Conv2d, nnq.Linear, nnq.QFunctional, nnq.BatchNorm2d, nnq.MaxPool2d)):
            module.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    assert sqnr(expected, quantized(x)) > 15
    assert seen
    assert set(seen) == {zp.quint8}


def test_the_original_is_untouched_unless_inplace(block: nn.Module) -> None:
    block.qconfig = default_qconfig
    before = copy.deepcopy(block.state_dict())
    prepared = prepare(block)
    assert prepared is not block
    assert not any(hasattr(m, "activation_post_process") for n, m in block.named_modules() if n not in ("add",))
    assert [n for n, m in block.named_modules() if hasattr(m, "qconfig")] == [""]
    assert block.state_dict().keys() == before.keys()
    assert prepare(block, inplace=True) is block


def test_fused_modules_are_observed_as_one(block: nn.Module) -> None:
    model = fuse_modules(block, ROWS)
    model.qconfig = default_qconfig
    prepared = prepare(model)
    assert hasattr(prepared.conv1, "activation_post_process")
    assert not hasattr(prepared.conv1[0], "activation_post_process")
    calls = []
    prepared.conv1.activation_post_process.register_forward_hook(lambda *_: calls.append(1))
    prepared(torch.randn(2, 3, 8, 8))
    assert calls == [1]


def test_modules_that_keep_the_grid_are_not_observed(block: nn.Module) -> None:
    block.qconfig = default_qconfig
    prepared = prepare(block)
    for name in ("relu1", "relu2", "pool", "avg", "flatten", "drop", "dequant"):
        assert not hasattr(getattr(prepared, name), "activation_post_process"), name
    assert isinstance(prepared.add.activation_post_process, MinMaxObserver)


def test_a_bare_root_is_observed_and_swapped() -> None:
    linear = nn.Linear(4, 3)
    linear.qconfig = default_per_channel_qconfig
    prepared = prepare(linear)
    x = torch.randn(32, 4)
    prepared(x)
    quantized = convert(prepared)
    assert type(quantized) is nnq.QuantizedLinear
    q = zp.quantize_per_tensor(x, 0.05, 128, zp.quint8)
    assert sqnr(linear(q.dequantize()), quantized(q).dequantize()) > 25


def test_submodules_without_a_qconfig_stay_float(block: nn.Module) -> None:
    block.fc.qconfig = None
    block.dequant.qconfig = None
    block.qconfig = default_qconfig
    quantized = static(block, torch.randn(4, 3, 8, 8))
    assert type(quantized.fc) is nn.Linear
    assert type(quantized.dequant) is DeQuantStub
    assert quantized.quantization_summary.skipped["fc"].reason == "no qconfig"


def test_a_model_without_any_qconfig_warns() -> None:
    with pytest.warns(UserWarning, match="no module has a qconfig"):
        prepare(nn.Linear(2, 2))


def test_nothing_is_left_behind(block: nn.Module) -> None:
    """No qconfig, observer or hook of prepare() stays, in nested containers neither."""
    model = nn.Sequential(nn.Sequential(block), nn.Identity())
    quantized = static(model, torch.randn(4, 3, 8, 8))
    for name, module in quantized.named_modules():
        assert not hasattr(module, "qconfig"), name
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert not isinstance(getattr(module, "activation_post_process", None), MinMaxObserver), name


def test_qconfig_mapping_chooses_by_name_type_and_default(block: nn.Module) -> None:
    mapping = (
        QConfigMapping()
        .set_global(default_qconfig)
        .set_object_type(nn.Conv2d, default_per_channel_qconfig)
        .set_module_name("fc", None)
    )
    prepared = prepare(fuse_modules(block, ROWS[:1]), qconfig_mapping=mapping)
    prepared(torch.randn(4, 3, 8, 8))
    quantized = convert(prepared)
    assert quantized.conv1.weight.qscheme() == zp.per_channel_affine
    assert quantized.conv2.weight.qscheme() == zp.per_channel_affine
    assert type(quantized.fc) is nn.Linear


def test_a_plain_dict_chooses_by_name_and_type(block: nn.Module) -> None:
    prepared = prepare(block, qconfig_mapping={nn.Conv2d: default_qconfig, "quant": default_qconfig})
    observed = [
        n for n, m in prepared.named_modules() if isinstance(getattr(m, "activation_post_process", 0), MinMaxObserver)
    ]
    assert observed == ["quant", "conv1", "conv2"]


def test_uncalibrated_modules_are_named_in_one_warning() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.other = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Branches()
    model.qconfig = default_qconfig
    prepared = prepare(model)
    prepared(torch.randn(4, 2))
    with pytest.warns(UserWarning, match="saw no data") as caught:
        quantized = convert(prepared)
    assert [str(w.message) for w in caught if "'unused', 'other'" in str(w.message)]
    assert len(caught) == 1
    assert (quantized.unused.scale, quantized.unused.zero_point) == (1.0, 0)
    with pytest.raises(RuntimeError, match="'unused', 'other'"):
        convert(prepared, strict=True)
    assert type(prepared.used) is nn.Linear


def test_an_unprepared_module_is_named() -> None:
    linear = nn.Linear(2, 2)
    linear.qconfig = default_qconfig
    with pytest.raises(RuntimeError, match=r"no activation observer.*call prepare\(\)"):
        convert(linear)


def test_float_input_names_the_module_and_the_stub() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    quantized = static(model, torch.randn(8, 4))
    with pytest.raises(TypeError, match=r"Linear '0' takes a quantized tensor, got a torch\.float32 tensor.*QuantStub"):
        quantized(torch.randn(8, 4))


def test_modules_used_twice_have_one_grid_and_stay_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.relu = QuantStub(), DeQuantStub(), nn.ReLU()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.relu(self.b(self.relu(self.a(self.quant(x))))))

    model, x = Twice(), torch.randn(64, 4)
    quantized = static(model, x)
    assert quantized.a is quantized.b
    assert sqnr(model(x), quantized(x)) > 20


def test_hooks_run_as_often_and_in_the_same_order(block: nn.Module) -> None:
    calls: list[str] = []

    def note(name: str) -> Any:
        return lambda *args, **kwargs: calls.append(name)

    block.conv1.register_forward_pre_hook(note("pre"))
    block.conv1.register_forward_hook(note("conv1 a"))
    block.conv1.register_forward_hook(note("conv1 b"), with_kwargs=True)
    block.bn1.register_forward_hook(note("bn1"))
    block.relu1.register_forward_hook(note("relu1"))
    block.quant.register_forward_hook(note("quant"))
    block.fc.register_forward_pre_hook(note("fc pre"))
    block.register_forward_hook(note("root"))
    x = torch.randn(2, 3, 8, 8)
    block(x)
    expected, calls[:] = list(calls), []
    fused = fuse_modules(block, ROWS)
    fused(x)
    assert calls == expected
    quantized = static(fused, x)
    calls.clear()
    quantized(x)
    assert calls == expected


def test_hook_handles_still_remove_after_an_inplace_swap() -> None:
    model = nn.Sequential(QuantStub(), nn.Linear(2, 2))
    calls: list[int] = []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    model.qconfig = default_qconfig
    prepare(model, inplace=True)
    model(torch.randn(2, 2))
    model = convert(model, inplace=True)
    model(torch.randn(2, 2))
    handle.remove()
    model(torch.randn(2, 2))
    assert calls == [1, 1]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("form", ["hook", "parametrization"])
@pytest.mark.parametrize("called_before", [True, False], ids=["called", "fresh"])
def test_weight_norm_quantizes_the_effective_weight(form: str, called_before: bool) -> None:
    norm = nn.utils.weight_norm if form == "hook" else nn.utils.parametrizations.weight_norm
    model = nn.Sequential(QuantStub(), norm(nn.Conv1d(3, 4, 3)), DeQuantStub())
    source = nn.Sequential(QuantStub(), norm(nn.Conv1d(3, 4, 3)), DeQuantStub())
    model.load_state_dict(source.state_dict())  # g and v only: a hook's weight is stale now
    x = torch.randn(8, 3, 16)
    if called_before:
        model(x)
    expected = source(x)
    quantized = static(model, x)
    assert sqnr(expected, quantized(x)) > 30
    assert set(quantized.state_dict()) >= {"1.weight", "1.weight_scale", "1.bias"}
    assert type(quantized[1]) is nnq.Conv1d


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("form", ["hook", "parametrization"])
def test_weight_norm_is_baked_in_when_fused(form: str) -> None:
    norm = nn.utils.weight_norm if form == "hook" else nn.utils.parametrizations.weight_norm
    model = trained(nn.Sequential(norm(nn.Conv1d(3, 4, 3)), nn.BatchNorm1d(4), nn.ReLU()), 8, 3, 16)
    fused = fuse_modules(model, ["0", "1", "2"])
    x = torch.randn(8, 3, 16)
    torch.testing.assert_close(fused(x), model(x))
    assert set(fused.state_dict()) == {"0.0.weight", "0.0.bias"}


class PlainSubclass(nn.Linear):
    """Nothing of its own."""


class SameForward(nn.Linear):
    """Overrides forward, and computes the same."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class OtherForward(nn.Linear):
    """Overrides forward, and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("kind", [PlainSubclass, SameForward])
def test_subclasses_that_compute_the_same_are_swapped(kind: type[nn.Linear]) -> None:
    model, x = nn.Sequential(QuantStub(), kind(4, 3), DeQuantStub()), torch.randn(32, 4)
    quantized = static(model, x)
    assert type(quantized[1]) is nnq.Linear


def test_subclasses_that_compute_something_else_are_reported() -> None:
    model, x = nn.Sequential(OtherForward(4, 3)), torch.randn(32, 4)
    quantized = static(model, x)
    assert type(quantized[0]) is OtherForward
    assert "computes something else than Linear" in quantized.quantization_summary.skipped["0"].reason


def test_weight_only_qconfig_leaves_modules_float_and_says_so() -> None:
    quantized = static(nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2), default_weight_only_qconfig)
    assert type(quantized[0]) is nn.Linear
    assert "activations in float" in quantized.quantization_summary.skipped["0"].reason


def test_the_summary_lists_every_swap_and_skip(block: nn.Module) -> None:
    block.softmax = nn.GLU()
    quantized = static(fuse_modules(block, ROWS), torch.randn(4, 3, 8, 8))
    text = str(quantized.quantization_summary)
    assert quantized.quantization_summary.swapped["conv1"].after == "QuantizedConvReLU2d"
    assert quantized.quantization_summary.skipped["softmax"].reason == "no quantized twin"
    assert "conv2" in text
    assert "QuantizedConvReLU2d" in text
    assert "GLU" in text


def test_the_in_place_sum_of_quantized_tensors_names_the_cure() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.fc = QuantStub(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.quant(x)
            y = self.fc(x)
            y += x
            return y

    quantized = static(Residual(), torch.randn(4, 4))
    with pytest.raises(TypeError, match="FloatFunctional"):
        quantized(torch.randn(4, 4))


def test_quantize_does_all_steps_in_eval_mode(block: nn.Module) -> None:
    block.qconfig = default_qconfig
    x = torch.randn(8, 3, 8, 8)
    quantized = quantize(block.train(), lambda model, data: [model(d) for d in data], ([x, x],))
    assert type(quantized.conv1) is nnq.Conv2d
    assert not quantized.training
    assert block.training


def test_add_quant_dequant_wraps_leaves_with_a_qconfig() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].qconfig = default_qconfig
    wrapped = add_quant_dequant(model)
    assert type(wrapped[0]) is QuantWrapper
    x = torch.randn(16, 4)
    prepared = prepare(wrapped)
    prepared(x)
    quantized = convert(prepared)
    assert type(quantized[0].module) is nnq.Linear
    assert quantized(x).dtype == torch.float32


def test_quant_wrapper_quantizes_what_it_wraps() -> None:
    linear = nn.Linear(4, 4).eval()
    linear.qconfig = default_qconfig
    x = torch.randn(16, 4)
    wrapper = QuantWrapper(linear)
    quantized = static(wrapper, x)
    assert sqnr(linear(x), quantized(x)) > 20


def test_preparing_twice_adds_no_second_observer() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.qconfig = default_qconfig
    prepared = prepare(prepare(model))
    assert len(prepared[0]._forward_hooks) == 1


def test_converting_twice_changes_nothing(block: nn.Module) -> None:
    x = torch.randn(4, 3, 8, 8)
    quantized = static(block, x)
    assert torch.equal(convert(quantized)(x), quantized(x))


@pytest.mark.parametrize("dtype", [zp.qint8, zp.quint8])
def test_activations_have_the_dtype_that_their_observer_declares(dtype: zp.QDtype) -> None:
    qconfig = QConfig(MinMaxObserver.with_args(dtype=dtype), default_weight_observer)
    model = nn.Sequential(QuantStub(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    quantized = static(model, torch.randn(16, 4), qconfig)
    assert quantized(torch.randn(2, 4)).dtype == dtype


def test_known_ranges_have_fixed_grids() -> None:
    model = nn.Sequential(QuantStub(), nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid())
    quantized = static(model, torch.randn(64, 4))
    assert (quantized[1].scale, quantized[1].zero_point) == (1 / 256, 0)
    assert (quantized[2].scale, quantized[2].zero_point) == (2 / 256, 128)
    assert (quantized[3].scale, quantized[3].zero_point) == (1 / 256, 0)


def test_unfused_batch_norm_uses_running_statistics(block: nn.Module) -> None:
    quantized = static(block, torch.randn(8, 3, 8, 8))
    assert type(quantized.bn1) is nnq.BatchNorm2d
    x = torch.randn(8, 3, 8, 8) * 3
    assert torch.equal(quantized.train()(x), quantized.eval()(x))
    assert torch.equal(quantized.bn1.running_mean, block.bn1.running_mean)


def test_custom_modules_are_observed_and_converted_by_their_own_methods() -> None:
    class Custom(nn.Linear):
        pass

    class Observed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        @classmethod
        def from_float(cls, module: nn.Module) -> Observed:
            return cls(module)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Done(nn.Module):
        @classmethod
        def from_observed(cls, module: nn.Module) -> Done:
            done = cls()
            done.scale, _ = module.activation_post_process.calculate_qparams()
            return done

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Custom(2, 2))
    model.qconfig = default_qconfig
    prepared = prepare(model, prepare_custom_config_dict={"float_to_observed_custom_module_class": {Custom: Observed}})
    assert type(prepared[0]) is Observed
    prepared(torch.randn(4, 2))
    quantized = convert(
        prepared, convert_custom_config_dict={"observed_to_quantized_custom_module_class": {Observed: Done}}
    )
    assert type(quantized[0]) is Done


def test_prepared_models_copy_and_load(block: nn.Module) -> None:
    x = torch.randn(4, 3, 8, 8)
    block.qconfig = default_qconfig
    prepared = prepare(block)
    prepared(x)
    other = prepare(block)
    other.load_state_dict(prepared.state_dict())
    assert torch.equal(convert(other)(x), convert(copy.deepcopy(prepared))(x))


def test_a_converted_model_compiles_and_exports(block: nn.Module) -> None:
    x = torch.randn(4, 3, 8, 8)
    quantized = static(fuse_modules(block, ROWS), x)
    expected = quantized(x)
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    exported = torch.export.export(quantized, (x,))
    assert torch.equal(exported.module()(x), expected)


def test_no_warning_anywhere(block: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        static(fuse_modules(block, ROWS), torch.randn(4, 3, 8, 8))(torch.randn(1, 3, 8, 8))


def test_relu6_is_fused_into_the_kernel() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(2, 4, 1), nn.ReLU6(), DeQuantStub()).eval()
    with torch.no_grad():
        model[1].weight.mul_(20)
    x = torch.randn(8, 2, 6, 6)
    quantized = static(fuse_modules(model, ["1", "2"]), x)
    assert isinstance(quantized[1], nni.quantized.ConvReLU2d)
    assert quantized[1].rectifier == "relu6"
    quantized[1].scale = 0.1  # a grid that reaches beyond 6
    y = quantized(x)
    assert float(y.min()) == 0.0
    assert abs(float(y.max()) - 6.0) <= 0.05 + 1e-6
