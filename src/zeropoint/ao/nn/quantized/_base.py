"""What quantized modules share: their place in the model, their output grid, their weights.

* :class:`QuantizedModule` names itself in errors, and keeps what is derived from its buffers up to date;
* :class:`GridModule` has an output grid, ``scale`` and ``zero_point``: buffers, read as a float and an int;
* :class:`WeightedModule` has integer weights, a float bias and the packed weights that the kernels read, and says in
  its own words what they refuse;
* :class:`CodesModule` has both: it gives its operator the numbers of its weights and of two grids;
* :class:`BoundModule` is one that binds these numbers once for many calls;
* :class:`DynamicModule` has weights and takes and gives float tensors.

The numbers and the packed weights that a forward pass uses are derived from the buffers: when a module is made, moved,
loaded, copied or unpickled, and whenever a forward pass finds that a buffer was replaced or written to. So they follow
every write that torch counts, and a forward pass does not wait for a device.

May import: ``dtypes``, ``grid``, ``tensor``, ``ops.quantize`` (dtypes of reals), ``backends.cpu``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from zeropoint import grid
from zeropoint.ao.nn.quantized._torch_layout import flatten_packed_params
from zeropoint.ao.nn.quantized._weights import BiasView, join_weight, split_weight
from zeropoint.backends.cpu import is_native
from zeropoint.dtypes import QDtype, as_qdtype, qint8, qint32, quint8
from zeropoint.ops.quantize import FLOAT_DTYPES
from zeropoint.tensor import QTensor

__all__ = [
    "REFUSALS",
    "BoundModule",
    "DynamicModule",
    "GridModule",
    "OutputGrid",
    "QuantizedModule",
    "WeightedModule",
]

OutputGrid = tuple[float, int, int, int, QDtype]
"""scale, zero_point, smallest and largest code, dtype of what a module returns."""

InputGrid = tuple[torch.dtype, float, int]
"""Dtype of the codes, scale and zero point of what a module is given."""

BoundCall = tuple[Tensor, Tensor, Tensor, tuple[QDtype, float, int]]
"""Weight, packed weight and bound arguments for one grid of the input; dtype, scale and zero point of the output."""

SeenGrid = tuple[Tensor, int, Tensor, int, dict[str, OutputGrid]]
"""Scale and zero point, how often each was written to, and the grids of the output by the input's dtype."""

SeenBuffers = list[tuple[str, Tensor | None, int]]
"""Buffers by name, and how often each was written to."""

REFUSALS = (RuntimeError, ValueError, IndexError)
"""What operators over plain tensors raise on an input that does not fit: see ``WeightedModule._explain``."""

_PLACE_IN_SOURCE = re.compile(r"^\w+, \S+\.(cpp|h):\d+, ")


def _version(tensor: Tensor) -> int:
    """Counts writes to a tensor; tensors made under inference_mode do not count."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


def _is_watched() -> bool:
    """Whether something sees, and may keep, the operators that are called: a compiler, a tracer, a dispatch mode."""
    return torch.compiler.is_compiling() or torch._C._is_tracing() or is_in_torch_dispatch_mode()


def _is_unread(tensor: Tensor | None) -> bool:
    """Whether torch.load has made a tensor and not filled it yet: a stream holds values behind the objects.

    The mark stays on the storage for good, so it counts only while torch.load is still reading the stream.
    """
    if tensor is None or not getattr(tensor.untyped_storage(), "_torch_load_uninitialized", False):
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_legacy_load":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class QuantizedModule(nn.Module):
    """A module that computes on quantized tensors."""

    OBSERVED: ClassVar[bool] = False
    """Whether the float twin needs an observer on its output. False: the output keeps the input's grid."""

    ON_REQUEST: ClassVar[bool] = False
    """Whether ``quantize_dynamic`` takes this twin only where its ``qconfig_spec`` names the float class."""

    KIND: ClassVar[str] = "quantized"
    """What its class is called in error messages, where float classes have the same names."""

    module_path: str = ""
    """Where ``convert`` put the module in the model, for error messages."""

    def _where(self) -> str:
        """The module in error messages: ``quantized Conv2d 'features.0'``."""
        path = f" {self.module_path!r}" if self.module_path else ""
        return f"{self.KIND} {type(self).__name__}{path}"

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"

    def _refuse(self, x: Any) -> NoReturn:
        if isinstance(x, QTensor):
            raise RuntimeError(
                f"{self._where()} takes activations on one grid per tensor, got {x.qscheme()} along axis {x.axis}: "
                "quantize them again with quantize_per_tensor(x.dequantize(), scale, zero_point, dtype)"
            )
        seen = f"a {x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"{self._where()} takes a quantized tensor, got {seen}: put a QuantStub in front of it before prepare() "
            "(and a DeQuantStub behind the quantized part), or quantize the input with quantize_per_tensor"
        )

    # --- moving, copying, loading ---

    DERIVED: ClassVar[tuple[str, ...]] = ()
    """Attributes that are made from buffers: neither copied nor pickled."""

    def _derive(self) -> None:
        """Makes what the forward pass uses from the buffers."""

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Brings what a checkpoint holds under ``prefix`` to the shapes and dtypes of this module, before loading."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: t for name, t in self._buffers.items() if t is not None and t.is_floating_point()}
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in before.items():
            after = cast(Tensor, self._buffers[name])
            if after.dtype != tensor.dtype:  # half() and the like: grids and biases keep their precision
                self._buffers[name] = tensor.to(after.device)
        self._derive()
        return result

    def __getstate__(self) -> dict[str, Any]:
        derived = {name for cls in type(self).__mro__ for name in getattr(cls, "DERIVED", ())}
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not any(_is_unread(buffer) for buffer in self._buffers.values()):
            self._derive()  # else at the first forward pass

    def _counted(self, name: str) -> Tensor:
        """A buffer that counts its writes; one made under inference_mode, which does not, is replaced by a copy.

        Any other stays as it is, so that a thread in a forward pass does not undo what another assigns.
        """
        buffer = cast(Tensor, self._buffers[name])
        if buffer.is_inference():
            with torch.inference_mode(False):
                buffer = self._buffers[name] = buffer.clone()
        return buffer

    def _refuse_float_weights(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Copied into codes, floats would be cut to whole numbers without a word."""
        for name, buffer in self._buffers.items():
            value = state_dict.get(prefix + name)
            takes_codes = buffer is not None and buffer.dtype == torch.int8
            if takes_codes and isinstance(value, Tensor) and value.dtype.is_floating_point:
                raise TypeError(
                    f"{prefix}{name} is {value.dtype}, and a quantized {type(self).__name__} loads int8 codes: "
                    "quantize the float model, or load the state dict of a quantized one"
                )

    def _refuse_impossible_scales(self, state_dict: dict[str, Any], prefix: str) -> None:
        """A scale of 0, NaN or below makes no grid: what is loaded is held to what constructors ask."""
        for name in self._buffers:
            value = state_dict.get(prefix + name)
            if not name.endswith("scale") or not isinstance(value, Tensor) or value.is_meta:
                continue
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise ValueError(f"{prefix}{name} must be finite and above 0, got {value}")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        for name in self._buffers:
            if isinstance(state_dict.get(prefix + name), nn.Parameter):  # which cannot be assigned to a buffer
                state_dict[prefix + name] = state_dict[prefix + name].detach()
        self._adapt_state(state_dict, prefix)
        self._refuse_float_weights(state_dict, prefix)
        self._refuse_impossible_scales(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self._derive()


class GridModule(QuantizedModule):
    """A quantized module with an output grid of its own.

    ``scale`` (float64) and ``zero_point`` are buffers, so they move and are saved; as attributes they read as a float
    and an int, and plain numbers may be assigned. The zero point is a code: it is stored in the storage dtype of the
    output where that is known, and as int64 where the output takes the input's dtype.
    """

    OBSERVED = True
    rectifier: str | None = None
    """``"relu"`` or ``"relu6"`` when the module clamps what it computes, else None."""

    DERIVED: ClassVar[tuple[str, ...]] = ("_grid_seen",)
    _grid_seen: SeenGrid | None = None

    def _init_grid(self, scale: float | Tensor, zero_point: int | Tensor, dtype: Any = None) -> None:
        """Registers the grid. ``dtype`` is the quantized dtype of the output; None: that of the input."""
        storage = torch.int64 if dtype is None else as_qdtype(dtype).storage
        self._buffers["scale"] = torch.tensor(float(scale), dtype=torch.float64)
        self._buffers["zero_point"] = torch.tensor(int(zero_point), dtype=storage)
        self._derive_grid()

    @property
    def scale(self) -> float:
        """The step of the output grid; a plain number may be assigned."""
        return cast(float, self._number("scale"))

    @scale.setter
    def scale(self, value: float | Tensor) -> None:
        self._set_number("scale", value if isinstance(value, Tensor) else grid.check_scale(value))

    @property
    def zero_point(self) -> int:
        """The code of real 0 in the output; a plain number may be assigned."""
        return cast(int, self._number("zero_point"))

    @zero_point.setter
    def zero_point(self, value: int | Tensor) -> None:
        if not isinstance(value, Tensor):
            bounds = self.output_dtype or qint32
            value = grid.check_zero_point(value, bounds.qmin, bounds.qmax)
        self._set_number("zero_point", value)

    def _number(self, name: str) -> Any:
        buffer = cast(Tensor, self._buffers[name])
        return buffer if buffer.is_meta else buffer.item()  # load_state_dict looks at it before it fills it

    def _set_number(self, name: str, value: float | Tensor) -> None:
        before = cast(Tensor, self._buffers[name])
        if isinstance(value, Tensor):
            self._buffers[name] = value.detach().reshape(())
        else:
            self._buffers[name] = torch.tensor(value, dtype=before.dtype, device=before.device)
        self._derive_grid()

    @property
    def output_dtype(self) -> QDtype | None:
        """The quantized dtype of the output; None where it is the input's."""
        dtype = cast(Tensor, self._buffers["zero_point"]).dtype
        return None if dtype == torch.int64 else as_qdtype(dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("scale", "zero_point"):
            object.__setattr__(self, name, value)  # the properties; Module takes nothing but tensors for buffers
        else:
            super().__setattr__(name, value)

    def _derive(self) -> None:
        super()._derive()
        self._derive_grid()

    def _derive_grid(self) -> None:
        """Reads the numbers of the forward pass off the buffers."""
        scale, zero_point = self._counted("scale"), self._counted("zero_point")
        scale_version, zero_version = _version(scale), _version(zero_point)
        grids: dict[str, OutputGrid] = {}
        if not (scale.is_meta or zero_point.is_meta):
            step, zero = float(scale), int(zero_point)
            declared = self.output_dtype
            for qdtype in (qint8, quint8, qint32):
                out = declared or qdtype
                if out.qmin <= zero <= out.qmax:
                    grids[qdtype.name] = (step, zero, *self._code_bounds(step, zero, out), out)
        # One object, as another thread may be in a forward pass.
        self._grid_seen = (scale, scale_version, zero_point, zero_version, grids)

    def _code_bounds(self, scale: float, zero_point: int, qdtype: QDtype) -> tuple[int, int]:
        low, high = qdtype.qmin, qdtype.qmax
        if self.rectifier is not None:
            low = zero_point
        if self.rectifier == "relu6":
            high = grid.code_of(6.0, scale, zero_point, qdtype.qmin, qdtype.qmax)
        return low, high

    def _output_grid(self, input_dtype: QDtype) -> OutputGrid:
        """The grid of the output for an input of this dtype."""
        if self._grid_seen is None:
            self._derive_grid()
        scale, scale_version, zero_point, zero_version, grids = cast(SeenGrid, self._grid_seen)
        if not torch.compiler.is_compiling():
            buffers = self._buffers
            if (
                buffers["scale"] is not scale
                or buffers["zero_point"] is not zero_point
                or _version(scale) != scale_version
                or _version(zero_point) != zero_version
            ):
                self._derive_grid()
                grids = cast(SeenGrid, self._grid_seen)[4]
        found = grids.get(input_dtype.name)
        if found is None:
            raise ValueError(
                f"{self._where()} has zero_point {self.zero_point}, which is no code of {input_dtype}: "
                "assign a zero_point, or give it an input of the dtype of its calibration"
            )
        return found

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        super()._adapt_state(state_dict, prefix)
        for name in ("scale", "zero_point"):
            value = state_dict.get(prefix + name)
            if value is None:
                continue
            value = torch.as_tensor(value)
            if value.numel() == 1:
                value = value.reshape(())
            buffer = cast(Tensor, self._buffers[name])
            if name == "zero_point" and value.dtype in (torch.int8, torch.uint8) and value.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(value.dtype)
            state_dict[prefix + name] = value


class WeightedModule(QuantizedModule):
    """A quantized module with weights.

    Its state is flat plain tensors: ``weight`` (int8 codes), ``weight_scale`` (float32, without dimensions for one
    grid, else one entry an output channel), ``weight_zero_point`` (int32, of the same shape), ``bias`` (float32, if
    there is one). ``module.weight`` and ``module.bias`` read as tensors, as in the float module,
    and may also be called, as ``torch.ao``'s methods are.
    """

    CHANNEL_AXIS: ClassVar[int] = 0
    """The output channels' dimension of the weight."""

    RANK: ClassVar[int] = 0
    """Spatial dimensions of the input, behind its channels; 0: its last dimension holds the features."""

    INPUT_SIZE: ClassVar[str] = "in_features"
    """The attribute that says how many features or channels the input has."""

    _packed_seen: tuple[Tensor, int, Tensor | None] | None = None

    def _init_weight(self, shape: tuple[int, ...], bias: bool, device: Any = None) -> None:
        if not all(isinstance(size, int) for size in shape):
            raise TypeError(f"the sizes of {type(self).__name__} must be whole numbers, got weights of shape {shape}")
        if min(shape) < 1:
            raise ValueError(f"{type(self).__name__} needs sizes of at least 1, got weights of shape {shape}")
        self._buffers["weight"] = torch.zeros(shape, dtype=torch.int8, device=device)
        self._buffers["weight_scale"] = torch.ones((), device=device)
        self._buffers["weight_zero_point"] = torch.zeros((), dtype=torch.int32, device=device)
        self._buffers["bias"] = torch.zeros(self._channels, device=device) if bias else None
        self._buffers["_packed"] = None
        self._non_persistent_buffers_set.add("_packed")

    @property
    def _channels(self) -> int:
        """How many output channels there are."""
        raise NotImplementedError

    def _pack(self, weight: Tensor) -> Tensor:
        """The weights as the kernels read them."""
        raise NotImplementedError

    # --- what an input must be ---

    def _explain(self, error: Exception, x: Tensor) -> NoReturn:
        """Raises what an operator refused of ``x`` in words that name this module, what was seen and the cure.

        Operators check all that they use, so a forward pass that goes well pays for no second check.

        Raises:
            TypeError: a dtype that the module does not take. RuntimeError: sizes that do not fit. Else an error of the
            operator's own class, with its words.
        """
        if type(error) not in REFUSALS:
            raise error  # of memory, or of what traces: neither is about the input
        if str(error).startswith(self._where()):
            raise error  # in words of the module already
        self._refuse_dtype(x, error)
        shape, size = tuple(x.shape), getattr(self, self.INPUT_SIZE)
        if self.RANK:
            sizes = ", ".join([str(size), *"DHW"[3 - self.RANK :]])
            form, has_dims = f"(N, {sizes}) or ({sizes})", len(shape) - self.RANK in (1, 2)
        else:
            form, has_dims = f"(..., {size})", len(shape) > 0
        if not has_dims:
            cure = "reshape the input"
        elif shape[-1 - self.RANK] != size:
            cure = f"reshape or permute the input, or make the layer with {self.INPUT_SIZE}={shape[-1 - self.RANK]}"
        else:
            words = _PLACE_IN_SOURCE.sub("", str(error))
            raise type(error)(f"{self._where()} refuses an input of shape {shape}: {words}") from error
        raise RuntimeError(
            f"{self._where()} with {self.INPUT_SIZE}={size} takes an input {form}, got shape {shape}: {cure}"
        ) from error

    def _refuse_dtype(self, x: Tensor, error: Exception) -> None:
        """Raises TypeError for activations that are not of 8 bits."""
        if isinstance(x, QTensor) and x.qdtype not in (qint8, quint8):
            raise TypeError(
                f"{self._where()} takes qint8 or quint8 activations, got {x.qdtype}: bring them to 8 bits with "
                "zeropoint.requantize(x, scale, zero_point, zeropoint.quint8)"
            ) from error

    # --- weights as the user sees them ---

    @property
    def weight(self) -> QTensor:
        """The qint8 weight, sharing the module's codes. May be called: ``module.weight()`` is the same tensor."""
        return join_weight(
            cast(Tensor, self._buffers["weight"]),
            cast(Tensor, self._buffers["weight_scale"]),
            cast(Tensor, self._buffers["weight_zero_point"]),
            self.CHANNEL_AXIS,
        )

    @property
    def bias(self) -> Tensor | None:
        """The float32 bias, or None. May be called: ``module.bias()`` is the same tensor."""
        bias = self._buffers["bias"]
        return None if bias is None else cast(Tensor, Tensor._make_subclass(BiasView, bias))

    def set_weight_bias(self, w: Tensor, b: Tensor | None) -> None:
        """Takes new weights and a new bias, and packs the weights anew.

        Args:
            w: qint8 tensor of the module's weight shape, on one grid or one an output channel.
            b: float tensor with one entry an output channel, or None.

        Raises:
            TypeError: ``w`` is not qint8. ValueError: shapes that do not fit; the module is then unchanged.
        """
        codes, scale, zero_point = split_weight(w, self.CHANNEL_AXIS, f"weights of {self._where()}")
        shape = cast(Tensor, self._buffers["weight"]).shape
        if codes.shape != shape:
            raise ValueError(f"{self._where()} takes a weight of shape {tuple(shape)}, got {tuple(codes.shape)}")
        if b is not None and b.shape != (self._channels,):
            raise ValueError(f"{self._where()} takes a bias of shape ({self._channels},), got {tuple(b.shape)}")
        self._buffers["weight"] = codes
        self._buffers["weight_scale"] = scale
        self._buffers["weight_zero_point"] = zero_point
        self._buffers["bias"] = None if b is None else b.detach().to(codes.device, torch.float32, copy=True)
        self._repack()

    # --- the packed weights ---

    def _repack(self) -> tuple[Tensor, int, Tensor | None]:
        weight = self._counted("weight")
        version = _version(weight)
        packed = self._buffers["_packed"] = None if weight.is_meta else self._pack(weight)
        self._packed_seen = weight, version, packed
        return self._packed_seen

    def _weight_and_packed(self) -> tuple[Tensor, int, Tensor | None]:
        """The weights, how often they were written to, and as they are packed: anew if they are other than before."""
        weight, seen = cast(Tensor, self._buffers["weight"]), self._packed_seen
        if seen is None or seen[0] is not weight or seen[1] != _version(weight):
            return self._repack()
        return seen

    def _packed_weight(self) -> Tensor | None:
        """The packed weights."""
        return self._buffers["_packed"] if torch.compiler.is_compiling() else self._weight_and_packed()[2]

    # --- moving, copying, loading ---

    DERIVED: ClassVar[tuple[str, ...]] = ("_packed_seen",)

    def _derive(self) -> None:
        super()._derive()
        self._repack()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._buffers["_packed"] = None  # made for the old device
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_buffers": {**self._buffers, "_packed": None}}

    def _adapt_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        super()._adapt_state(state_dict, prefix)
        from_torch = flatten_packed_params(state_dict, prefix, self.CHANNEL_AXIS)
        if "scale" not in self._buffers and state_dict.get(prefix + "scale", 0) == 1:
            # torch.ao saves an output grid for dynamic layers too, which it never uses
            state_dict.pop(prefix + "scale")
            state_dict.pop(prefix + "zero_point", None)
        if from_torch:
            has_bias = prefix + "bias" in state_dict
            if has_bias != (self._buffers["bias"] is not None):
                scale = cast(Tensor, self._buffers["weight_scale"])
                self._buffers["bias"] = scale.new_zeros(self._channels) if has_bias else None
        for name in ("weight_scale", "weight_zero_point"):
            value, buffer = state_dict.get(prefix + name), cast(Tensor, self._buffers[name])
            if not isinstance(value, Tensor):
                continue
            if value.numel() == 1 != self._channels:
                value = state_dict[prefix + name] = value.reshape(())
            if value.shape in ((), (self._channels,)) and value.shape != buffer.shape:
                self._buffers[name] = buffer.new_empty(value.shape)


class CodesModule(WeightedModule, GridModule):
    """A layer from codes to codes: the numbers of its operator are those of its weights and of two grids."""

    def _arguments(self, x: QTensor, out: OutputGrid, *window: Any) -> tuple[Any, ...]:
        """What the operator takes between codes and packed weights, for inputs on the grid of ``x``.

        ``window`` says how one goes over the input, in the operator's order; a linear layer has none.
        """
        scale, zero_point, low, high, qdtype = out
        buffers = self._buffers
        weight = (buffers["weight"], buffers["weight_scale"], buffers["weight_zero_point"], buffers["bias"])
        return (x.scale, x.zero_point, *weight, *window, scale, zero_point, low, high, qdtype.storage)


class BoundModule(CodesModule):
    """A layer from codes to codes, which binds what its operator takes beside the input.

    Grids, and the arrays that the kernel makes of them, are the same in every call whose input lies on the same grid.
    The second time that a grid is met they are bound: made once, as one tensor that stands for a dozen arguments. What
    is bound holds as long as the buffers are the same, none is written to, and no attribute is assigned. A write that
    torch does not count (through ``.data``, a numpy view, a collective of gloo) is followed by ``load_state_dict``,
    ``set_weight_bias`` or any assignment to the module.
    """

    DERIVED: ClassVar[tuple[str, ...]] = ("_bound", "_met")
    MOST_BOUND: ClassVar[int] = 8
    """Grids of the input that are kept bound, and that count as met."""

    _bound: dict[InputGrid, tuple[SeenBuffers, BoundCall]] | None = None
    _met: tuple[InputGrid, ...] = ()

    def _bind(self, x: QTensor, out: OutputGrid) -> Tensor:
        """What the operator takes beside codes and weights, for inputs on the grid of ``x``."""
        raise NotImplementedError

    def _bound_call(self, x: QTensor) -> BoundCall | None:
        """The bound call for inputs on the grid of ``x``; None: the operator is to be called with all arguments."""
        codes = x._codes
        if _is_watched() or type(codes) is not Tensor or not codes.is_cpu:
            return None
        met = (codes.dtype, x.scale, x.zero_point)
        found = None if self._bound is None else self._bound.get(met)
        if found is not None:
            seen, call = found
            buffers = self._buffers
            for name, buffer, version in seen:
                if buffers[name] is not buffer or (buffer is not None and buffer._version != version):
                    break
            else:
                return call
        if met in self._met:
            return self._bind_to(x, met)
        self.__dict__["_met"] = (met, *self._met[: self.MOST_BOUND - 1])
        return None

    def _bind_to(self, x: QTensor, met: InputGrid) -> BoundCall | None:
        """Binds the call for inputs on the grid of ``x``, which is ``met``."""
        # Another thread may write to a buffer, or assign an attribute. So what was seen of the buffers comes first, and
        # what is made of them then: the next call finds that they have changed. And what is made goes to where it was
        # to go before: an assignment has put another dictionary there.
        bound = self._bound
        if bound is None:
            bound = self.__dict__["_bound"] = {}
        seen: SeenBuffers = []
        for name in ("weight", "weight_scale", "weight_zero_point", "bias", "scale", "zero_point"):
            buffer = None if self._buffers[name] is None else self._counted(name)
            seen.append((name, buffer, 0 if buffer is None else buffer._version))
        weight, _, packed = self._weight_and_packed()
        if packed is None or not packed.is_cpu or not is_native():
            return None
        out = self._output_grid(x.qdtype)
        call = (weight, packed, self._bind(x, out), (out[4], out[0], out[1]))
        if len(bound) >= self.MOST_BOUND:
            bound.clear()
        bound[met] = seen, call
        return call

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["_bound"] = {}

    def _derive(self) -> None:
        super()._derive()
        self.__dict__["_bound"] = {}


class DynamicModule(WeightedModule):
    """A layer that takes and gives float tensors. It lays a grid over its complete input in every call."""

    KIND = "dynamic quantized"
    reduce_range: bool = False
    """Use seven bits of the activation grid. The kernels are exact over eight, so it only costs accuracy."""

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"

    def _as_float(self, x: Any) -> Tensor:
        """An input that is no plain tensor as one: a quantized one is dequantized. Raises TypeError for others."""
        if isinstance(x, QTensor):
            return x.dequantize()
        if not isinstance(x, Tensor):
            raise TypeError(f"{self._where()} takes a float tensor, got {type(x).__name__}: make a tensor of it")
        return x

    def _refuse_dtype(self, x: Tensor, error: Exception) -> None:
        if x.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{self._where()} takes a float16, bfloat16, float32 or float64 tensor, got {x.dtype}: "
                "convert it with x.float()"
            ) from error
