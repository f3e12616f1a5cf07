"""Operands of attention as expressions: what the nodes between a projection and attention compute.

    Reshape(Split(CausalConvTokens(x))) / Sqrt(ReduceSum(... ^ 2) + eps)  ->  an Expression

A node is read backwards from what it makes: which elements of its inputs the heads and components
of an operand come from. Where that is not an affine step, or no expression has the operator, it
is read as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import onnx
from onnx import TensorProto, numpy_helper

from linexport.graph.dims import StaticShape
from linexport.plugins.kernels.expressions import (
    BINARY,
    UNARY,
    Applied,
    Convolution,
    Expression,
    Load,
    Number,
    Sum,
    View,
)
from linexport.plugins.ops import causal_conv_tokens
from linexport.plugins.ops.causal_conv import ACTIVATIONS
from linexport.plugins.ops.op import ABSENT, DOMAIN
from linexport.plugins.ops.registry import known_shapes
from linexport.plugins.ops.shapes import Dim
from linexport.targets.cpu_fusion.nodes import attributes
from linexport.targets.cpu_fusion.program import UnfitError, packed
from linexport.targets.cpu_fusion.values import LEAD

ELEMENTS: Mapping[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
}
"""Element types that expressions read."""


MOST_READS = 256
"""Values that are read for one operand; one that is used twice is read twice."""


class LargeOperandError(UnfitError):
    """An operand takes more than ``MOST_READS``."""


@dataclass(frozen=True)
class Facts:
    """Shapes, types, constants and producers of a graph's values, by name."""

    shapes: Mapping[str, tuple[Dim, ...]]
    types: Mapping[str, int]
    constants: Mapping[str, onnx.TensorProto]
    producers: Mapping[str, onnx.NodeProto]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Facts:
        """Return those of a model."""
        graph = model.graph
        types = {t.name: t.data_type for t in graph.initializer}
        for value in (*graph.value_info, *graph.input, *graph.output):
            types[value.name] = value.type.tensor_type.elem_type
        producers = {name: node for node in graph.node for name in node.output if name}
        constants = {t.name: t for t in graph.initializer}
        return cls(known_shapes(model), types, constants, producers)

    def integers(self, name: str) -> list[int]:
        """Return sizes or axes.

        Raises:
            UnfitError: they are not constant.
        """
        if name not in self.constants:
            raise UnfitError(f"{name} is not constant")
        found: list[int] = numpy_helper.to_array(self.constants[name]).reshape(-1).tolist()
        return found


def given_inputs(node: onnx.NodeProto) -> list[str]:
    """Return a node's inputs, "" for those that it disregards."""
    absent = attributes(node).get(ABSENT, ())
    return ["" if i in absent else name for i, name in enumerate(node.input)]


@dataclass
class OperandReader:
    """Reads the operands of one attention.

    Attributes:
        facts: of the graph.
        lead: sizes of batch and token.
        blocked: convolutions that stay nodes, by the name of their output.
        names: of the tensors that expressions read, by number; some may be read by none.
        convolutions: that are read, by the name of their output, in the order of their states.
        heads: of the operand that is read.
        reads: values read for it so far.
    """

    facts: Facts
    lead: tuple[Dim, ...]
    blocked: set[str]
    names: list[str] = field(default_factory=list)
    convolutions: dict[str, onnx.NodeProto] = field(default_factory=dict)
    heads: int = 1
    reads: int = 0

    def operand(self, name: str, heads: int, width: int) -> Expression:
        """Return the expression of a value (B, T, heads * width).

        Raises:
            UnfitError: it has none.
        """
        self.heads, self.reads = heads, 0
        return self._read(name, View(0, width, int(width > 1)), width)

    def _read(self, name: str, view: View, width: int) -> Expression:
        self.reads += 1
        if self.reads > MOST_READS:
            raise LargeOperandError(f"more than {MOST_READS} values for one operand")
        constant, node = self.facts.constants.get(name), self.facts.producers.get(name)
        if constant is not None and prod(constant.dims) == 1:
            return Number(float(numpy_helper.to_array(constant).reshape(-1)[0]))
        if node is not None:
            try:
                return self._of_node(node, name, view, width)
            except LargeOperandError:
                raise
            except UnfitError:
                pass  # it is a tensor, then
        return self._tensor(name, view)

    def _tensor(self, name: str, view: View) -> Load:
        if self.facts.types.get(name) not in ELEMENTS:
            raise UnfitError(f"{name} is of another type")
        if name in self.facts.constants:
            return Load(self._number(name), 0, view)
        return Load(self._number(name), prod(self._token(name)), view)

    def _number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def _token(self, name: str) -> StaticShape:
        """Return the axes of a value behind batch and token."""
        shape = self.facts.shapes.get(name, ())
        sizes = tuple(size for size in shape[LEAD:] if isinstance(size, int))
        if shape[:LEAD] != self.lead or len(sizes) != len(shape) - LEAD:
            raise UnfitError(f"{name} has no value for each token")
        return sizes

    def _of_node(self, node: onnx.NodeProto, name: str, view: View, width: int) -> Expression:
        kind, given = node.op_type, node.input
        if (node.domain, kind) == (DOMAIN, causal_conv_tokens.OP.name):
            return self._convolution(node, view, width)
        if node.domain:
            raise UnfitError(f"{node.domain}.{kind}")
        if kind in ("Reshape", "Unsqueeze", "Squeeze"):
            self._token(given[0])
        if kind == "Cast" and attributes(node)["to"] not in ELEMENTS:
            raise UnfitError("a Cast to another type")
        if kind in VIEWS:
            return self._read(given[0], view, width)
        if kind in UNARY:  # files need not state the shape of what they make
            return Applied(kind, (self._read(given[0], view, width),))
        if kind in MOVES:
            source, place = MOVES[kind](self, node, name, view, width)
            return self._read(source, place, width)
        if kind in REDUCED:
            return self._reduced(node, view)
        shape = self._token(name)
        if kind == "Pow":
            return self._power(given[0], given[1], shape, view, width)
        if kind == "SimplifiedLayerNormalization":
            return self._norm(node, shape, view, width)
        if kind in BINARY and len(given) == 2:
            return Applied(kind, tuple(self._broadcast(x, shape, view, width) for x in given))
        raise UnfitError(kind)

    def _power(
        self, base: str, exponent: str, shape: StaticShape, view: View, width: int
    ) -> Expression:
        power, x = self._read(exponent, view, width), self._broadcast(base, shape, view, width)
        if power == Number(2.0):
            return Applied("Mul", (x, x))
        if power == Number(0.5):
            return Applied("Sqrt", (x,))
        raise UnfitError("a power other than a square or a root")

    def _norm(self, node: onnx.NodeProto, shape: StaticShape, view: View, width: int) -> Expression:
        """Read a norm by root mean squares of rows, and its weight.

        Raises:
            UnfitError: a view over several rows for a component.
        """
        x, weight = node.input
        steps = (*packed((*shape[:-1], 1))[:-1], 0)
        place = self._through(view, width, shape, steps)
        if place.component:
            raise UnfitError("components of sums")
        row = View(place.offset * shape[-1], place.head * shape[-1], 1)
        inner = self._read(x, row, shape[-1])
        mean = Sum(Applied("Mul", (inner, inner)), shape[-1], 1.0 / shape[-1])
        root = Applied("Sqrt", (Applied("Add", (mean, Number(attributes(node)["epsilon"]))),))
        value, scale = (self._broadcast(name, shape, view, width) for name in (x, weight))
        return Applied("Mul", (Applied("Div", (value, root)), scale))

    def _broadcast(self, name: str, shape: StaticShape, view: View, width: int) -> Expression:
        """Read an operand of elementwise arithmetic of that shape."""
        constant = self.facts.constants.get(name)
        if constant is not None:
            own = (1,) * (len(shape) + LEAD - len(constant.dims)) + tuple(constant.dims)
            if any(size != 1 for size in own[:LEAD]):
                raise UnfitError(f"{name} has values for tokens")
            own = own[LEAD:]
        else:
            own = self._token(name)
        if len(own) != len(shape):
            raise UnfitError(f"{name} has other axes")
        pairs = zip(own, packed(own), shape, strict=True)
        steps = tuple(0 if size == 1 != whole else step for size, step, whole in pairs)
        return self._read(name, self._through(view, width, shape, steps), width)

    def _through(self, view: View, width: int, shape: StaticShape, steps: StaticShape) -> View:
        """Return a view of values of that shape as one of others, with those steps along its axes.

        Raises:
            UnfitError: heads or components go over several axes.
        """
        if steps == packed(shape):
            return view
        at = coordinates(view.offset, shape)
        offset = sum(c * step for c, step in zip(at, steps, strict=True))
        found = []
        for size, step in ((self.heads, view.head), (width, view.component)):
            if size == 1 or step == 0:
                found.append(0)
                continue
            axis, times = axis_of(step, shape)
            at[axis] += times * (size - 1)
            if at[axis] >= shape[axis]:
                raise UnfitError("heads or components go over several axes")
            found.append(times * steps[axis])
        return View(offset, *found)

    def _split(self, node: onnx.NodeProto, name: str, view: View, width: int) -> tuple[str, View]:
        shape, whole = self._token(name), self._token(node.input[0])
        axis = self._axis(node, len(shape))
        before = list(node.output)[: list(node.output).index(name)]
        return node.input[0], self._part(
            view, width, shape, whole, {axis: sum(self._token(n)[axis] for n in before)}
        )

    def _slice(self, node: onnx.NodeProto, name: str, view: View, width: int) -> tuple[str, View]:
        shape, whole = self._token(name), self._token(node.input[0])
        found = [self.facts.integers(n) for n in node.input[1:] if n]
        starts, axes = found[0], found[2] if len(found) > 2 else list(range(len(found[0])))
        if len(found) > 3 and any(step != 1 for step in found[3]):
            raise UnfitError("a Slice in steps")
        begin = {}
        for start, axis in zip(starts, axes, strict=True):
            own = axis - LEAD if axis >= 0 else axis + len(shape)
            if own < 0:
                raise UnfitError("a Slice of tokens")
            begin[own] = min(start if start >= 0 else start + whole[own], whole[own])
        return node.input[0], self._part(view, width, shape, whole, begin)

    def _part(
        self,
        view: View,
        width: int,
        shape: StaticShape,
        whole: StaticShape,
        begin: Mapping[int, int],
    ) -> View:
        """Return a view of a part as one of the whole; ``begin``: where it does, by axis."""
        steps = packed(whole)
        found = self._through(view, width, shape, steps)
        shift = sum(start * steps[axis] for axis, start in begin.items())
        return View(found.offset + shift, found.head, found.component)

    def _concat(self, node: onnx.NodeProto, name: str, view: View, width: int) -> tuple[str, View]:
        shape = self._token(name)
        axis, own = self._axis(node, len(shape)), packed(shape)
        first = 0
        for source in node.input:
            part = self._token(source)
            place = View(view.offset - first * own[axis], view.head, view.component)
            first += part[axis]
            if place.offset < 0 or coordinates(view.offset, shape)[axis] >= first:
                continue
            # The part has the strides of the whole here, and must hold all of the view.
            at = coordinates(place.offset, shape)[axis]
            for size, step in ((self.heads, view.head), (width, view.component)):
                if size > 1 and step:
                    along, times = axis_of(step, shape)
                    at += times * (size - 1) if along == axis else 0
            if at >= part[axis]:
                raise UnfitError("a head in several parts of a Concat")
            return source, self._through(place, width, shape, packed(part))
        raise UnfitError("a Concat of too little")

    def _axis(self, node: onnx.NodeProto, rank: int) -> int:
        axis = int(attributes(node).get("axis", 0))
        own = axis - LEAD if axis >= 0 else axis + rank
        if not 0 <= own < rank:
            raise UnfitError("an axis of batch or token")
        return own

    def _reduced(self, node: onnx.NodeProto, view: View) -> Expression:
        row = self._token(node.input[0])
        axes = self.facts.integers(node.input[1]) if len(node.input) > 1 else []
        if axes not in ([-1], [len(row) + LEAD - 1]):
            raise UnfitError("a sum over other axes than the last")
        if view.component:
            raise UnfitError("components of sums")
        width = row[-1]
        inner = self._read(node.input[0], View(view.offset * width, view.head * width, 1), width)
        if node.op_type == "ReduceL2":
            return Applied("Sqrt", (Sum(Applied("Mul", (inner, inner)), width, 1.0),))
        return Sum(inner, width, 1.0 / width if node.op_type == "ReduceMean" else 1.0)

    def _convolution(self, node: onnx.NodeProto, view: View, width: int) -> Expression:
        output = node.output[0]
        if output in self.blocked:
            raise UnfitError("a convolution that others read")
        x, weight, bias, past = (*given_inputs(node), "", "", "")[:4]
        channels, _, size = self.facts.shapes[weight]
        if not isinstance(channels, int) or not isinstance(size, int) or size < 2:
            raise UnfitError("a convolution of unknown sizes")
        if weight not in self.facts.constants or (bias and bias not in self.facts.constants):
            raise UnfitError("a convolution by values that are computed")
        if past in self.facts.constants:
            raise UnfitError("a convolution whose past is constant")
        operand = self._read(x, view, width)
        self.convolutions.setdefault(output, node)
        return Convolution(
            operand,
            self._number(weight),
            self._number(bias) if bias else None,
            self._number(past) if past else None,
            list(self.convolutions).index(output),
            size,
            attributes(node).get("activation", ACTIVATIONS[0]) != ACTIVATIONS[0],
            channels,
            view,
        )


VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Cast", "Identity")
"""Operators that change no value, but for rounding it."""

REDUCED = ("ReduceSum", "ReduceMean", "ReduceL2")

Move = Callable[[OperandReader, onnx.NodeProto, str, View, int], tuple[str, View]]
MOVES: Mapping[str, Move] = {
    "Split": OperandReader._split,
    "Slice": OperandReader._slice,
    "Concat": OperandReader._concat,
}


def coordinates(place: int, shape: Sequence[int]) -> list[int]:
    """Return the place of an element along every axis."""
    return [place // step % size for step, size in zip(packed(tuple(shape)), shape, strict=True)]


def axis_of(step: int, shape: StaticShape) -> tuple[int, int]:
    """Return the axis that a step goes along, and how far.

    Raises:
        UnfitError: along several.
    """
    for axis, own in enumerate(packed(shape)):
        if shape[axis] > 1 and own <= step:
            if step % own:
                break
            return axis, step // own
    raise UnfitError("a step along several axes")
