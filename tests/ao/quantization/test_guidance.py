"""What the workflow says to a user who took a wrong turn: the module, what was seen, the cure; nothing half done."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn

import zeropoint as zp
from zeropoint.ao import quantization as aq
from zeropoint.ao.nn import quantized as nnq

# --- stubs of torch.ao --------------------------------------------------------------------------------------------


def torch_class(name: str, home: str) -> type[nn.Module]:
    """What torch.ao's class of that name looks like, on a torch that has none."""
    return type(name, (nn.Module,), {"__module__": home, "forward": lambda self, x: x})


FOREIGN = [
    ("QuantStub", "torch.ao.quantization.stubs", "zeropoint.ao.quantization"),
    ("DeQuantStub", "torch.ao.quantization.stubs", "zeropoint.ao.quantization"),
    ("QuantStub", "torch.quantization.stubs", "zeropoint.ao.quantization"),
    ("FloatFunctional", "torch.ao.nn.quantized.modules.functional_modules", "zeropoint.ao.nn.quantized"),
]


@pytest.mark.parametrize(("name", "home", "ours"), FOREIGN)
@pytest.mark.parametrize("step", ["prepare", "prepare_qat", "convert"])
@pytest.mark.parametrize("subclass", [False, True])
def test_a_stub_of_torch_names_its_namesake(name: str, home: str, ours: str, step: str, subclass: bool) -> None:
    kind = torch_class(name, home)
    if subclass:
        kind = type("Mine", (kind,), {})
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"mark": kind()})).train()
    model.qconfig = aq.default_qat_qconfig
    before = dict(model.named_modules())
    with pytest.raises(TypeError, match=rf"'1\.mark' is torch's {home}\.{name}.*import {name} from {ours} instead"):
        getattr(aq, step)(model, inplace=True)
    assert dict(model.named_modules()) == before


def test_a_class_of_the_users_with_such_a_name_is_fine() -> None:
    model = nn.Sequential(torch_class("QuantStub", "my_package")(), nn.Linear(2, 2))
    model.qconfig = aq.default_qconfig
    aq.prepare(model)


# --- layers that stay in float ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.quant, self.body, self.dequant = aq.QuantStub(), nn.ModuleDict({"rnn": layer}), aq.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body["rnn"](self.quant(x))
        return self.dequant(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_a_float_layer_that_gets_codes_is_named(kind: type[nn.Module]) -> None:
    model = Recurrent(kind(4, 4)).eval()
    model.qconfig = aq.get_default_qconfig()
    prepared = aq.prepare(model)
    prepared(torch.randn(3, 4))
    quantized = aq.convert(prepared)
    with pytest.raises(TypeError, match=rf"{kind.__name__} 'body\.rnn' stayed in float.*DeQuantStub in front of it"):
        quantized(torch.randn(3, 4))
    quantized.body["rnn"](torch.randn(3, 4))  # float tensors are its own business
    file = io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    with zp.serialization.safe_globals([Recurrent]):
        loaded = torch.load(file, weights_only=True)
    for one in (loaded, copy.deepcopy(quantized), aq.convert(quantized)):
        with pytest.raises(TypeError, match="stayed in float"):
            one(torch.randn(3, 4))


# --- names --------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"project": nn.Linear(4, 4)})
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.encoder["project"](x))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"clasifier"}, r"'clasifier' \(is 'classifier' meant\?\)"),
        ({nn.Linear, "project"}, r"'project' \(is 'encoder\.project' meant\?\)"),
        ({"classifier": None, "zzz": None}, r": 'zzz'$"),
        (aq.QConfigMapping().set_module_name("encoder.projekt", None), r"\(is 'encoder\.project' or"),
    ],
    ids=["misspelt", "path", "dict", "mapping"],
)
def test_a_name_that_no_module_has(spec: object, text: str) -> None:
    model = Head()
    with pytest.raises(ValueError, match=rf"qconfig_spec names modules that the model does not have.*{text}"):
        aq.quantize_dynamic(model, spec, inplace=True)
    assert type(model.classifier) is nn.Linear
    assert not hasattr(model, "qconfig")


def test_names_of_prepare_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"qconfig_mapping names.*'classifier' meant"):
        aq.prepare(Head().eval(), qconfig_mapping={"clasifier": aq.default_qconfig})
    mapping = aq.QConfigMapping().set_global(aq.default_qconfig).set_module_name("encoder", None)
    prepared = aq.prepare(Head().eval(), qconfig_mapping=mapping)
    assert hasattr(prepared.classifier, "activation_post_process")


def test_known_names_and_shared_modules() -> None:
    shared = nn.Linear(3, 3)
    model = aq.quantize_dynamic(nn.Sequential(shared, shared), {"1"})
    assert model[0] is not None


# --- values that are none -----------------------------------------------------------------------------------------


def test_what_is_no_tensor_or_number_is_said() -> None:
    codes = torch.zeros(2, dtype=torch.int8)
    x = torch.ones(2)
    with pytest.raises(TypeError, match="codes must be an int8, uint8 or int32 tensor, got NoneType"):
        zp.QTensor.from_codes(None, 0.1)
    with pytest.raises(TypeError, match="scale must be a number, got None"):
        zp.QTensor.from_codes(codes, None)
    with pytest.raises(TypeError, match="zero_point must be a number, got None"):
        zp.quantize_per_tensor(x, 0.1, None)
    with pytest.raises(TypeError, match=r"scale must be a number, got '0\.1'"):
        zp.quantize_per_tensor(x, "0.1", 0)
    with pytest.raises(TypeError, match="dequantize takes a tensor or a list of them, got NoneType"):
        zp.dequantize(None)
    with pytest.raises(TypeError, match="Quantize takes a float tensor, got list"):
        nnq.Quantize(0.1, 0, zp.quint8)([1.0])
    with pytest.raises(TypeError, match="DeQuantize takes one tensor, got tuple"):
        nnq.DeQuantize()((x, x))


def test_storage_of_a_quantized_tensor() -> None:
    q = zp.quantize_per_tensor(torch.ones(4), 0.1, 0, zp.qint8)
    with pytest.raises(TypeError, match=r"storage is not defined on quantized tensors: call untyped_storage\(\)"):
        q.storage()
    assert q.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("sizes", [(16, 0), (0, 16), (-1, 2)])
def test_layers_without_weights_are_not_made(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="Linear needs sizes of at least 1"):
        nnq.Linear(*sizes)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_weights_stay_in_float() -> None:
    model = aq.quantize_dynamic(nn.ModuleList([nn.Linear(4, 0), nn.Linear(4, 4)]))
    assert [type(part) is nn.Linear for part in model] == [True, False]
    assert "has an empty weight" in str(model.quantization_summary)


# --- inference mode -----------------------------------------------------------------------------------------------


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = (aq.QuantStub(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4), aq.DeQuantStub())
    return nn.Sequential(*layers)


def static() -> nn.Module:
    model = aq.fuse_modules(convolutional().eval(), [["1", "2"]])
    model.qconfig = aq.get_default_qconfig()
    prepared = aq.prepare(model)
    prepared(torch.ones(4, 3, 4, 4))
    return aq.convert(prepared)


def dynamic() -> nn.Module:
    torch.manual_seed(0)
    return aq.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval())


def training() -> nn.Module:
    model = aq.fuse_modules_qat(convolutional().train(), [["1", "2"]])
    model.qconfig = aq.get_default_qat_qconfig()
    return aq.prepare_qat(model)


@pytest.mark.parametrize("make", [static, dynamic, training])
def test_models_made_under_inference_mode_hold_normal_tensors(make: object) -> None:
    with torch.inference_mode():
        model = make()
    own = {name for name, _ in convolutional().named_parameters()}
    made = [*model.named_parameters(), *model.named_buffers()]
    float_parts = {name for name, _ in model.named_parameters() if make is training}
    assert [name for name, tensor in made if tensor.is_inference() and name not in own | float_parts] == []


def test_fusing_under_inference_mode_makes_normal_parameters() -> None:
    model = convolutional().eval()
    with torch.inference_mode():
        fused = aq.fuse_modules(model, [["1", "2"]])
    fused.load_state_dict({name: value + 1 for name, value in fused.state_dict().items()})
    assert all(parameter.requires_grad for parameter in fused.parameters())


@pytest.mark.parametrize("make", [static, dynamic])
def test_a_state_is_loaded_into_what_was_made_under_inference_mode(make: object) -> None:
    with torch.inference_mode():
        model = make()
    state = {name: value.clone() for name, value in make().state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# --- converted first, loaded afterwards ---------------------------------------------------------------------------


def test_a_model_that_is_converted_to_be_loaded_into_says_so_once() -> None:
    model = convolutional().eval()
    model.qconfig = aq.get_default_qconfig()
    with pytest.warns(UserWarning, match="saw no data") as caught:
        quantized = aq.convert(aq.prepare(aq.fuse_modules(model, [["1", "2"]])))
    (only,) = caught
    assert only.filename == __file__
    assert "its 3 output grids are the default" in str(only.message)
    assert "fine if load_state_dict() comes next" in str(only.message)
    source = static()
    quantized.load_state_dict(source.state_dict())
    x = torch.randn(2, 3, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(quantized(x), source(x))


def test_many_uncalibrated_modules_are_counted() -> None:
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(15)])
    model.qconfig = aq.default_qconfig
    prepared = aq.prepare(model)
    prepared[0](torch.randn(4, 2))
    with pytest.warns(UserWarning, match=r"'1', '2', .*'10' and 4 more"):
        aq.convert(prepared)


# --- the dtype behind the quantized part --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_quantized_part_gives_the_dtype_of_the_float_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(aq.QuantStub(), nn.Linear(4, 4), aq.DeQuantStub(), nn.Linear(4, 2)).eval().to(dtype)
    model.qconfig = aq.get_default_qconfig()
    model[3].qconfig = None
    prepared = aq.prepare(model)
    x = torch.randn(8, 4, dtype=dtype)
    prepared(x)
    quantized = aq.convert(prepared)
    assert quantized(x).dtype == dtype
    assert copy.deepcopy(quantized)(x).dtype == dtype
    assert not quantized[2]._forward_hooks


def test_autocast_in_calibration_is_not_the_models_dtype() -> None:
    model = nn.Sequential(aq.QuantStub(), nn.Linear(4, 4), aq.DeQuantStub(), nn.Linear(4, 2)).eval()
    model.qconfig = aq.get_default_qconfig()
    model[3].qconfig = None
    prepared = aq.prepare(model)
    with torch.autocast("cpu", torch.bfloat16):
        prepared(torch.randn(8, 4))
    assert aq.convert(prepared)(torch.randn(8, 4)).dtype == torch.float32
