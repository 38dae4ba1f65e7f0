"""How a peer is asked to do what zeropoint does. Each function raises ``Absent``, and says why, where it cannot."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "ENGINES",
    "Absent",
    "OnnxNetwork",
    "engine",
    "onnx_conv",
    "onnx_linear",
    "onnx_linear_dynamic",
    "openvino_network",
    "quantized_layer",
    "torch_ao",
]

ENGINES = ("x86", "onednn")
"""torch's engines for processors of this kind."""


class Absent(RuntimeError):
    """A peer that is not here, or cannot do this."""


# --- torch's own quantization -------------------------------------------------------------------------------------


def torch_ao() -> ModuleType:
    """``torch.ao``, while torch has it."""
    try:
        import torch.ao.nn.quantized
        import torch.ao.nn.quantized.dynamic
        import torch.ao.quantization
    except ImportError as error:
        raise Absent(str(error)) from error
    return torch.ao


@contextmanager
def engine(name: str) -> Iterator[ModuleType]:
    """``torch.ao`` with one of its engines; what is converted inside keeps that engine afterwards."""
    ao = torch_ao()
    if name not in torch.backends.quantized.supported_engines:
        raise Absent(f"this torch has no engine {name}")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield ao
    finally:
        torch.backends.quantized.engine = before


def quantized_layer(ao: ModuleType, layer: nn.Module, x: Tensor, backend: str = "x86") -> tuple[nn.Module, Any]:
    """A float layer through prepare and convert: the quantized module, and ``x`` quantized for it."""
    network = nn.Sequential(ao.quantization.QuantStub(), copy.deepcopy(layer)).eval()
    network.qconfig = ao.quantization.get_default_qconfig(backend)  # type: ignore[assignment]
    ao.quantization.prepare(network, inplace=True)
    with torch.inference_mode():
        network(x)
    ao.quantization.convert(network, inplace=True)
    return network[1], network[0](x)


# --- ONNX Runtime -------------------------------------------------------------------------------------------------


def _session(model: Any, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Absent(str(error)) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _one_operator(
    operator: str, domain: str, inputs: list[tuple[str, np.ndarray | None]], x: np.ndarray, out: int, **attributes: Any
) -> Any:
    """An ONNX model of one operator; inputs with an array are constants, the one without is fed."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as error:
        raise Absent(str(error)) from error
    node = helper.make_node(operator, [name for name, _ in inputs], ["y"], domain=domain, **attributes)
    code = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        operator,
        [helper.make_tensor_value_info("x", code, list(x.shape))],
        [helper.make_tensor_value_info("y", out or TensorProto.UINT8, None)],
        [numpy_helper.from_array(value, name) for name, value in inputs if value is not None and name],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=9)


def _runner(model: Any, x: np.ndarray, threads: int) -> Callable[[], object]:
    session = _session(model, threads)
    return lambda: session.run(None, {"x": x})


def _constants(x_scale: float, x_zero_point: int, weight: Tensor, weight_scale: Tensor) -> list[tuple[str, Any]]:
    return [
        ("x", None),
        ("x_scale", np.float32(x_scale)),
        ("x_zero_point", np.uint8(x_zero_point)),
        ("w", weight.numpy()),
        ("w_scale", weight_scale.numpy().astype(np.float32)),
        ("w_zero_point", np.zeros(weight_scale.numel(), np.int8)),
    ]


def onnx_linear(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    weight: Tensor,
    weight_scale: Tensor,
    out_scale: float,
    out_zp: int,
    threads: int,
) -> Callable[[], object]:
    """ONNX Runtime's integer linear layer (``QGemm``) on uint8 codes (M, K) and int8 weights (N, K)."""
    constants = _constants(x_scale, x_zp, weight.t().contiguous(), weight_scale)
    bias = ("bias", np.zeros(weight.shape[0], np.int32))
    grid = [("y_scale", np.float32(out_scale)), ("y_zero_point", np.uint8(out_zp))]
    model = _one_operator("QGemm", "com.microsoft", [*constants, bias, *grid], x.numpy(), 0)
    return _runner(model, x.numpy(), threads)


def onnx_linear_dynamic(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor, threads: int
) -> Callable[[], object]:
    """ONNX Runtime's dynamic linear layer (``DynamicQuantizeMatMul``) on float32 (M, K)."""
    inputs = [
        ("x", None),
        ("w", weight.t().contiguous().numpy()),
        ("w_scale", weight_scale.numpy().astype(np.float32)),
        ("", None),
        ("bias", bias.detach().numpy()),
    ]
    model = _one_operator("DynamicQuantizeMatMul", "com.microsoft", inputs, x.numpy(), 1)
    return _runner(model, x.numpy(), threads)


def onnx_conv(
    x: Tensor, x_scale: float, x_zp: int, layer: nn.Conv2d, weight: Tensor, weight_scale: Tensor, out_scale: float,
    out_zp: int, threads: int,
) -> Callable[[], object]:  # fmt: skip
    """ONNX Runtime's integer convolution (``QLinearConv``) in its fast layout, channels last."""
    codes = np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy())
    inputs = [
        *_constants(x_scale, x_zp, weight, weight_scale),
        ("y_scale", np.float32(out_scale)),
        ("y_zero_point", np.uint8(out_zp)),
        ("bias", np.zeros(weight.shape[0], np.int32)),
    ]
    model = _one_operator(
        "QLinearConv",
        "com.microsoft",
        inputs,
        codes,
        0,
        channels_last=1,
        strides=list(layer.stride),
        pads=[*layer.padding, *layer.padding],
        dilations=list(layer.dilation),
        group=layer.groups,
        kernel_shape=list(layer.kernel_size),
    )
    return _runner(model, codes, threads)


class OnnxNetwork:
    """A float network exported to ONNX and quantized by ONNX Runtime's tools: QDQ, per-channel weights, uint8.

    Args:
        network: a float network in evaluation mode.
        calibration: float32 batch.
        inputs: example input of the export; its first dimension stays free.
    """

    def __init__(self, network: nn.Module, calibration: Tensor) -> None:
        try:
            import onnx  # noqa: F401
            from onnxruntime import quantization as tools
            from onnxruntime.quantization.shape_inference import quant_pre_process
        except ImportError as error:
            raise Absent(str(error)) from error
        self.folder = tempfile.TemporaryDirectory()
        self.float_file = str(Path(self.folder.name) / "float.onnx")
        self.int8_file = str(Path(self.folder.name) / "int8.onnx")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network,
                (calibration[:1],),
                self.float_file,
                input_names=["x"],
                output_names=["y"],
                dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
                dynamo=False,
            )
        # Without this step biases that layers share stay outside the integer kernels: half as fast on ResNet-18.
        quant_pre_process(self.float_file, self.float_file)
        batches = iter([{"x": batch.numpy()} for batch in calibration.split(8)])

        class Reader(tools.CalibrationDataReader):  # type: ignore[misc, unused-ignore]
            def get_next(self) -> dict[str, np.ndarray] | None:
                return next(batches, None)

        tools.quantize_static(
            self.float_file,
            self.int8_file,
            Reader(),
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
        )

    @property
    def megabytes(self) -> float:
        """Size of the int8 file, in millions of bytes."""
        return Path(self.int8_file).stat().st_size / 1e6

    def session(self, threads: int, int8: bool = True) -> Callable[[Tensor], Tensor]:
        """ONNX Runtime on the int8 or the float file."""
        session = _session(self.int8_file if int8 else self.float_file, threads)
        return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def openvino_network(file: str, threads: int) -> Callable[[Tensor], Tensor]:
    """OpenVINO on an ONNX file; a QDQ file runs in its int8 kernels."""
    try:
        import openvino
    except ImportError as error:
        raise Absent(str(error)) from error
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.compile_model(file, "CPU", settings).create_infer_request()
    return lambda x: torch.from_numpy(request.infer([x.numpy()], share_inputs=True)[0])
