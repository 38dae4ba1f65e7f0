"""A converted network as one call: ``zeropoint.compile(model, example)``.

Modules that call one kernel each pay for Python, for dispatch and for fresh memory at every layer. A plan pays once:
the network is traced, its graph is laid out as a program over one arena of reused buffers, and a call runs the
program in the native library (``csrc/plan``). The kernels are the same ones, so are the integers.

What the layout does beyond translating: reshapes and slices become views, zero padding becomes the padding of the
convolution behind it, and one-input functions of codes become tables.

May import: floors 1 to 3.
"""

from __future__ import annotations

import copy
import operator as python_operator
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from zeropoint import backends, grid
from zeropoint.ops.registry import operator

__all__ = ["CompiledModel", "PlanError", "compile"]

_ALIGN = 64
_PANEL = 16  # columns that a matrix kernel computes at once
_TRACING = threading.Lock()  # torch.fx keeps global state: one thread at a time
_ops = torch.ops.zeropoint
_aten = torch.ops.aten


class PlanError(RuntimeError):
    """The network holds something that a plan cannot run; the message names it."""


def _run_plan_meta(
    program: Tensor, constants: list[Tensor], inputs: list[Tensor], outputs: list[Tensor], arena: int
) -> None:
    """Nothing to shape: the outputs are given."""


@operator(
    "run_plan(Tensor program, Tensor[] constants, Tensor[] inputs, Tensor(a!)[] outputs, int arena) -> ()",
    meta=_run_plan_meta,
)
def run_plan_reference(
    program: Tensor, constants: list[Tensor], inputs: list[Tensor], outputs: list[Tensor], arena: int
) -> None:
    """A program is what the native kernels run; without them there is none."""
    raise PlanError("a plan needs the native kernels on the CPU: see zeropoint.backends.describe()")


def compile(model: nn.Module, example: Tensor | Sequence[Tensor]) -> CompiledModel:
    """Makes a plan of a converted static network, for inputs of the example's shapes.

    Args:
        model: what ``convert`` returned (or any module whose graph holds this package's operators and reshapes), in
            evaluation mode, on the CPU.
        example: one input, or a sequence of all positional inputs.

    Returns:
        A module that is called with the positional inputs of ``model`` and gives the same integers. An input of other
        shapes gets a plan of its own at its first call. Plans keep the model's weights as they were when they were
        made. The module's own ``load_state_dict`` (and ``to`` and the like) drop the plans, so that the next call makes
        one of the new weights; after changing ``model`` in another way, compile it again. A compiled model may be
        compiled again.

    Raises:
        PlanError: an operator that plans do not know, by name, or no native kernels.
        TypeError: no model, or no tensors. What ``model`` itself raises for the example is raised too.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes a model, got {type(model).__name__}")
    if not isinstance(example, (Tensor, list, tuple)):
        raise TypeError(f"compile takes an example input, a tensor or a sequence of them, got {type(example).__name__}")
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    compiled = CompiledModel(_uncompiled(model))
    compiled.plan_for(inputs)
    return compiled


class CompiledModel(nn.Module):
    """A network that runs as one call; made by :func:`compile`."""

    model: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._lock = threading.Lock()
        self.register_load_state_dict_post_hook(_drop_plans)  # type: ignore[no-untyped-call]

    def plan_for(self, inputs: tuple[Tensor, ...]) -> _Plan:
        """The plan for inputs of these shapes, dtypes and devices, made if there is none yet.

        Raises:
            TypeError: inputs that are no tensors. PlanError: see :func:`compile`.
        """
        try:
            key = tuple((x.shape, x.dtype, x.device) for x in inputs)
        except AttributeError:
            seen = [type(x).__name__ for x in inputs]
            raise TypeError(f"a compiled model takes tensors, got inputs of types {seen}") from None
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key) or _make_plan(self.model, inputs)
                self._plans[key] = plan
        return plan

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        """What ``model`` returns for the same inputs, all positional.

        Raises:
            TypeError: inputs that are no tensors, or inputs by name.
        """
        if named:
            raise TypeError(f"a compiled model takes positional inputs only, got {sorted(named)} by name")
        return self.plan_for(inputs)(inputs)

    def drop_plans(self) -> None:
        """Forgets all plans: the next call makes one of the model as it is then."""
        with self._lock:
            self._plans = {}

    def _load_from_state_dict(self, *args: Any) -> None:
        self.drop_plans()  # before anything is loaded, as loading may fail halfway; and once more behind it
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.drop_plans()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_plans={}, _lock=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def extra_repr(self) -> str:
        return "\n".join(str(plan) for plan in self._plans.values())


def _drop_plans(compiled: nn.Module, _: Any) -> None:
    """After loading: another thread may have made a plan meanwhile."""
    cast(CompiledModel, compiled).drop_plans()


# --- the plan -----------------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    program: Tensor
    constants: list[Tensor]
    arena: int
    input_strides: list[tuple[int, ...]]
    outputs: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]  # shape, strides, dtype
    rebuild: Callable[[list[Tensor]], Any]
    steps: list[str]

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        laid_out = [
            x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
            for x, strides in zip(inputs, self.input_strides, strict=True)
        ]
        outputs = [torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in self.outputs]
        _ops.run_plan.default(self.program, self.constants, laid_out, outputs, self.arena)
        return self.rebuild(outputs)

    def __str__(self) -> str:
        return f"{len(self.steps)} steps, {self.arena / 1e6:.2f} MB of buffers"


@dataclass
class _Buffer:
    """Memory of one or more values: a place in the arena, an input, an output or a constant."""

    bytes: int
    memory: tuple[str, int] = ("arena", 0)  # kind, index within the kind (arena: none)
    offset: int = 0
    last_use: int = -1


@dataclass
class _Value:
    """A tensor of the graph: where it lies, and how."""

    buffer: _Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    dtype: torch.dtype
    start: int = 0  # elements from the buffer's first

    @property
    def count(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def lies_in(self, strides: tuple[int, ...]) -> bool:
        """Whether these strides address the same memory; that of a dimension of size 1 does not matter."""
        return all(a == b for a, b, n in zip(self.strides, strides, self.shape, strict=True) if n != 1)

    def is_dense(self) -> bool:
        """Whether the elements fill their memory, in some order of the dimensions."""
        expected = 1
        for stride, size in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n != 1):
            if stride != expected:
                return False
            expected *= size
        return True


_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 6,
}
_BYTES = (torch.int8, torch.uint8)
_QUANTIZE, _DEQUANTIZE, _CONV, _LINEAR, _ADD, _MUL, _LOOKUP, _COPY, _MAX_POOL, _AVG_POOL = range(1, 11)
_CHANNELS_LAST, _RESIZE, _CONV_TRANSPOSE = range(11, 14)
_RANK = 6  # of what is listed with its strides
_MODES = ("nearest", "nearest-exact", "linear")  # of resizing, in the order of csrc/interpolate


def _bits(value: float) -> int:
    return cast(int, struct.unpack("<q", struct.pack("<d", value))[0])


@dataclass
class _Step:
    """One instruction: words, some of which are buffers to be placed once all lifetimes are known."""

    name: str
    words: list[Any]  # ints, and (_Buffer, byte offset) pairs

    def reads(self) -> list[_Buffer]:
        return [word[0] for word in self.words if isinstance(word, tuple)]


@dataclass
class _Builder:
    """Lays the nodes of an exported graph out as steps."""

    tensors: dict[str, Tensor]  # parameters, buffers and constants by placeholder name
    steps: list[_Step] = field(default_factory=list)
    values: dict[Node, Any] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)
    padded: dict[Node, tuple[_Value, list[int]]] = field(default_factory=dict)  # padding left to a convolution

    # --- buffers ---

    def place(self, node: Node) -> _Value:
        """A new buffer for a node's result, laid out as the eager operator lays it out."""
        fake = cast(Tensor, node.meta["val"])
        itemsize = fake.element_size()
        reach = 1 + sum((n - 1) * s for n, s in zip(fake.shape, fake.stride(), strict=True)) if fake.numel() else 0
        value = _Value(_Buffer(reach * itemsize), tuple(fake.shape), tuple(fake.stride()), fake.dtype)
        self.values[node] = value
        return value

    def constant(self, tensor: Tensor | None) -> list[Any]:
        if tensor is None:
            return [-1, 0]
        self.constants.append(tensor.detach().contiguous())
        return [(_Buffer(0, ("constant", len(self.constants) - 1)), 0)]

    def ref(self, value: _Value) -> tuple[_Buffer, int]:
        return value.buffer, value.start * value.dtype.itemsize

    def emit(self, name: str, *words: Any) -> None:
        flat: list[Any] = []
        for word in words:
            flat.extend(word) if isinstance(word, list) else flat.append(word)
        self.steps.append(_Step(name, flat))

    def tensor(self, node: Any) -> Tensor | None:
        """The constant that an argument names."""
        if node is None:
            return None
        found = self.tensors.get(node.name)
        if found is None:
            raise PlanError(f"a plan needs {node.name} to be a constant of the model")
        return found

    def copy(self, name: str, source: _Value, target: _Value) -> None:
        """Copies codes from one layout to another, in the target's memory order."""
        if source.dtype.itemsize != 1:
            raise PlanError(f"{name}: a plan moves codes only, not {source.dtype}")
        dims = _merged(name, target.shape, source.strides, target.strides)
        self.emit(name, _COPY, *[w for d in dims for w in d], self.ref(source), self.ref(target))

    def strided(self, value: _Value, strides: tuple[int, ...], name: str) -> _Value:
        """The value in another memory layout: itself, or a copy."""
        if value.lies_in(strides):
            return value
        moved = _Value(_Buffer(value.count), value.shape, strides, value.dtype)
        self.copy(name, value, moved)
        return moved

    def channels_last(self, value: _Value) -> _Value:
        """The value with its channels innermost in memory: itself, or a copy."""
        strides = _channels_last_strides(value.shape)
        if value.lies_in(strides):
            return value
        moved = _Value(_Buffer(value.count), value.shape, strides, value.dtype)
        missing = 5 - len(value.shape)
        shape = (*value.shape[:2], *[1] * missing, *value.shape[2:])
        steps = (*value.strides[:2], *[0] * missing, *value.strides[2:])
        sizes = [word for pair in zip(shape, steps, strict=True) for word in pair]
        self.emit("to channels_last", _CHANNELS_LAST, *sizes, self.ref(value), self.ref(moved))
        return moved

    # --- operators ---

    def quantize(self, node: Node, x: _Value, scale: float, zero_point: int, low: int, high: int, dtype: Any) -> None:
        out = self.place(node)
        self.emit(
            *("quantize", _QUANTIZE, x.count, _TYPES[x.dtype], _TYPES[dtype], self.ref(x), self.ref(out)),
            *(_bits(scale), zero_point, low, high),
        )

    def dequantize(self, node: Node, x: _Value, scale: float, zero_point: int, dtype: Any) -> None:
        out = self.place(node)
        x = self.strided(x, out.strides, "dequantize")
        self.emit(
            *("dequantize", _DEQUANTIZE, x.count, _TYPES[x.dtype], _TYPES[dtype], self.ref(x), self.ref(out)),
            *(_bits(scale), zero_point),
        )

    def conv(
        self,
        node: Node,
        x: _Value,
        x_scale: float,
        x_zero_point: int,
        weight: Node,
        weight_scale: Node,
        weight_zero_point: Node,
        bias: Node | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        out_scale: float,
        out_zero_point: int,
        out_min: int,
        out_max: int,
        out_dtype: torch.dtype,
        packed: Node | None,
    ) -> None:
        padding = list(padding)
        source = node.args[0]
        if isinstance(source, Node) and source in self.padded:
            x, before = self.padded[source]
            padding = [p + extra for p, extra in zip(padding, before, strict=True)]
        w = cast(Tensor, self.tensor(weight))
        rank, channels = w.dim() - 2, w.shape[0]
        x = self.channels_last(x)
        out = self.place(node)
        sizes = _in_three([1, 1, 1, 0, 0], x.shape[2:], stride, dilation, padding[::2], padding[1::2])
        self.emit(
            *("conv", _CONV, channels, w.shape[1], groups, *[1] * (3 - rank), *w.shape[2:], x.shape[0], *sizes),
            *(int(x.dtype == torch.int8), x_zero_point, self.ref(x), self.ref(out)),
            *self.filters(w, packed, channels, weight_scale, weight_zero_point, bias, x_scale, out_scale),
            *(_TYPES[out_dtype], out_zero_point, out_min, out_max),
        )

    def filters(
        self,
        weight: Tensor,
        packed: Node | None,
        channels: int,
        weight_scale: Node,
        weight_zero_point: Node,
        bias: Node | None,
        x_scale: float,
        out_scale: float,
    ) -> list[list[Any]]:
        """The constants of a layer: weights, and what its sums are requantized with, padded to whole panels."""
        scales = cast(Tensor, self.tensor(weight_scale)).to(torch.float64).reshape(-1).expand(channels)
        reals = self.tensor(bias)
        zeros = cast(Tensor, self.tensor(weight_zero_point)).to(torch.int32).reshape(-1).expand(channels)

        def padded(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(values, (0, -channels % _PANEL))

        return [
            self.constant(weight),
            self.constant(self.tensor(packed)),
            self.constant(padded(zeros) if bool(zeros.any()) else None),
            self.constant(padded(grid.multiplier(x_scale * scales, out_scale))),
            self.constant(None if reals is None else padded(grid.multiplier(reals, out_scale))),
        ]

    def conv_transpose(
        self,
        node: Node,
        x: _Value,
        x_scale: float,
        x_zero_point: int,
        weight: Node,
        weight_scale: Node,
        weight_zero_point: Node,
        bias: Node | None,
        stride: list[int],
        padding: list[int],
        output_padding: list[int],
        dilation: list[int],
        groups: int,
        out_scale: float,
        out_zero_point: int,
        out_min: int,
        out_max: int,
        out_dtype: torch.dtype,
        packed: Node | None,
    ) -> None:
        w = cast(Tensor, self.tensor(weight))
        rank, columns = w.dim() - 2, w.shape[1]
        x = self.channels_last(x)
        out = self.place(node)
        sizes = _in_three([1, 1, 1, 0, 0], x.shape[2:], stride, dilation, padding, output_padding)
        self.emit(
            "conv_transpose",
            *(_CONV_TRANSPOSE, w.shape[0], columns, groups, *[1] * (3 - rank), *w.shape[2:]),
            *(x.shape[0], *sizes, int(x.dtype == torch.int8), x_zero_point, self.ref(x), self.ref(out)),
            *self.filters(w, packed, columns * groups, weight_scale, weight_zero_point, bias, x_scale, out_scale),
            *(_TYPES[out_dtype], out_zero_point, out_min, out_max),
        )

    def resize(
        self,
        node: Node,
        x: _Value,
        zero_point: int,
        size: list[int],
        ratio: list[float],
        mode: str,
        align_corners: bool,
    ) -> None:
        out = self.place(node)
        inside = out.lies_in(_channels_last_strides(out.shape))
        x = self.channels_last(x) if inside else self.strided(x, _contiguous_strides(x.shape), "interpolate")
        sizes = _in_three([1, 1, _bits(1.0)], x.shape[2:], size, [_bits(step) for step in ratio])
        outer, inner = (x.shape[0], x.shape[1]) if inside else (x.shape[0] * x.shape[1], 1)
        self.emit(
            "interpolate",
            *(_RESIZE, outer, inner, *sizes, _MODES.index(mode), int(align_corners)),
            *(_TYPES[x.dtype], zero_point, self.ref(x), self.ref(out)),
        )

    def linear(
        self,
        node: Node,
        x: _Value,
        x_scale: float,
        x_zero_point: int,
        weight: Node,
        weight_scale: Node,
        weight_zero_point: Node,
        bias: Node | None,
        out_scale: float,
        out_zero_point: int,
        out_min: int,
        out_max: int,
        out_dtype: torch.dtype,
        packed: Node | None,
    ) -> None:
        w = cast(Tensor, self.tensor(weight))
        x = self.strided(x, _contiguous_strides(x.shape), "linear")
        out = self.place(node)
        n = w.shape[0]
        self.emit(
            *("linear", _LINEAR, x.count // max(x.shape[-1], 1), n, w.shape[1], int(x.dtype == torch.int8)),
            *(x_zero_point, self.ref(x), self.ref(out)),
            *self.filters(w, packed, n, weight_scale, weight_zero_point, bias, x_scale, out_scale),
            *(_TYPES[out_dtype], out_zero_point, out_min, out_max),
        )

    def combine(
        self,
        node: Node,
        opcode: int,
        a: _Value,
        a_scale: float,
        a_zero_point: int,
        b: _Value,
        b_scale: float,
        b_zero_point: int,
        out_scale: float,
        *grid_words: Any,
    ) -> None:
        out_zero_point, out_min, out_max, out_dtype = grid_words
        name = "add" if opcode == _ADD else "mul"
        out = self.place(node)
        if not out.is_dense():
            raise PlanError(f"{name} in a plan gives dense results, not strides {out.strides} of {out.shape}")
        a, b = (self.strided(x, out.strides, name) if x.shape == out.shape else x for x in (a, b))
        repeated = [_repeated(x, out.shape) for x in (a, b)]
        dims = _merged(name, out.shape, *repeated, out.strides)
        if opcode == _ADD:
            factors = grid.multiplier(a_scale, out_scale), grid.multiplier(b_scale, out_scale)
        else:
            factors = grid.multiplier(a_scale * b_scale, out_scale), torch.zeros(())
        self.emit(
            name,
            *(opcode, *[word for size, left, right, _ in dims for word in (size, left, right)]),
            *(_TYPES[a.dtype], self.ref(a), a_zero_point, _TYPES[b.dtype], self.ref(b), b_zero_point),
            *(_bits(float(f)) for f in factors),
            *(_TYPES[out_dtype], self.ref(out), out_zero_point, out_min, out_max),
        )

    def pool(
        self, node: Node, opcode: int, x: _Value, windows: list[list[int]] | None, zero_point: int, divisor: int
    ) -> None:
        """Pooling over windows: [kernel, stride, padding, dilation, padding counts] a dimension; None: adaptive."""
        name = "max_pool" if opcode == _MAX_POOL else "avg_pool"
        fake = cast(Tensor, node.meta["val"])
        rank = len(x.shape) - 2
        if not 1 <= rank <= 3 or fake.dim() != len(x.shape):
            raise PlanError(f"{name} in a plan takes batched inputs of three to five dimensions, got {x.shape}")
        x = self.channels_last(x)
        pooled = _Value(_Buffer(fake.numel()), tuple(fake.shape), _channels_last_strides(tuple(fake.shape)), x.dtype)
        sizes: list[int] = []
        for d in range(rank - 3, rank):
            if d < 0:
                sizes += [1, 1, 1]
            elif windows is None:
                sizes += [x.shape[2 + d], fake.shape[2 + d], 1]
            else:
                sizes += [x.shape[2 + d], fake.shape[2 + d], 0, *windows[d]]
        self.emit(
            name,
            *(opcode, x.shape[0], x.shape[1], *sizes, _TYPES[x.dtype], self.ref(x), self.ref(pooled)),
            *(zero_point, divisor),
        )
        self.values[node] = self.strided(pooled, tuple(fake.stride()), name)

    def mean(self, node: Node, x: _Value, zero_point: int, dim: list[int], keepdim: bool) -> None:
        """The mean over all spatial dimensions: one window each."""
        rank = len(x.shape) - 2
        if sorted(d % len(x.shape) for d in dim) != list(range(2, len(x.shape))) or rank < 1:
            raise PlanError(f"mean in a plan is over all spatial dimensions, got dim={dim} of {len(x.shape)}")
        fake = cast(Tensor, node.meta["val"])
        x = self.channels_last(x)
        pooled = _Value(_Buffer(fake.numel()), (x.shape[0], x.shape[1]), (x.shape[1], 1), x.dtype)
        sizes = [1, 1, 1] * (3 - rank) + [w for n in x.shape[2:] for w in (n, 1, 1)]
        self.emit(
            "mean",
            *(_AVG_POOL, x.shape[0], x.shape[1], *sizes, _TYPES[x.dtype], self.ref(x), self.ref(pooled)),
            *(zero_point, 0),
        )
        shape, ones = tuple(fake.shape), (1,) * rank
        kept = _Value(pooled.buffer, (*pooled.shape, *ones), (*pooled.strides, *ones), x.dtype) if keepdim else pooled
        self.values[node] = self.strided(kept, tuple(fake.stride()), "mean") if shape == kept.shape else kept

    def table(self, node: Node, x: _Value) -> None:
        """A function of single codes: evaluated on all 256 of them."""
        out = self.place(node)
        limits = torch.iinfo(x.dtype)
        codes = torch.arange(limits.min, limits.max + 1, dtype=torch.int64).to(x.dtype)
        table = cast(Any, node.target)(codes, *node.args[1:], **node.kwargs)
        x = self.strided(x, out.strides, str(node.target))
        self.emit(
            *(_short(node), _LOOKUP, out.count, _TYPES[x.dtype], _TYPES[out.dtype], self.ref(x)),
            self.constant(table),
            self.ref(out),
        )

    def concatenate(self, node: Node, parts: list[_Value], dim: int) -> None:
        out = self.place(node)
        at = 0
        for part in parts:
            if 0 in part.shape:
                continue
            window = _Value(out.buffer, part.shape, out.strides, out.dtype, at * out.strides[dim])
            self.copy("cat", part, window)
            at += part.shape[dim]

    def pad(self, node: Node, x: _Value, pairs: list[int], fill: int) -> None:
        """Padding with one code: left to the convolutions behind it where they pad with it anyway, else a copy."""
        rank = len(x.shape) - 2
        before = [0] * (2 * rank)
        for d in range(len(pairs) // 2):
            at = 2 * (rank - 1 - d)
            if at >= 0:
                before[at : at + 2] = pairs[2 * d : 2 * d + 2]
        foldable = rank >= 1 and len(pairs) <= 2 * rank and min(pairs) >= 0
        if foldable and all(u.target == _ops.conv.default and u.args[2] == fill for u in node.users):
            self.padded[node] = x, before
            self.values[node] = x
            return
        if min(pairs) < 0:
            raise PlanError("a plan pads, it does not crop: negative padding")
        out = self.place(node)
        full = torch.full((out.buffer.bytes,), fill, dtype=out.dtype)
        image = _Value(self.constant(full)[0][0], (out.buffer.bytes,), (1,), out.dtype)
        self.copy("pad", image, _Value(out.buffer, image.shape, (1,), out.dtype))
        start = sum(pairs[2 * d] * out.strides[-1 - d] for d in range(len(pairs) // 2))
        self.copy("pad", x, _Value(out.buffer, x.shape, out.strides, out.dtype, start))

    def pixel_shuffle(self, node: Node, x: _Value, factor: int) -> None:
        """Channels (C, factor, factor) become positions: a copy in six dimensions."""
        if len(x.shape) != 4:
            raise PlanError(f"pixel_shuffle in a plan takes a batch of pictures, got {x.shape}")
        out = self.place(node)
        batch, channels, height, width = x.shape
        shape = (batch, channels // factor**2, height, factor, width, factor)
        n, c, h, w = x.strides
        source = _Value(x.buffer, shape, (n, c * factor**2, h, c * factor, w, c), x.dtype, x.start)
        n, c, h, w = out.strides
        self.copy("pixel_shuffle", source, _Value(out.buffer, shape, (n, c, h * factor, h, w * factor, w), out.dtype))

    def move(self, node: Node, x: _Value) -> None:
        """A reshape, slice or copy: a view where the eager operator gives one, else a copy."""
        fake, base = cast(Tensor, node.meta["val"]), cast(Tensor, cast(Node, node.args[0]).meta["val"])
        if fake.untyped_storage()._cdata == base.untyped_storage()._cdata or _same_layout(fake, x):
            self.values[node] = _window(x, node, fake)
            return
        out = self.place(node)
        if out.shape != x.shape:  # a reshape that must copy: first to the logical order, then it is a view
            source = self.strided(x, _contiguous_strides(x.shape), _short(node))
            out = _Value(source.buffer, out.shape, _contiguous_strides(out.shape), x.dtype, source.start)
            self.values[node] = self.strided(out, tuple(fake.stride()), _short(node))
            return
        self.copy(_short(node), x, out)


def _in_three(missing: list[int], *numbers: Sequence[int]) -> list[int]:
    """Numbers of three spatial dimensions, one dimension after the other; ``missing`` stands for those not there."""
    return missing * (3 - len(numbers[0])) + [number for dim in zip(*numbers, strict=True) for number in dim]


def _repeated(x: _Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a value in the dimensions of a larger shape: 0 where it is repeated."""
    missing = len(shape) - len(x.shape)
    strides = (0 if have != want else s for have, want, s in zip(x.shape, shape[missing:], x.strides, strict=True))
    return (*[0] * missing, *strides)


def _merged(name: str, shape: tuple[int, ...], *strides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Dimensions (size, strides...) from the outermost to the innermost of the last layout, in as few as can be.

    What follows one another in all layouts is one dimension. Dimensions of size 1 fill up to ``_RANK``.
    """
    dims = [dim for dim in zip(shape, *strides, strict=True) if dim[0] != 1]
    dims.sort(key=lambda dim: -dim[-1])
    merged: list[tuple[int, ...]] = []
    for size, *steps in dims:
        outer = merged[-1] if merged else None
        if outer and all(far == near * size for far, near in zip(outer[1:], steps, strict=True)):
            merged[-1] = (outer[0] * size, *steps)
        else:
            merged.append((size, *steps))
    if len(merged) > _RANK:
        raise PlanError(f"{name}: a plan goes through up to six dimensions, not {len(merged)}")
    return [(1, *[0] * len(strides))] * (_RANK - len(merged)) + merged


def _short(node: Node) -> str:
    return str(node.target).removeprefix("zeropoint.").removeprefix("aten.").partition(".")[0]


def _same_layout(fake: Tensor, x: _Value) -> bool:
    return tuple(fake.shape) == x.shape and tuple(fake.stride()) == x.strides


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    moved = _contiguous_strides((shape[0], *shape[2:], shape[1]))
    return (moved[0], moved[-1], *moved[1:-1])


# --- from a graph to a plan -----------------------------------------------------------------------------------------

_TABLES = {
    _ops.requantize.default,
    _ops.activation.default,
    _aten.clamp.default,
    _aten.relu.default,
    _aten.clamp_min.default,
    _aten.clamp_max.default,
}
_MOVES = {
    *(_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.squeeze.default),
    *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default, _aten.permute.default),
    *(_aten.transpose.int, _aten.t.default, _aten.movedim.int, _aten.movedim.intlist, _aten.slice.Tensor),
    *(_aten.select.int, _aten.narrow.default, _aten.contiguous.default, _aten.clone.default),
    *(_aten.detach.default, _aten.alias.default, _aten.unflatten.int, _aten.expand.default),
    *(_aten.dropout.default, _aten.feature_dropout.default, _aten.alpha_dropout.default),
    *(_aten.chunk.default, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
}
_NO_STEPS = {_aten._assert_tensor_metadata.default, torch._C._set_grad_enabled}


def _lower(build: _Builder, node: Node) -> None:
    """Lays out one call of the graph."""
    target = node.target
    args: list[Any] = [build.values.get(a, a) if isinstance(a, Node) else a for a in node.args]
    if target == _ops.quantize_per_tensor.default:
        build.quantize(node, *args)
    elif target == _ops.dequantize_per_tensor.default:
        build.dequantize(node, *args)
    elif target == _ops.conv.default:
        build.conv(node, *args)
    elif target == _ops.linear.default:
        build.linear(node, *args)
    elif target == _ops.conv_transpose.default:
        build.conv_transpose(node, *args)
    elif target == _ops.interpolate.default:
        build.resize(node, *args)
    elif target == _aten.pixel_shuffle.default:
        build.pixel_shuffle(node, *args)
    elif target == _ops.add.default:
        build.combine(node, _ADD, *args)
    elif target == _ops.mul.default:
        build.combine(node, _MUL, *args)
    elif target == _ops.max_pool.default:
        x, kernel, stride, padding, dilation, _ = args
        windows = [[*w, 0] for w in zip(kernel, stride, padding, dilation, strict=True)]
        build.pool(node, _MAX_POOL, x, windows, 0, 0)
    elif target == _ops.avg_pool.default:
        x, zero_point, kernel, stride, padding, _, counts, divisor = args
        windows = [[*w, 1, int(counts)] for w in zip(kernel, stride, padding, strict=True)]
        build.pool(node, _AVG_POOL, x, windows, zero_point, divisor or 0)
    elif target == _ops.adaptive_avg_pool.default:
        build.pool(node, _AVG_POOL, args[0], None, args[1], 0)
    elif target == _ops.mean.default:
        build.mean(node, *args)
    elif target in _TABLES and args[0].dtype in _BYTES:
        build.table(node, args[0])
    elif target == _aten.cat.default:
        dim = int(args[1]) if len(args) > 1 else 0
        build.concatenate(node, [build.values[part] for part in args[0]], dim % len(build.values[args[0][0]].shape))
    elif target in (_aten.pad.default, _aten.constant_pad_nd.default):
        mode = args[2] if target == _aten.pad.default and len(args) > 2 else "constant"
        if mode != "constant":
            raise PlanError(f"a plan pads with a constant, not with mode {mode!r}")
        build.pad(node, args[0], list(args[1]), int(args[-1] or 0) if len(args) > 2 else 0)
    elif target == python_operator.getitem and isinstance(args[0], list):
        build.values[node] = args[0][args[1]]
    elif target in _MOVES and isinstance(args[0], _Value):
        if target in (_aten.dropout.default, _aten.feature_dropout.default) and args[2]:
            raise PlanError("a plan is for inference: call model.eval() first")
        if isinstance(node.meta["val"], (list, tuple)):
            build.values[node] = [_window(args[0], node, part) for part in node.meta["val"]]
        else:
            build.move(node, args[0])
    else:
        raise PlanError(f"a plan cannot run {target} ({_module_of(node)}): run the model without compile()")


def _window(x: _Value, node: Node, fake: Tensor) -> _Value:
    """The part of ``x`` that ``fake`` is a view of, among the outputs of ``node``."""
    base = cast(Tensor, cast(Node, node.args[0]).meta["val"])
    start = x.start + int(fake.storage_offset()) - int(base.storage_offset())
    return _Value(x.buffer, tuple(fake.shape), tuple(fake.stride()), x.dtype, start)


def _module_of(node: Node) -> str:
    kind, path = node.meta.get(_MODULE, ("the model", ""))
    return f"in {kind} {path!r}"


# --- from a model to a graph ----------------------------------------------------------------------------------------

_MODULE = "zeropoint_module"  # in a node's meta: class and path of the innermost module that computed it


def _private_copy(model: nn.Module) -> nn.Module:
    """The modules of a model anew, over the very same tensors.

    What a forward pass under the tracer leaves on a module must not be seen by other threads that run the model.
    ``copy.deepcopy`` would copy the weights, and have quantized modules pack them once more.
    """
    copies = {module: object.__new__(type(module)) for module in model.modules()}
    memo: dict[int, Any] = {id(module): copies[_uncompiled(module)] for module in copies}
    kept: list[Any] = []
    for module in copies:
        own = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        tensors = [t for t in own if isinstance(t, Tensor)]
        memo.update((id(t), t) for t in tensors)
        kept.append(tensors)
    for module, twin in copies.items():
        for name, value in dict(vars(module)).items():
            try:
                value = copy.deepcopy(value, memo)
            except Exception:  # locks, handles, whatever else refuses to be copied is shared, its containers are not
                value = copy.copy(value) if isinstance(value, (dict, list, set)) else value
            twin.__dict__[name] = value
    return cast(nn.Module, memo[id(model)])


def _uncompiled(model: nn.Module) -> nn.Module:
    """What a compiled model was made of; other modules as they are."""
    while isinstance(model, CompiledModel):
        model = model.model
    return model


def _note_modules(model: nn.Module) -> None:
    """Has a (private) model write into each node of its trace which module it comes from."""

    def note(kind: str, path: str) -> Callable[..., None]:
        def after(*_: Any) -> None:
            mode = get_proxy_mode()
            graph: Graph = mode.tracer.graph  # type: ignore[union-attr]
            for node in reversed(graph.nodes):
                if _MODULE in node.meta:
                    break
                node.meta[_MODULE] = (kind, path)

        return after

    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    for path, module in model.named_modules():
        outer = path.rpartition(".")[0]  # what was computed before this module was called
        module.register_forward_pre_hook(note(kinds.get(outer, ""), outer))
        module.register_forward_hook(note(kinds[path], path))


def _trace(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[torch.fx.GraphModule, pytree.TreeSpec]:
    """The graph of a model, whose constants are the model's own tensors, and the structure of what it returns.

    Other threads may run the model meanwhile. So this is not torch.export, which puts fake tensors in the place of
    the model's and gives the modules of all threads to its tracer.
    """
    twin = _private_copy(model)
    _note_modules(twin)
    structure: list[pytree.TreeSpec] = []

    def run(*fakes: Tensor) -> list[Any]:
        flat, spec = pytree.tree_flatten(twin(*fakes))
        structure.append(spec)
        return flat

    with _TRACING, torch.no_grad():
        traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True, pre_dispatch=True)(*inputs)
    return traced, structure[-1]


def _make_plan(model: nn.Module, inputs: tuple[Tensor, ...]) -> _Plan:
    if not backends.is_native():
        raise PlanError("a plan needs the native kernels on the CPU: see zeropoint.backends.describe()")
    if not inputs or not all(type(x) is Tensor for x in inputs):
        raise PlanError(f"a plan is made for plain tensors as inputs, got {[type(x).__name__ for x in inputs]}")
    if any(x.device.type != "cpu" for x in inputs):
        raise PlanError(f"a plan runs on the CPU, got inputs on {sorted({str(x.device) for x in inputs})}")
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*inputs))  # what the model refuses, it refuses in its own words
    if not all(type(x) is Tensor for x in expected):
        raise PlanError("a plan returns plain tensors only: put a DeQuantStub behind the quantized part")
    traced, structure = _trace(model, inputs)
    build = _Builder({})
    input_strides: list[tuple[int, ...]] = []
    result: Any = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            value = build.place(node)
            value.buffer.memory = ("input", len(input_strides))
            input_strides.append(value.strides)
        elif node.op == "get_attr":
            build.tensors[node.name] = cast(Tensor, getattr(traced, str(node.target)))
        elif node.op == "call_function" and node.target not in _NO_STEPS:
            _lower(build, node)
        elif node.op == "output":
            result = node.args[0]
    flat: list[Any] = [build.values.get(node) for node in result]
    outputs = []
    for index, value in enumerate(flat):
        if not isinstance(value, _Value) or value.buffer.memory[0] != "arena" or value.start or not value.is_dense():
            raise PlanError("an output of a plan must be computed in it, as a whole tensor")
        value.buffer.memory = ("output", index)
        outputs.append((value.shape, value.strides, value.dtype))
    arena = _allocate(build.steps)
    program = _assemble(build, len(input_strides), len(outputs))

    def rebuild(tensors: list[Tensor]) -> Any:
        return pytree.tree_unflatten(tensors, structure)

    names = [step.name for step in build.steps]
    plan = _Plan(program, build.constants, arena, input_strides, outputs, rebuild, names)
    if not all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(plan(inputs)), expected, strict=True)):
        raise PlanError("the plan gives other numbers than the model: run the model without compile()")
    return plan


def _allocate(steps: list[_Step]) -> int:
    """Gives every buffer of the arena a place that no other one holds while it lives. Returns the arena's size."""
    for index, step in enumerate(steps):
        for buffer in step.reads():
            buffer.last_use = index
    alive: list[_Buffer] = []
    placed: set[int] = set()
    size = 0
    for index, step in enumerate(steps):
        for buffer in step.reads():
            if buffer.memory[0] != "arena" or id(buffer) in placed:
                continue
            placed.add(id(buffer))
            buffer.offset = _first_gap(alive, buffer.bytes)
            size = max(size, buffer.offset + buffer.bytes)
            alive.append(buffer)
        alive = [buffer for buffer in alive if buffer.last_use > index]
    return size + _ALIGN  # kernels may read a few bytes behind a row


def _first_gap(alive: list[_Buffer], size: int) -> int:
    at = 0
    for buffer in sorted(alive, key=lambda b: b.offset):
        if at + size <= buffer.offset:
            break
        at = max(at, -(-(buffer.offset + buffer.bytes) // _ALIGN) * _ALIGN)
    return at


def _assemble(build: _Builder, inputs: int, outputs: int) -> Tensor:
    """The words of all steps, with buffers as (memory, byte offset)."""
    first = {"arena": 0, "input": 1, "output": 1 + inputs, "constant": 1 + inputs + outputs}
    words: list[int] = []
    for step in build.steps:
        for word in step.words:
            if isinstance(word, tuple):
                buffer, offset = word
                kind, index = buffer.memory
                words += [first[kind] + index, buffer.offset + offset]
            else:
                words.append(int(word))
    return torch.tensor(words, dtype=torch.int64)
