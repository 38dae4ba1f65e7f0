"""How a peer is asked to do what zeropoint does. Each function raises ``Absent``, and says why, where it cannot."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import zeropoint
from benchmarks.harness import SETTINGS
from zeropoint import backends

__all__ = [
    "ENGINES",
    "HALVES",
    "Absent",
    "Graphed",
    "OnnxNetwork",
    "check_codes",
    "engine",
    "float_layers",
    "int_mm",
    "onnx_conv",
    "onnx_linear",
    "onnx_linear_dynamic",
    "openvino_network",
    "quantized_layer",
    "torch_ao",
    "torchao_linear",
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
    if SETTINGS.on_gpu:
        raise Absent("torch.ao has no quantized layers on CUDA")
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


def quantized_layer(
    ao: ModuleType, layer: nn.Module, x: Tensor, backend: str = "x86", signed: bool = False
) -> tuple[nn.Module, Any]:
    """A float layer through prepare and convert: the module, and ``x`` quantized for it, to int8 if ``signed``."""
    network = nn.Sequential(ao.quantization.QuantStub(), copy.deepcopy(layer)).eval()
    qconfig = ao.quantization.get_default_qconfig(backend)
    if signed:
        qconfig = qconfig._replace(activation=qconfig.activation.with_args(dtype=zeropoint.qint8))
    network.qconfig = qconfig  # type: ignore[assignment]
    ao.quantization.prepare(network, inplace=True)
    with torch.inference_mode():
        network(x)
    ao.quantization.convert(network, inplace=True)
    if SETTINGS.on_gpu:
        network, x = network.to(SETTINGS.device), x.to(SETTINGS.device)
    return network[1], network[0](x)


def check_codes(layer: nn.Module, codes: Any) -> None:
    """Raises AssertionError unless a quantized layer of ours gives the integers of the portable kernels."""
    if SETTINGS.on_gpu or not backends.is_native():
        return
    wanted, best = layer(codes).int_repr(), backends.active_isa()
    try:
        backends.set_isa("portable")
        if not torch.equal(layer(codes).int_repr(), wanted):
            raise AssertionError(f"{best} and portable kernels give different codes")
    finally:
        backends.set_isa(best)


# --- on a GPU -----------------------------------------------------------------------------------------------------

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def float_layers(layer: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """The float layer on its input: float32, and on a GPU bfloat16 and float16 too."""
    calls: dict[str, Callable[[], object]] = {"float32": partial(layer, x)}
    if x.is_cuda:
        for name, dtype in HALVES.items():
            calls[name] = partial(copy.deepcopy(layer).to(dtype), x.to(dtype))
    return calls


class Graphed:
    """A network that a CUDA graph replays: captured anew for every shape of its input.

    Args:
        network: on a GPU, in evaluation mode.
        dtype: what network and inputs are cast to; None leaves them.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.network, self.dtype = network if dtype is None else network.to(dtype), dtype
        self.graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape not in self.graphs:
            self.graphs[x.shape] = self._captured(x)
        graph, given, out = self.graphs[x.shape]
        given.copy_(x)
        graph.replay()
        return out

    def _captured(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        given = x.clone(memory_format=torch.channels_last) if self.dtype is None else x.to(self.dtype)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles kernels and fills caches, which a capture must not
                self.network(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.network(given)
        return graph, given, out


def int_mm(x: Tensor, x_zero_point: int, weight: Tensor, factor: Tensor, zero_point: int) -> Callable[[], object]:
    """``torch._int_mm`` of uint8 codes (M, K) and int8 weights (N, K), then the last step as torch operators.

    Args:
        factor: float32, one an output channel: input scale times weight scale over output scale.
    """
    if x.shape[0] <= 16 or x.shape[1] % 8 or weight.shape[0] % 8:
        raise Absent("torch._int_mm takes more than 16 rows, and sizes that 8 divides")
    signed, columns = (x.to(torch.int16) - 128).to(torch.int8), weight.t()
    shift = (x_zero_point - 128) * weight.to(torch.int32).sum(1, dtype=torch.int32)

    def run() -> Tensor:
        steps = (torch._int_mm(signed, columns) - shift).to(torch.float32) * factor
        return (torch.round(steps) + zero_point).clamp_(0, 255).to(torch.uint8)

    return run


def torchao_linear(layer: nn.Linear, x: Tensor) -> Callable[[], object]:
    """torchao's int8 weights with int8 activations that are quantized on the way."""
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    except ImportError as error:
        raise Absent(str(error)) from error
    model = nn.Sequential(copy.deepcopy(layer).to(torch.bfloat16))
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return partial(model, x.to(torch.bfloat16))


# --- ONNX Runtime -------------------------------------------------------------------------------------------------


def _session(model: Any, threads: int) -> Any:
    try:
        import onnxruntime

        if SETTINGS.on_gpu:
            raise Absent("measured on processors only")
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
    if SETTINGS.on_gpu:
        raise Absent("measured on processors only")
    try:
        import onnx
        from onnx import helper, numpy_helper
    except ImportError as error:
        raise Absent(str(error)) from error
    node = helper.make_node(operator, [name for name, _ in inputs], ["y"], domain=domain, **attributes)
    code = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [node],
        operator,
        [helper.make_tensor_value_info("x", code, list(x.shape))],
        [helper.make_tensor_value_info("y", out or code, None)],
        [numpy_helper.from_array(value, name) for name, value in inputs if value is not None and name],
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=9)


def _runner(model: Any, x: np.ndarray, threads: int) -> Callable[[], object]:
    session = _session(model, threads)
    return lambda: session.run(None, {"x": x})


def _constants(x_scale: float, x_zero_point: np.generic, weight: Tensor, weight_scale: Tensor) -> list[tuple[str, Any]]:
    return [
        ("x", None),
        ("x_scale", np.float32(x_scale)),
        ("x_zero_point", x_zero_point),
        ("w", weight.cpu().numpy()),
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
    """ONNX Runtime's integer linear layer (``QGemm``) on 8-bit codes (M, K) and int8 weights (N, K)."""
    code = x.numpy().dtype.type
    constants = _constants(x_scale, code(x_zp), weight.t().contiguous(), weight_scale)
    bias = ("bias", np.zeros(weight.shape[0], np.int32))
    grid = [("y_scale", np.float32(out_scale)), ("y_zero_point", code(out_zp))]
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
        *_constants(x_scale, np.uint8(x_zp), weight, weight_scale),
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
