"""The documented workflows of this API, as they stand in its manual: dynamic, static, training, one QAT module."""

from __future__ import annotations

import torch as tp

from zeropoint.ao.nn.qat import Linear as QATLinear
from zeropoint.ao.nn.quantized import QuantizedLinear
from zeropoint.ao.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    default_per_channel_qat_qconfig,
    default_per_channel_qconfig,
    disable_observer,
    prepare,
    prepare_qat,
    quantize_dynamic,
)


def test_dynamic() -> None:
    model = tp.nn.Sequential(tp.nn.Linear(128, 64), tp.nn.ReLU(), tp.nn.Linear(64, 10))
    qmodel = quantize_dynamic(model)
    x = tp.randn(4, 128)
    assert (qmodel(x) - model(x)).abs().max() < 0.05
    assert qmodel[0].bias.dtype == tp.float32


def static_model() -> tp.nn.Module:
    return tp.nn.Sequential(
        QuantStub(),
        tp.nn.Linear(128, 64),
        tp.nn.ReLU(),
        tp.nn.Linear(64, 10),
        DeQuantStub(),
    )


def test_static() -> None:
    model = static_model()
    model.qconfig = default_per_channel_qconfig
    calibration_data = [(tp.randn(16, 128), None) for _ in range(3)]
    m = prepare(model)
    for x, _ in calibration_data:
        m(x)
    quantized = convert(m)
    inside: list[bool] = []
    quantized[3].register_forward_pre_hook(lambda module, args: inside.append(args[0].is_quantized))
    x = calibration_data[0][0]
    assert (quantized(x) - model(x)).abs().max() < 0.1
    assert inside == [True]


def test_training() -> None:
    model = static_model()
    model.train()
    model.qconfig = default_per_channel_qat_qconfig
    trained = prepare_qat(model)
    optimizer = tp.optim.SGD(trained.parameters(), lr=0.01)
    loss_fn = tp.nn.CrossEntropyLoss()
    for x, target in [(tp.randn(16, 128), tp.randint(10, (16,))) for _ in range(5)]:
        optimizer.zero_grad()
        loss = loss_fn(trained(x), target)
        loss.backward()
        optimizer.step()
    trained.apply(disable_observer)
    inference = convert(trained.eval(), use_precomputed_fake_quant=True)
    x = tp.randn(8, 128)
    assert (inference(x) - trained(x)).abs().max() <= 1.01 * inference[3].scale


def test_one_module() -> None:
    float_linear = tp.nn.Linear(6, 4)
    loss_fn = tp.nn.functional.mse_loss
    float_linear.qconfig = default_per_channel_qconfig
    qat_linear = QATLinear.from_float(float_linear)
    qat_linear.qconfig = default_per_channel_qconfig

    qat_linear = prepare(qat_linear)
    for x, y in [(tp.randn(8, 6), tp.randn(8, 4)) for _ in range(4)]:
        loss = loss_fn(qat_linear(x), y)
        loss.backward()
    q_linear = convert(qat_linear)
    assert type(q_linear) is QuantizedLinear
    scales = q_linear.weight().q_per_channel_scales()
    assert tp.equal(scales.float(), qat_linear.weight_fake_quant.scale)
