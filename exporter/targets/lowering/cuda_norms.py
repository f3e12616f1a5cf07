"""Norms as ONNX Runtime's operators, for a GPU on which each node is a launch.

    x / Sqrt(mean(x^2) + eps) * w            ->  SimplifiedLayerNormalization(x, w)
    s = a + b [+ c];  norm of s              ->  y, s = SkipLayerNormalization(a, b, ..., c)

The first is made in float32, before precision is applied: the operator takes half precision and
sums in float32, so that no Cast is needed on either side. The second is made of what came of it;
it sums in float32 where the provider's option ``STRICT_NORMS`` is set, as linexport does.
ONNX Runtime makes both by itself in some forms, and leaves others: a reciprocal, a Cast between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.graph.walk import reads
from linexport.plugins.ops.op import attribute_value
from linexport.plugins.ops.registry import known_shapes, known_types
from linexport.plugins.ops.shapes import Dim
from linexport.targets.cpu_fusion.groups import drop_unused

MICROSOFT = "com.microsoft"

SIMPLIFIED, LAYER = "SimplifiedLayerNormalization", "LayerNormalization"
NORMS = frozenset((SIMPLIFIED, LAYER))
"""Operators that take half precision and sum in float32. ONNX Runtime has the first in the domain
of ONNX's own, which does not know it."""

SKIPS: Mapping[str, str] = {name: f"Skip{name}" for name in NORMS}

TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
"""Types that the operators with a residual have kernels of."""

RANK = 3
"""Axes of what they take: batch, tokens, channels."""


def with_root_mean_squares(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 model with each root mean square norm and its weight as one operator.

    Args:
        model: with shapes of its values, and its weights in it.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    values = _Values(made)
    norms = {n.output[0]: _root_mean_square(values, n) for n in made.graph.node}
    if not any(norms.values()):
        return model
    for node in made.graph.node:
        norm = norms[node.output[0]]
        if norm is not None:
            x, weight, epsilon = norm
            made_of, output = [x, weight], [node.output[0]]
            # In a function ONNX Runtime reads stash_type without a look at whether it is there.
            node.CopyFrom(
                helper.make_node(
                    SIMPLIFIED, made_of, output, node.name, axis=-1, epsilon=epsilon, stash_type=1
                )
            )
    drop_unused(made.graph)
    return made


def with_residuals(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with each norm of a sum as one operator, which gives the sum as well.

    Args:
        model: with shapes and types of its values.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    values = _Values(made)
    taken: dict[str, onnx.NodeProto] = {}
    for node in made.graph.node:
        if node.op_type in NORMS and not node.domain and _is_residual(values, node):
            taken.setdefault(node.input[0], node)
    if not taken:
        return model
    gone = {norm.output[0] for norm in taken.values()}
    kept = []
    for node in made.graph.node:
        norm = taken.get(node.output[0])
        if norm is not None:
            kept.append(_skip(values, node, norm))
        elif node.output[0] not in gone:
            kept.append(node)
    del made.graph.node[:]
    made.graph.node.extend(kept)
    drop_unused(made.graph)
    if all(o.domain != MICROSOFT for o in made.opset_import):
        made.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    return made


def known_to_onnx(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose nodes ONNX's checker knows; only it is to read it.

    Operators that ONNX Runtime has in ONNX's domain get another one there.
    """
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    parts = [(checked.graph.node, checked.opset_import)]
    for nodes, opsets in [*parts, *((f.node, f.opset_import) for f in checked.functions)]:
        for node in nodes:
            if node.op_type == SIMPLIFIED and not node.domain:
                node.domain = MICROSOFT
        if all(opset.domain != MICROSOFT for opset in opsets):
            opsets.append(helper.make_opsetid(MICROSOFT, 1))
    return checked


class _Values:
    """Producers, readers, shapes, types and constants of a graph's values."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.shapes: Mapping[str, Sequence[Dim]] = known_shapes(model)
        self.constants = {t.name: t for t in graph.initializer}
        self.types = known_types(model)
        self.producers = {name: n for n in graph.node for name in n.output if name}
        self.counts: dict[str, int] = {o.name: 1 for o in graph.output}
        for node in graph.node:
            for name in reads(node):
                self.counts[name] = self.counts.get(name, 0) + 1

    def made_by(self, name: str, *kinds: str) -> onnx.NodeProto | None:
        """Return the node that computes a value, if it is one of these operators of ONNX's."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type in kinds and not node.domain else None

    def number(self, name: str) -> float | None:
        """Return a constant's only number."""
        tensor = self.constants.get(name)
        if tensor is None or np.prod(tensor.dims) != 1 or tensor.data_location:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])

    def is_row(self, name: str, width: Dim) -> bool:
        """Return whether a value is a constant of so many numbers."""
        tensor = self.constants.get(name)
        return tensor is not None and list(tensor.dims) == [width]

    def split(self, node: onnx.NodeProto) -> tuple[str, str] | None:
        """Return the value and the constant of a node of two inputs, in this order."""
        inputs = sorted(node.input, key=lambda name: name in self.constants)
        fits = len(inputs) == 2 and [n in self.constants for n in inputs] == [False, True]
        return (inputs[0], inputs[1]) if fits else None


def _root_mean_square(values: _Values, node: onnx.NodeProto) -> tuple[str, str, float] | None:
    """Return x, the weight and epsilon, if a node is the product that ends such a norm."""
    parts = values.split(node) if node.op_type == "Mul" and not node.domain else None
    if parts is None or values.counts.get(parts[0]) != 1:
        return None
    quotient, weight = parts
    found = _quotient(values, quotient)
    if found is None or values.types.get(quotient) != TensorProto.FLOAT:
        return None
    x, root = found
    shape = values.shapes.get(x) or ()
    if not shape or not values.is_row(weight, shape[-1]):
        return None
    epsilon = _epsilon(values, x, root)
    return None if epsilon is None else (x, weight, epsilon)


def _quotient(values: _Values, name: str) -> tuple[str, str] | None:
    """Return x and y of x / y, or of x times the reciprocal of y."""
    divided = values.made_by(name, "Div")
    if divided is not None:
        return divided.input[0], divided.input[1]
    product = values.made_by(name, "Mul")
    if product is None:
        return None
    for factor, x in (product.input, reversed(product.input)):
        reciprocal = values.made_by(factor, "Reciprocal")
        if reciprocal is not None:
            return x, reciprocal.input[0]
    return None


def _epsilon(values: _Values, x: str, root: str) -> float | None:
    """Return epsilon, if a value is the root of the mean of the squares of x's rows and of it."""
    node = values.made_by(root, "Sqrt")
    added = None if node is None else values.made_by(node.input[0], "Add")
    parts = None if added is None else values.split(added)
    mean = None if parts is None else values.made_by(parts[0], "ReduceMean")
    if parts is None or mean is None or not _over_rows(values, mean, len(values.shapes[x])):
        return None
    square = values.made_by(mean.input[0], "Pow", "Mul")
    if square is None or square.input[0] != x:
        return None
    power = square.op_type == "Pow" and values.number(square.input[1]) == 2
    squared = power or (square.op_type == "Mul" and square.input[1] == x)
    return values.number(parts[1]) if squared else None


def _over_rows(values: _Values, mean: onnx.NodeProto, rank: int) -> bool:
    """Return whether a mean is over the last axis, which it keeps."""
    attributes = {a.name: attribute_value(a) for a in mean.attribute}
    axes = values.constants.get(mean.input[1]) if len(mean.input) > 1 else None
    if axes is None or not attributes.get("keepdims", 1):
        return False
    return numpy_helper.to_array(axes).tolist() in ([-1], [rank - 1])


def _is_residual(values: _Values, norm: onnx.NodeProto) -> bool:
    """Return whether a norm over the last axis is of a sum of two values of one shape."""
    x, *parameters = norm.input
    added, shape = values.made_by(x, "Add"), values.shapes.get(x)
    if added is None or shape is None or len(shape) != RANK or len(norm.output) != 1:
        return False
    axis = next((a.i for a in norm.attribute if a.name == "axis"), -1)
    stash = next((a.i for a in norm.attribute if a.name == "stash_type"), 1)
    rows = all(values.is_row(name, shape[-1]) for name in parameters if name)
    same = all(values.shapes.get(name) == shape for name in added.input)
    known = all(size is not None for size in shape) and isinstance(shape[-1], int)
    types = {values.types.get(name) for name in (x, *added.input, *filter(None, parameters))}
    typed = len(types) == 1 and types <= {*TYPES}
    computed = values.constants.keys().isdisjoint(added.input)
    return axis in (-1, RANK - 1) and stash == 1 and rows and same and known and typed and computed


def _skip(values: _Values, added: onnx.NodeProto, norm: onnx.NodeProto) -> onnx.NodeProto:
    """Return the operator in the place of a sum and its norm; one part's bias is added inside."""
    total, parts, bias = added.output[0], list(added.input), ""
    for place, name in enumerate(parts):
        inner = values.made_by(name, "Add") if values.counts.get(name) == 1 else None
        split = None if inner is None else values.split(inner)
        whole = split is not None and values.shapes.get(split[0]) == values.shapes[total]
        if split is not None and whole and values.is_row(split[1], values.shapes[total][-1]):
            parts[place], bias = split
            break
    parameters = [*norm.input[1:]]
    if norm.op_type == LAYER:
        parameters = [*parameters, ""][:2]
    given = [*parts, *parameters, bias]
    while not given[-1]:
        given.pop()
    shown = [norm.output[0], "", "", total] if values.counts[total] > 1 else [norm.output[0]]
    epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
    return helper.make_node(
        SKIPS[norm.op_type], given, shown, norm.name, domain=MICROSOFT, epsilon=epsilon
    )
