"""Nodes of a Scan's step, for all steps at once: the tokens are a new first axis.

    x_t (B, D)  ->  X (T, B, D)      MatMul(x_t, W) -> MatMul(X, W)    Split(x_t, 1) -> Split(X, 2)

Each node acts on each token alone, so that the axes it names move by one and nothing else changes.
A sequence of parts becomes the outputs of one Split. A value that is equal in all steps is hoisted.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.dims import Shape
from linexport.graph.edit import END
from linexport.graph.operators import ELEMENTWISE, typed_like_output
from linexport.graph.tensors import constant_values, known_shape

NORMALISERS = ("Softmax", "LogSoftmax", "LayerNormalization")
AXIS = dict.fromkeys(("Split", "Concat", "Gather"), 0) | dict.fromkeys(NORMALISERS, -1)
"""Operators with an axis as an attribute, and its default."""

AXES = {
    **dict.fromkeys(("Unsqueeze", "Squeeze", "ReduceSum", "ReduceMean", "ReduceMax"), 1),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceMin"), 1),
    "Slice": 3,
}
"""Operators with axes as an input, and its number."""

PROJECTIONS = ("MatMul", "Gemm")
"""Products of tokens and stored matrices."""

PARTS = ("SplitToSequence", "SequenceAt")
SHAPED = ("Transpose", "Reshape", "Expand")
OPERATORS = frozenset((*ELEMENTWISE, *AXIS, *AXES, *PROJECTIONS, *PARTS, *SHAPED))


class ScannedTokens(NamedTuple):
    """A tensor outside of a Scan, and its axis that the Scan goes along."""

    tensor: gs.Tensor
    axis: int


def axes_of(node: gs.Node) -> list[int] | None:
    """Return the axes of a node that has them as an input; None where they are not constant."""
    place = AXES[node.op]
    given = constant_values(node.inputs[place]) if len(node.inputs) > place else None
    return None if given is None else given.flatten().tolist()


def parts_of(node: gs.Node, shape: Shape) -> list[int] | None:
    """Return the sizes that a SplitToSequence cuts a shape into; None where they are not known."""
    size = shape[node.attrs.get("axis", 0)]
    # Without keepdims the parts lose the axis, which a Split keeps.
    if not isinstance(size, int) or not node.attrs.get("keepdims", 1):
        return None
    if len(node.inputs) == 1:
        return [1] * size
    if not isinstance(node.inputs[1], gs.Constant):
        return None
    sizes = [int(n) for n in node.inputs[1].values.flatten()]
    if node.inputs[1].values.ndim:
        return sizes
    return [min(sizes[0], size - start) for start in range(0, size, sizes[0])]


def sliced(node: gs.Node, shape: Shape) -> Shape | None:
    """Return the shape of a Slice of a shape; None where it is not known."""
    axes = axes_of(node)
    numbers = [t.values.flatten().tolist() for t in node.inputs[1:] if isinstance(t, gs.Constant)]
    if axes is None or len(numbers) != len(node.inputs) - 1:
        return None
    starts, ends, _, steps = numbers if len(numbers) == 4 else (*numbers, [1] * len(axes))
    found = list(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        size = found[axis]
        if (start, end, step) == (0, END, 1):
            continue  # all of an axis, whatever its size
        if not isinstance(size, int) or step < 1:
            return None
        found[axis] = len(range(size)[start:end:step])
    return found


class LiftedSteps:
    """Nodes that compute for all tokens what those of a step compute for one.

    Args:
        stem: begins the names of new values.
        scanned: what the step reads of the tokens, by the names it has there.
        shapes: of the values at one step.

    Attributes:
        nodes: in the order of evaluation.
        whole: what they compute, by the names that a step has for it.
    """

    def __init__(
        self, stem: str, scanned: Mapping[str, ScannedTokens], shapes: Mapping[str, Shape]
    ) -> None:
        self.stem, self.scanned, self.shapes = stem, scanned, shapes
        self.nodes: list[gs.Node] = []
        self.whole: dict[str, gs.Tensor] = {}
        self._parts: dict[str, list[gs.Variable]] = {}
        tensor, axis = next(iter(scanned.values()))
        self.length = known_shape(tensor)[axis]

    def take(self, body: gs.Graph, nodes: Sequence[gs.Node]) -> None:
        """Take nodes out of the body of a step, and add what they compute, of all tokens."""
        gone = set(map(id, nodes))
        body.nodes[:] = [node for node in body.nodes if id(node) not in gone]
        for node in nodes:
            self.add(node)
        for node in nodes:
            if not any(node is made for made in self.nodes):
                node.inputs, node.outputs = [], []  # it is in no graph any more

    def add(self, node: gs.Node) -> None:
        """Add what a node computes, of all tokens."""
        # Of constants and outer values alone a node computes the same for all tokens.
        if not any(t.name in self.scanned or t.name in self.shapes for t in node.inputs):
            self._move(node)
            return
        if node.op in PARTS:
            self._part(node)
            return
        inputs = [self.of(t) for t in node.inputs]
        attrs = dict(node.attrs)
        if node.op == "Transpose":
            # Tokens are the first axis: every other axis is one later.
            attrs["perm"] = [0, *(axis + 1 for axis in node.attrs["perm"])]
        elif node.op in AXIS:
            attrs["axis"] = _later(node.attrs.get("axis", AXIS[node.op]))
        elif node.op in AXES:
            axes = [_later(axis) for axis in axes_of(node) or ()]
            inputs[AXES[node.op]] = self._numbers(f"{node.outputs[0].name}/axes", axes)
        elif node.op == "Reshape":
            # Tokens and batch keep their sizes.
            sizes = [0, 0, *self.shapes[node.outputs[0].name][1:]]
            inputs[1] = self._numbers(f"{node.outputs[0].name}/shape", sizes)
            attrs = {}  # a 0 is the size that there is
        elif node.op == "Expand":
            inputs[1] = self._with_tokens(node)
        elif node.op in ELEMENTWISE:
            rank = max(len(self._shape(t)) for t in node.inputs)
            # Broadcasting aligns the last axes: a value of lower rank needs ones behind its tokens.
            inputs = [self._wide(t, w, rank) for t, w in zip(node.inputs, inputs, strict=True)]
        elif node.op == "Einsum":
            attrs = {"equation": self._equation(node)}
        # Gemm takes matrices alone; with more axes A B + C is MatMul and Add.
        elif node.op == "Gemm":
            inputs, attrs = self._product(node, inputs), {}
        self._add(_operator(node), inputs, node.outputs, attrs)

    def _move(self, node: gs.Node) -> None:
        """Take over a node that reads no tokens, and that the body may still read."""
        self.nodes.append(node)
        for tensor in node.outputs:
            tensor.name = f"{self.stem}/{tensor.name}"

    def _part(self, node: gs.Node) -> None:
        """Add one Split for a sequence of parts; its parts are the Split's outputs."""
        first, name = node.inputs[0], node.outputs[0].name
        if node.op == "SequenceAt":
            place = constant_values(node.inputs[1])
            assert place is not None
            self.whole[name] = self._parts[first.name][int(place)]
            return
        axis, shape = node.attrs.get("axis", 0), self._shape(first)
        counts, parts = parts_of(node, shape) or [], list[gs.Variable]()
        for i, size in enumerate(counts):
            own = [self.length, *shape]
            own[_later(axis)] = size
            parts.append(gs.Variable(f"{self.stem}/{name}/{i}", first.dtype, own))
        self._parts[name] = parts
        sizes = self._numbers(f"{name}/sizes", counts)
        inputs, attrs = [self.of(first), sizes], {"axis": _later(axis)}
        self.nodes.append(gs.Node("Split", parts[0].name, attrs, inputs, parts))

    def of(self, tensor: gs.Tensor) -> gs.Tensor:
        """Return a step's value for all tokens, along the first axis; an outer value as it is."""
        name = tensor.name
        if name not in self.whole and name in self.scanned:
            outer, axis = self.scanned[name]
            self.whole[name] = outer
            if axis:
                perm = [axis, *(i for i in range(len(known_shape(outer))) if i != axis)]
                self._add("Transpose", [outer], [tensor], {"perm": perm})
        return self.whole.get(name, tensor)

    def _shape(self, tensor: gs.Tensor) -> Shape:
        return self.shapes.get(tensor.name) or tensor.shape or ()

    def _wide(self, tensor: gs.Tensor, whole: gs.Tensor, rank: int) -> gs.Tensor:
        """Return all tokens of a value of lower rank, so that the tokens stay the first axis."""
        missing = rank - len(self._shape(tensor))
        if tensor.name not in self.whole or not missing:
            return whole
        axes = self._numbers(f"{tensor.name}/left", range(1, 1 + missing))
        found = gs.Variable(f"{whole.name}/wide{missing}", whole.dtype)
        found.shape = [self.length, *[1] * missing, *self._shape(tensor)]
        self.nodes.append(gs.Node("Unsqueeze", found.name, {}, [whole, axes], [found]))
        return found

    def _with_tokens(self, node: gs.Node) -> gs.Tensor:
        """Return the shape that an Expand gives, with any number of tokens before it."""
        name = f"{self.stem}/{node.outputs[0].name}/shape"
        found = gs.Variable(name, np.int64)
        # Expand broadcasts: a 1 in front keeps the number of tokens.
        inputs = [self._numbers(f"{node.outputs[0].name}/tokens", [1]), node.inputs[1]]
        self.nodes.append(gs.Node("Concat", name, {"axis": 0}, inputs, [found]))
        return found

    def _product(self, node: gs.Node, inputs: list[gs.Tensor]) -> list[gs.Tensor]:
        """Return the terms of A B + C, of more than two axes."""
        x, matrix, *added = inputs
        name = f"{self.stem}/{node.outputs[0].name}"
        if node.attrs.get("transB", 0):
            turned = gs.Variable(f"{name}/matrix", matrix.dtype, list(known_shape(matrix))[::-1])
            self.nodes.append(
                gs.Node("Transpose", turned.name, {"perm": [1, 0]}, [matrix], [turned])
            )
            matrix = turned
        if not added:
            return [x, matrix]
        product = gs.Variable(f"{name}/product", node.outputs[0].dtype)
        product.shape = [self.length, *self.shapes[node.outputs[0].name]]
        self.nodes.append(gs.Node("MatMul", product.name, {}, [x, matrix], [product]))
        return [product, *added]

    def _equation(self, node: gs.Node) -> str:
        """Return the equation of an Einsum with one letter more for the tokens."""
        given, result = node.attrs["equation"].replace(" ", "").split("->")
        # A new letter in the terms and in the result makes the tokens one more batch axis.
        letter = next(c for c in string.ascii_letters if c not in given)
        terms = [
            letter + term if tensor.name in self.whole else term
            for tensor, term in zip(node.inputs, given.split(","), strict=True)
        ]
        return f"{','.join(terms)}->{letter}{result}"

    def _numbers(self, name: str, values: Iterable[int | str]) -> gs.Constant:
        return gs.Constant(f"{self.stem}/{name}", np.array(list(values), np.int64))

    def _add(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        outputs: Sequence[gs.Tensor],
        attrs: Mapping[str, object],
    ) -> None:
        """Add a node whose outputs are all tokens of what these are at one step."""
        made = []
        for tensor in outputs:
            alike = typed_like_output(op)
            if tensor.dtype is None and alike and isinstance(tensor, gs.Variable):
                tensor.dtype = inputs[alike[0]].dtype
            shape = [self.length, *self.shapes[tensor.name]]
            made.append(gs.Variable(f"{self.stem}/{tensor.name}", tensor.dtype, shape))
            self.whole[tensor.name] = made[-1]
        self.nodes.append(gs.Node(op, made[0].name, attrs, inputs, made))


def _operator(node: gs.Node) -> str:
    """Return the operator for all tokens."""
    if node.op != "Gemm":
        return str(node.op)
    return "Add" if len(node.inputs) == 3 else "MatMul"


def _later(axis: int) -> int:
    """Return an axis counted with the tokens before all others."""
    # A negative axis is counted from the end, where nothing was added.
    return axis + 1 if axis >= 0 else axis
