"""A compiled network gives the integers of its modules, refuses what it cannot run, and cannot be made to crash."""

from __future__ import annotations

import copy
import random
import threading

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization import DeQuantStub, QuantStub, convert, fuse_modules, get_default_qconfig, prepare

pytestmark = pytest.mark.skipif(not zp.backends.is_native(), reason="a plan runs in the native library")


class Residual(nn.Module):
    """What convolutional networks are made of: padding, depthwise, ReLU6, a residual sum, a concatenation, slices."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU6())
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.5)
        self.wide = nn.Conv2d(40, 8, 3, padding=1, bias=False)
        self.add, self.mul, self.cat = FloatFunctional(), FloatFunctional(), FloatFunctional()
        self.fc = nn.Linear(8 * 49, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(self.quant(x), (0, 1, 0, 1))
        x = self.stem(x)
        x = self.add.add(x, self.relu(self.point(self.depthwise(x))))
        x = self.mul.mul(x, x)
        x = self.cat.cat([x, nn.functional.pad(x[:, 4:12], (1, 1, 1, 1))[:, :, 1:-1, 1:-1], x], 1)
        x = self.wide(self.dropout(x))
        return self.dequant(self.fc(torch.flatten(x, 1)))


def quantized(model: nn.Module, *shape: int) -> nn.Module:
    model.eval().qconfig = get_default_qconfig()  # type: ignore[union-attr]
    prepared = prepare(model)
    prepared(torch.randn(*shape))
    return convert(prepared)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return quantized(fuse_modules(Residual().eval(), [["stem.0", "stem.1"]]), 4, 3, 14, 14)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_plan_gives_the_integers_of_the_modules(network: nn.Module, batch: int, isa: str, threads: int) -> None:
    x = torch.randn(batch, 3, 14, 14)
    compiled = zp.compile(network, x)
    assert torch.equal(compiled(x), network(x))
    assert torch.equal(compiled(-x), network(-x))


def test_one_and_three_dimensions() -> None:
    line = nn.Sequential(QuantStub(), nn.Conv1d(4, 6, 3, padding=2, dilation=2), nn.Flatten(), DeQuantStub())
    cube = nn.Sequential(QuantStub(), nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 2, 1)), nn.ReLU(), DeQuantStub())
    for model, shape in ((line, (2, 4, 9)), (cube, (2, 2, 3, 6, 5))):
        network, x = quantized(model, *shape), torch.randn(*shape)
        assert torch.equal(zp.compile(network, x)(x), network(x))


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.cat = QuantStub(), DeQuantStub(), FloatFunctional()
        self.pools = nn.ModuleList(
            [
                nn.MaxPool2d(3, 2, 1),
                nn.MaxPool2d(2, ceil_mode=True),
                nn.MaxPool2d(2, 3, dilation=2),
                nn.AvgPool2d(3, 2, 1),
                nn.AvgPool2d((2, 3), count_include_pad=False, padding=1, ceil_mode=True),
                nn.AvgPool2d(2, divisor_override=3),
                nn.AdaptiveAvgPool2d((3, 2)),
                nn.AdaptiveAvgPool2d(1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        flat = [torch.flatten(pool(x), 1) for pool in self.pools]
        flat += [torch.mean(x, (2, 3)), torch.mean(x, (2, 3), keepdim=True).flatten(1)]
        return self.dequant(self.cat.cat(flat, 1))


def test_pools(isa: str) -> None:
    network, x = quantized(Pools(), 2, 5, 9, 10), torch.randn(3, 5, 9, 10)
    assert torch.equal(zp.compile(network, x)(x), network(x))


class Gates(nn.Module):
    """Operands that are repeated: squeeze and excitation, a row and a column, a number a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv, self.pool = nn.Conv2d(3, 20, 3), nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite, self.gate = nn.Conv2d(20, 5, 1), nn.Conv2d(5, 20, 1), nn.Hardsigmoid()
        self.functions = nn.ModuleList([FloatFunctional() for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        f = self.functions
        x = self.conv(self.quant(x))
        x = f[0].mul(x, self.gate(self.excite(self.squeeze(self.pool(x)))))  # type: ignore[operator]
        x = f[1].add(x[:, :, :1], x[:, :, :, 1:2])  # type: ignore[operator]
        x = f[2].mul(self.pool(x), x)  # type: ignore[operator]
        x = f[3].add(x, x[0, 0])  # type: ignore[operator]
        return self.dequant(f[4].mul(x.flatten(2).transpose(1, 2), x.flatten(2)[:, :, 0].unsqueeze(1)))  # type: ignore[operator]


@pytest.mark.parametrize("batch", [1, 3])
def test_operands_are_repeated(batch: int, isa: str, threads: int) -> None:
    network, x = quantized(Gates(), 4, 3, 9, 11), torch.randn(batch, 3, 9, 11)
    assert torch.equal(zp.compile(network, x)(x), network(x))


class Grows(nn.Module):
    """Every way to more positions, from codes that lie channels last or first."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.apart = nn.ConvTranspose2d(4, 8, 2, stride=3, dilation=2, bias=False)
        self.shuffle, self.add, self.mix = nn.PixelShuffle(2), FloatFunctional(), FloatFunctional()

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        y = self.up(self.conv(x))
        y = nn.functional.interpolate(y, scale_factor=1.7, mode="nearest")
        y = nn.functional.interpolate(y, (9, 13), mode="bilinear", align_corners=False)
        y = self.shuffle(self.apart(y))
        first, *_, last = nn.functional.interpolate(x, y.shape[2:], mode="bilinear", align_corners=True).unbind(1)
        first = nn.functional.interpolate(first.unsqueeze(1), y.shape[2:], mode="nearest-exact")
        return self.dequant(self.add.add(y, self.mix.add(first, last.unsqueeze(1))))


@pytest.mark.parametrize("batch", [1, 2])
def test_pictures_grow(batch: int, isa: str, threads: int) -> None:
    network, x = quantized(Grows(), 2, 3, 5, 6), torch.randn(batch, 3, 5, 6)
    assert torch.equal(zp.compile(network, x)(x), network(x))


def test_lines_and_volumes_grow() -> None:
    line = nn.Sequential(QuantStub(), nn.ConvTranspose1d(4, 6, 3, stride=2), nn.Upsample(scale_factor=2), DeQuantStub())
    volume = nn.Sequential(
        QuantStub(), nn.ConvTranspose3d(2, 3, (1, 2, 3)), nn.Upsample(scale_factor=2, mode="trilinear"), DeQuantStub()
    )
    for model, shape in ((line, (2, 4, 9)), (volume, (2, 2, 3, 6, 5))):
        network, x = quantized(model, *shape), torch.randn(*shape)
        assert torch.equal(zp.compile(network, x)(x), network(x))


def test_other_shapes_and_layouts_get_a_plan_of_their_own(network: nn.Module) -> None:
    compiled = zp.compile(network, torch.randn(1, 3, 14, 14))
    x = torch.randn(3, 3, 14, 14).contiguous(memory_format=torch.channels_last)
    assert torch.equal(compiled(x), network(x))


def test_copies_and_repr(network: nn.Module) -> None:
    x = torch.randn(1, 3, 14, 14)
    compiled = zp.compile(network, x)
    assert torch.equal(copy.deepcopy(compiled)(x), network(x))
    assert "steps" in repr(compiled)


def test_threads_of_python_may_share_a_plan(network: nn.Module) -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs = [torch.randn(1, 3, 14, 14) for _ in range(8)]
    compiled = zp.compile(network, inputs[0])
    with ThreadPoolExecutor(4) as pool:
        for got, x in zip(pool.map(compiled, inputs), inputs, strict=True):
            assert torch.equal(got, network(x))


def test_plans_are_made_while_other_threads_run_the_model(network: nn.Module) -> None:
    x = torch.randn(2, 3, 14, 14)
    expected, stop, wrong = network(x), threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            try:
                y = network(x)
                if type(y) is not Tensor or not torch.equal(y, expected):
                    wrong.append(y)
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for batch in (1, 2, 3):
            zp.compile(network, torch.randn(batch, 3, 14, 14))
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_a_plan_reads_the_weights_of_the_model_and_leaves_nothing_on_it(network: nn.Module) -> None:
    class Remembers(nn.Module):
        seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            return x

    remembers, x = Remembers(), torch.randn(1, 3, 14, 14)
    plan = zp.compile(nn.Sequential(remembers, network).eval(), x).plan_for((x,))
    assert remembers.seen is x
    constants = {constant.data_ptr() for constant in plan.constants}
    for module in network.modules():
        if "_packed" in module._buffers:
            assert {module._buffers[name].data_ptr() for name in ("weight", "_packed")} <= constants  # type: ignore[union-attr]


@pytest.mark.parametrize("nested", [False, True])
def test_loading_drops_the_plans(nested: bool) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return quantized(nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 3), DeQuantStub()), 2, 3, 6, 6)

    old, new, x = make(0), make(1), torch.randn(2, 3, 6, 6)
    compiled = zp.compile(old, x)
    outer = nn.Sequential(compiled) if nested else compiled
    prefix = "0.model." if nested else "model."
    outer.load_state_dict({prefix + name: value for name, value in new.state_dict().items()})
    for y in (x, x[:1]):
        assert torch.equal(compiled(y), new(y))
        assert torch.equal(compiled(y), old(y))


def test_what_the_model_refuses_is_refused_when_the_plan_is_made() -> None:
    model = nn.Sequential(QuantStub(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 3), DeQuantStub())
    network, x = quantized(model, 2, 3, 6, 6), torch.randn(3, 6, 6)
    with pytest.raises((RuntimeError, ValueError)) as eager:
        network(x)
    with pytest.raises(type(eager.value)) as compiled:
        zp.compile(network, x)
    assert str(compiled.value) == str(eager.value)


def test_calls_that_make_no_sense_are_type_errors(network: nn.Module) -> None:
    x = torch.randn(1, 3, 14, 14)
    compiled = zp.compile(network, x)
    with pytest.raises(TypeError, match=r"takes tensors, got inputs of types .*NoneType"):
        compiled(None)
    with pytest.raises(TypeError, match=r"positional inputs only, got \['x'\]"):
        compiled(x=x)
    with pytest.raises(TypeError, match="takes a model, got function"):
        zp.compile(lambda y: y, x)  # type: ignore[arg-type]
    again = zp.compile(compiled, x)
    assert again.model is network
    outer = zp.compile(nn.Sequential(nn.Identity(), compiled).eval(), x)
    assert torch.equal(again(x), network(x))
    assert torch.equal(outer(x), network(x))
    with pytest.raises(zp.PlanError, match=r"on the CPU, got inputs on .*meta"):
        compiled(x.to("meta"))


def test_what_a_plan_cannot_run_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    with pytest.raises(zp.PlanError, match=r"aten\.sin\.default \(in Odd '1\.0'\)"):
        zp.compile(nn.Sequential(nn.Identity(), nn.Sequential(Odd())).eval(), torch.ones(2))


def test_one_input_functions_are_tables() -> None:
    model = nn.Sequential(
        QuantStub(), nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Conv2d(4, 4, 1), nn.Sigmoid(), DeQuantStub()
    )
    network, x = quantized(model, 2, 3, 6, 6), torch.randn(2, 3, 6, 6)
    assert torch.equal(zp.compile(network, x)(x), network(x))


def test_inputs_and_outputs_are_plain_tensors(network: nn.Module) -> None:
    with pytest.raises(TypeError, match="NoneType"):
        zp.compile(network, None)  # type: ignore[arg-type]
    with pytest.raises(zp.PlanError, match="DeQuantStub"):
        zp.compile(quantized(nn.Sequential(QuantStub(), nn.Conv2d(3, 4, 3)), 1, 3, 6, 6), torch.randn(1, 3, 6, 6))


def test_the_reference_backend_says_that_it_has_no_plans() -> None:
    with pytest.raises(zp.PlanError, match="native kernels"):
        zp.plan.run_plan_reference(torch.zeros(1, dtype=torch.int64), [], [], [], 0)


@pytest.mark.parametrize("model", [Residual, Gates, Grows])
def test_broken_programs_raise_and_do_not_crash(model: type[nn.Module]) -> None:
    x = torch.randn(1, 3, 14, 14)
    plan = zp.compile(quantized(model(), 1, 3, 14, 14), x).plan_for((x,))
    outputs = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in plan.outputs]
    dice = random.Random(0)
    values = (-1, 0, 1, 2, 3, 7, 255, 256, 2**31, 2**40, 2**62, -(2**62))
    refused = 0
    for _ in range(1000):
        words = plan.program.clone()
        for _ in range(dice.randint(1, 3)):
            words[dice.randrange(len(words))] = dice.choice(values)
        if dice.random() < 0.1:
            words = words[: dice.randrange(len(words))]
        try:
            torch.ops.zeropoint.run_plan(words, plan.constants, [x], outputs, plan.arena)
        except (RuntimeError, ValueError) as error:
            refused += "plan" in str(error)
    assert refused > 400
