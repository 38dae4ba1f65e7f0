"""Models as ONNX files: what ONNX Runtime computes is what the model computed here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from dot_products import HAS_DOT_PRODUCTS
from zeropoint.ao import quantization as aq
from zeropoint.ao.nn.quantized import FloatFunctional
from zeropoint.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

REASON = "ONNX export needs the onnx extra: pip install onnx onnxscript onnxruntime"
onnx = pytest.importorskip("onnx", reason=REASON)
pytest.importorskip("onnxscript", reason=REASON)
onnxruntime = pytest.importorskip("onnxruntime", reason=REASON)

import zeropoint.onnx  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:copyreg"),  # torch's exporter copies what torch deprecates
    pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel:UserWarning"),
]

EXPORTERS = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


def nodes(path: object) -> list[str]:
    return [node.op_type for node in onnx.load(str(path)).graph.node]


def run(path: object, x: Tensor, optimized: bool = True) -> list[Tensor]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not HAS_DOT_PRODUCTS:  # without them the runtime's integer kernels saturate
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.x64quantprecision", "1")
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


def torch_export(model: nn.Module, x: Tensor, path: object, dynamo: bool = True) -> None:
    torch.onnx.export(model, (x,), str(path), dynamo=dynamo, verbose=False)


class Rounded(nn.Module):
    """One fake quantize call."""

    def __init__(self, scale: Tensor, zero_point: Tensor, axis: int | None, low: int, high: int) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.axis, self.ends = axis, (low, high)

    def forward(self, x: Tensor) -> Tensor:
        if self.axis is None:
            return aq.fake_quantize_per_tensor(x, self.scale, self.zero_point, *self.ends)
        return aq.fake_quantize_per_channel(x, self.scale, self.zero_point, self.axis, *self.ends)


RANGES = [(-128, 127), (0, 255), (-127, 127), (0, 127), (-8, 7), (0, 15)]


class AllRanges(nn.ModuleList):
    """One fake quantize call a code range, each on an input of its own that reaches beyond both ends."""

    def __init__(self, axis: int | None) -> None:
        super().__init__()
        channels = 1 if axis is None else (4, 5, 6)[axis]
        for low, high in RANGES:
            zero_point = torch.randint(low, high + 1, (channels,), dtype=torch.int32)
            self.append(Rounded(torch.rand(channels) * 0.05 + 0.01, zero_point, axis, low, high))

    def example(self) -> Tensor:
        rows = []
        for rounded in self:
            shape = [1] * 3
            shape[0 if rounded.axis is None else rounded.axis] = -1
            low, high = rounded.ends
            places = torch.randint(low - 5, high + 6, (4, 5, 6)) + 0.4 * torch.rand(4, 5, 6)
            rows.append((places - rounded.zero_point.reshape(shape)) * rounded.scale.reshape(shape))
        return torch.stack(rows)

    def forward(self, rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(rounded(rows[index]) for index, rounded in enumerate(self))


@EXPORTERS
@pytest.mark.parametrize("axis", [None, 0, -1], ids=lambda axis: f"axis={axis}")
def test_fake_quantize_becomes_a_pair_of_nodes_with_the_same_values(tmp_path, dynamo, axis):
    torch.manual_seed(0)
    model, path = AllRanges(axis).eval(), tmp_path / "model.onnx"
    x = model.example()
    torch_export(model, x, path, dynamo)
    found = nodes(path)
    assert found.count("QuantizeLinear") == found.count("DequantizeLinear") == len(RANGES)
    for optimized in (False, True):
        for got, want, rounded in zip(run(path, x, optimized), model(x), model, strict=True):
            shape = [1] * 3
            shape[0 if axis is None else axis] = -1
            codes = ((got - want) / rounded.scale.reshape(shape)).abs()
            assert codes.max() < 1.001  # one code, where a value lies on the boundary
            assert (codes > 0.5).double().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_float_dtypes_are_quantized_as_float32(tmp_path, dtype):
    x = torch.linspace(-3, 3, 61).to(dtype)
    model, path = Rounded(torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32), None, 0, 15), tmp_path / "m.onnx"
    torch_export(model.eval(), x, path)
    (y,) = run(path, x)
    assert y.dtype == dtype
    assert (y - model(x)).abs().max() < 0.101


@pytest.mark.parametrize(
    ("zero_point", "low", "high"),
    [(torch.tensor([7], dtype=torch.int32), -1000, 1000), (torch.tensor([2.5]), 0, 15)],
    ids=["wide", "floating zero point"],
)
def test_a_grid_that_onnx_does_not_have_stays_float_arithmetic(tmp_path, zero_point, low, high):
    x = torch.linspace(-30, 30, 601)
    model, path = Rounded(torch.tensor([0.01]), zero_point, None, low, high).eval(), tmp_path / "model.onnx"
    torch_export(model, x, path)
    assert "QuantizeLinear" not in nodes(path)
    assert torch.equal(run(path, x, optimized=False)[0], model(x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = aq.QuantStub(), aq.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.linear(x.mean((2, 3))))


QAT_QCONFIGS = [
    "default_qat_qconfig",
    "default_per_channel_qat_qconfig",
    "default_symmetric_qnnpack_qat_qconfig",
    "learnable",
]


def trained(qconfig: str) -> nn.Module:
    torch.manual_seed(0)
    model = aq.fuse_modules_qat(ConvNet().train(), [["conv", "bn", "relu"]])
    if qconfig == "learnable":
        model.qconfig = aq.QConfig(
            activation=_LearnableFakeQuantize.with_args(
                observer=aq.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
            ),
            weight=aq.default_per_channel_weight_fake_quant,
        )
    else:
        model.qconfig = getattr(aq, qconfig)
    model = aq.prepare_qat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return model.eval()


def frozen_output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.apply(aq.disable_observer)
        y = model(x)
        model.apply(aq.enable_observer)
    return y


@EXPORTERS
@pytest.mark.parametrize("qconfig", QAT_QCONFIGS)
def test_a_trained_model_with_folded_batch_norm(tmp_path, dynamo, qconfig):
    model, x, path = trained(qconfig), torch.randn(16, 3, 8, 8), tmp_path / "model.onnx"
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch_export(model, x, path, dynamo)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    found = nodes(path)
    assert "BatchNormalization" not in found
    assert found.count("QuantizeLinear") == found.count("DequantizeLinear") == 5
    step = model.linear.activation_post_process.scale.item()
    for optimized in (False, True):
        difference = (run(path, x, optimized)[0] - frozen_output(model, x)).abs()
        assert difference.max() < step * 1.001
        assert (difference > step / 2).double().mean() <= 0.05


def test_a_prepared_model_with_fake_quantizers(tmp_path):
    model = ConvNet().eval()
    model.qconfig = aq.QConfig(activation=aq.default_fake_quant, weight=aq.default_weight_fake_quant)
    prepared, x, path = aq.prepare(model), torch.randn(4, 3, 8, 8), tmp_path / "model.onnx"
    prepared(x)
    torch_export(prepared, x, path)
    assert nodes(path).count("QuantizeLinear") == 4
    torch.testing.assert_close(run(path, x)[0], frozen_output(prepared, x), atol=0.02, rtol=0)


@pytest.mark.parametrize("observer", ["default_qconfig", "get_default_qconfig"])
def test_a_model_that_only_observes_is_refused(observer):
    model = ConvNet().eval()
    found = getattr(aq, observer)
    model.qconfig = found() if callable(found) and not isinstance(found, tuple) else found
    prepared, x = aq.prepare(model), torch.randn(4, 3, 8, 8)
    prepared(x)
    with pytest.raises(RuntimeError, match=r"only observes.*convert it"):
        zp.onnx.export(prepared, (x,))


# --- converted models ---------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Most layers that a converted model can have."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = aq.QuantStub(), aq.DeQuantStub()
        self.conv, self.bn, self.relu6 = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU6()
        self.depthwise = nn.Conv2d(8, 8, 2, padding="same", groups=8)
        self.add, self.mul, self.cat = FloatFunctional(), FloatFunctional(), FloatFunctional()
        self.relu, self.hardswish, self.sigmoid, self.elu = nn.ReLU(), nn.Hardswish(), nn.Sigmoid(), nn.ELU()
        self.max_pool, self.avg_pool = nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.norm, self.group = nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.pool, self.linear = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.relu6(self.bn(self.conv(self.quant(x))))
        y = self.relu(self.add.add(self.depthwise(x), x))
        z = self.mul.mul(self.sigmoid(y), self.elu(self.norm(x)))
        y = self.avg_pool(self.max_pool(self.hardswish(y)))
        y = self.group(self.up(y))
        z = self.cat.cat([y, z], 1)
        return self.dequant(self.linear(self.pool(z).flatten(1))), self.dequant(y)


def converted() -> nn.Module:
    torch.manual_seed(0)
    model = aq.fuse_modules(Parts().eval(), [["conv", "bn", "relu6"]])
    model.qconfig = aq.get_default_qconfig()
    prepared = aq.prepare(model)
    for _ in range(3):
        prepared(torch.randn(8, 4, 16, 16))
    return aq.convert(prepared)


def test_a_converted_model_runs_on_the_same_codes(tmp_path):
    model, path, x = converted(), tmp_path / "model.onnx", torch.randn(16, 4, 16, 16)
    batch = torch.export.Dim("batch")
    program = zp.onnx.export(model, (x[:2],), path, dynamic_shapes=({0: batch},), verbose=False, input_names=["image"])
    assert program.model.graph.inputs[0].name == "image"
    assert "QuantizeLinear" in nodes(path)
    for optimized in (False, True):
        for got, want, layer in zip(run(path, x, optimized), model(x), (model.linear, model.group), strict=True):
            codes = ((got - want) / layer.scale).abs()
            assert codes.max() < 2.5  # a code that differs early may move a later one
            assert (codes > 0.5).double().mean() < 0.1


LAYERS: dict[str, nn.Module] = {
    "transposed with groups": nn.ConvTranspose2d(4, 4, 3, groups=2),
    "circular": nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    "layer norm": nn.LayerNorm(8),
    "instance norm": nn.InstanceNorm2d(4, affine=True),
    "prelu": nn.PReLU(4),
    "softmax": nn.Softmax(1),
    "gelu": nn.GELU(),
    "leaky": nn.LeakyReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(),
    "shuffle": nn.PixelShuffle(2),
    "pad": nn.ConstantPad2d(1, 0.5),
    "max pool": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    "adaptive max pool": nn.AdaptiveMaxPool2d(2),
    "average": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "average that hangs over": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "average that hangs over, padding not counted": nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "average with a divisor": nn.AvgPool2d(3, 2, 1, divisor_override=7),
    "adaptive average": nn.AdaptiveAvgPool2d(3),
    "nearest": nn.Upsample(scale_factor=2),
    "nearest to a size": nn.Upsample(size=(5, 11)),
    "bilinear": nn.Upsample(size=(5, 7), mode="bilinear"),
    "bilinear, corners aligned": nn.Upsample(size=(5, 7), mode="bilinear", align_corners=True),
}


class Fan(nn.Module):
    """Every layer on the same codes."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.quant, self.dequant, self.layers = aq.QuantStub(), aq.DeQuantStub(), nn.ModuleList(layers.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.quant(x)
        return tuple(self.dequant(layer(x)) for layer in self.layers)


def test_layers_give_the_same_codes(tmp_path):
    torch.manual_seed(0)
    model, path, x = Fan(LAYERS).eval(), tmp_path / "model.onnx", torch.randn(2, 4, 8, 8)
    model.qconfig = aq.get_default_qconfig()
    prepared = aq.prepare(model)
    prepared(x)
    quantized = aq.convert(prepared)
    zp.onnx.export(quantized, (x,), path, verbose=False)
    for optimized in (False, True):
        outputs = zip(LAYERS, run(path, x, optimized), quantized(x), quantized.layers, strict=True)
        for name, got, want, layer in outputs:
            codes = ((got - want) / getattr(layer, "scale", quantized.quant.scale)).abs()
            assert codes.max() < 1.001, name
            # means of a few codes lie on the boundary often, and fused kernels of a runtime round those their way
            means = "average" in name or "linear" in name
            assert (codes > 0.5).double().mean() < (0.1 if means else 0.01), name


def test_positions_that_only_a_factor_tells_are_refused():
    model = Fan({"factor": nn.Upsample(scale_factor=1.7)}).eval()
    model.qconfig = aq.get_default_qconfig()
    prepared, x = aq.prepare(model), torch.randn(2, 4, 8, 8)
    prepared(x)
    with pytest.raises(ValueError, match="ONNX resizes to sizes: give Upsample or interpolate a size"):
        zp.onnx.export(aq.convert(prepared), (x,), verbose=False)


def test_runtimes_find_their_integer_kernels(tmp_path):
    model, path = aq.fuse_modules(ConvNet().eval(), [["conv", "bn", "relu"]]), tmp_path / "model.onnx"
    model.qconfig = aq.get_default_qconfig()
    prepared, x = aq.prepare(model), torch.randn(4, 3, 8, 8)
    prepared(x)
    zp.onnx.export(aq.convert(prepared), (x,), path, verbose=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert {"QLinearConv", "QGemm"} <= set(nodes(tmp_path / "optimized.onnx"))


@pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv"])
def test_a_dynamic_model_chooses_its_grids_in_the_runtime(tmp_path, conv):
    torch.manual_seed(0)
    layers = [nn.Conv1d(6, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)] if conv else [nn.Linear(6, 9)]
    model = aq.quantize_dynamic(nn.Sequential(*layers).eval(), {nn.Conv1d, nn.Linear})
    x, path = torch.randn(5, 6, 6), tmp_path / "model.onnx"
    zp.onnx.export(model, (x,), path, verbose=False)
    assert "MatMulInteger" in nodes(path)
    want = model(x)
    error = run(path, x)[0] - want
    assert 10 * torch.log10(want.square().sum() / error.square().sum()) > 40  # dB


def test_an_exported_program_is_taken_too(tmp_path):
    model, x, path = trained("default_per_channel_qat_qconfig"), torch.randn(2, 3, 8, 8), tmp_path / "model.onnx"
    model.apply(aq.disable_observer)
    zp.onnx.export(torch.export.export(model, (x,)), f=path, verbose=False)
    step = model.linear.activation_post_process.scale.item()
    assert (run(path, x)[0] - model(x)).abs().max() < step * 1.001


# --- what is refused ----------------------------------------------------------------------------------------------


def test_torch_names_the_way_for_a_converted_model():
    model = aq.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval())
    with pytest.raises(Exception, match=r"zeropoint::linear_dynamic.*zeropoint\.onnx\.export"):
        torch_export(model, torch.randn(2, 4), None)


def test_an_operator_without_a_form_is_named_with_its_module():
    model = aq.quantize_dynamic(nn.ModuleDict({"rnn": nn.LSTM(4, 4)}).eval())["rnn"]
    with pytest.raises(ValueError, match="no ONNX form is known of zeropoint::"):
        zp.onnx.export(model, (torch.randn(2, 1, 4),), verbose=False)


def test_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"eval mode: call model\.eval\(\)"):
        zp.onnx.export(nn.Linear(2, 2), (torch.randn(1, 2),))


def test_zeropoint_does_not_import_onnx():
    code = "import sys, zeropoint, zeropoint.onnx; assert not {'onnx', 'onnxscript', 'onnxruntime'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
