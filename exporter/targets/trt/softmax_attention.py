"""Softmax attention as one node, which TensorRT-RTX has kernels for that keep no scores.

    O = softmax(scale Q K^T + M) V        Q (B, H, T, D), K and V (B, G, S, D), H = r G

    MatMul(Q, K^T), Mul, Add(Where(seen, 0, -large)), Softmax, MatMul(V)  ->  Attention (opset 23)

With grouped queries, Q is read as (B, G, r T, D), and M is repeated r times over its rows, or
scores are read as (B, H, T, S) and weights as (B, G, r T, S): query head h then reads key head
floor(h / r), as it does in Attention.

In half precision only: the builder has no such kernel for float32, and refuses the node. It refuses
it also where one query has many keys, so that the graph without it has to be at hand.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.registry import known_shapes
from linexport.targets.cpu_fusion.groups import drop_unused

log = logging.getLogger(__name__)

OPSET = 23
"""First opset with Attention."""

CHANGED = {"GroupNormalization"}
"""Operators that compute something else since opset 20; the others gained types only."""

HIDDEN: dict[int, float] = {TensorProto.FLOAT16: -3e4, TensorProto.BFLOAT16: -1e30}
"""Bias of a pair that is not seen: its weight is zero next to any other pair's, and a row with no
other is finite, whichever type the kernel sums in."""

LARGE = -1e4
"""Constants from here down hide a pair in the original."""


def with_attention(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a copy with Attention nodes; None where no softmax attention is matched."""
    opset = next(o for o in model.opset_import if not o.domain)
    if any(n.op_type in CHANGED for n in model.graph.node if not n.domain):
        return None
    matcher = _Matcher(model)
    found = [m for n in model.graph.node if n.op_type == "Softmax" and (m := matcher.match(n))]
    if not found:
        return None
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes: list[onnx.NodeProto] = []
    by_output = {match.output: match for match in found}
    for node in made.graph.node:
        match = by_output.get(node.output[0])
        nodes += [node] if match is None else _written(made.graph, match)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    drop_unused(made.graph)
    for one in made.opset_import:
        one.version = max(opset.version, OPSET) if not one.domain else one.version
    return made


@dataclass(frozen=True)
class _Attention:
    """One attention.

    Attributes:
        query, key, value: (B, H, T, D), (B, G, S, D), (B, G, S, D), of any floating type.
        seen: booleans (B or 1, 1, T, S).
        scale: of scores.
        element: type of the products.
        output: (B, H, T, D), of that type.
    """

    query: str
    key: str
    value: str
    seen: str
    scale: float
    element: int
    output: str


def _written(graph: onnx.GraphProto, match: _Attention) -> list[onnx.NodeProto]:
    """Return the nodes of an attention.

    In the original, a query that sees no key weighs all keys alike, since a large bias swallows its
    scores. Such queries are multiplied by exp(bias) = 0 here, so that their scores are equal.
    """
    nodes: list[onnx.NodeProto] = []

    def add(op_type: str, part: str, *inputs: str, **attributes: Any) -> str:
        name = f"{match.output}/{part}"
        nodes.append(helper.make_node(op_type, inputs, [name], name, **attributes))
        return name

    def constant(part: str, array: onnx.TensorProto) -> str:
        array.name = f"{match.output}/{part}"
        graph.initializer.append(array)
        return array.name

    element = match.element
    zero = constant("zero", helper.make_tensor("", element, [], [0.0]))
    hidden = constant("hidden", helper.make_tensor("", element, [], [HIDDEN[element]]))
    keys = constant("keys", numpy_helper.from_array(np.array([-1])))
    bias = add("Where", "bias", match.seen, zero, hidden)
    sees = add("Exp", "sees", add("ReduceMax", "largest_bias", bias, keys, keepdims=1))
    query, key, value = (
        add("Cast", part, name, to=element)
        for part, name in (("query", match.query), ("key", match.key), ("value", match.value))
    )
    seeing = add("Mul", "seeing_query", query, sees)
    names = [seeing, key, value, bias], [match.output]
    nodes.append(helper.make_node("Attention", *names, match.output, scale=match.scale))
    return nodes


class _Matcher:
    """Nodes and constants by the names of values."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.made = {name: node for node in model.graph.node for name in node.output}
        self.constants = {t.name: t for t in model.graph.initializer}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.shapes = known_shapes(model)

    def match(self, softmax: onnx.NodeProto) -> _Attention | None:
        """Return the attention that a Softmax is of; None where any part is another one's."""
        found = self._matched(softmax)
        if found is None:
            log.debug("%s is not of an attention that one node computes", softmax.name)
        return found

    def _matched(self, softmax: onnx.NodeProto) -> _Attention | None:
        if _attribute(softmax, "axis", -1) not in (-1, 3):
            return None
        added, combined = self._node(softmax.input[0], "Add"), self._reader(softmax.output[0])
        joined = combined is not None and combined.op_type == "Reshape"
        weights = combined.output[0] if combined is not None and joined else softmax.output[0]
        combined = self._reader(weights) if joined else combined
        if added is None or combined is None or self._uncast(combined.input[0]) != weights:
            return None
        for scores, bias in (tuple(added.input), tuple(added.input)[::-1]):
            (product, scale, parted), (seen, repeats) = self._scores(scores), self._seen(bias)
            if product is not None and seen is not None and parted == joined:
                return self._attention(product, scale, seen, None if joined else repeats, combined)
        return None

    def _attention(
        self,
        product: onnx.NodeProto,
        scale: float,
        seen: str,
        repeats: int | None,
        combined: onnx.NodeProto,
    ) -> _Attention | None:
        """Return the attention of two products.

        Args:
            product: of queries and keys.
            scale: of scores.
            seen: the pairs that are seen.
            repeats: of these; None where scores and weights are read as those of each head.
            combined: of weights and values.
        """
        transposed = self._node(self._uncast(product.input[1]), "Transpose")
        if transposed is None or _attribute(transposed, "perm", []) != [0, 1, 3, 2]:
            return None
        query, output = self._uncast(product.input[0]), combined.output[0]
        key, value = self._uncast(transposed.input[0]), self._uncast(combined.input[1])
        element, grouped = self._element(product, combined), repeats != 1
        if grouped:
            split, joined = self._node(query, "Reshape"), self._reader(output)
            if split is None or joined is None or joined.op_type != "Reshape":
                return None
            query, output = self._uncast(split.input[0]), joined.output[0]
            sizes, after = self._integers(split.input[1]), self._integers(joined.input[1])
        shapes: list[Any] = [self.shapes.get(n) for n in (query, key, value, seen)]
        if element is None or any(s is None or len(s) != 4 for s in shapes):
            return None
        (_, heads, rows, width), (_, groups, keys, _), (_, also, _, wide), mask = shapes
        if not all(isinstance(n, int) for n in (heads, groups, also, width, wide)):
            return None
        if None in mask or tuple(mask[1:]) != (1, rows, keys):
            return None
        if groups != also or heads % groups or repeats not in (None, heads // groups):
            return None
        starts = [0, groups, -1, width], [0, groups, -1, 0]
        ends = [0, heads, -1, wide], [0, heads, -1, 0]
        if grouped and (sizes not in starts or after not in ends):
            return None
        return _Attention(query, key, value, seen, scale, element, output)

    def _scores(self, name: str) -> tuple[onnx.NodeProto | None, float, bool]:
        """The product of queries and keys, what it is multiplied by, and whether it is reshaped."""
        name, scale = self._uncast(name), 1.0
        scaled = self._node(name, "Mul")
        for factor, rest in (tuple(scaled.input), tuple(scaled.input)[::-1]) if scaled else ():
            constant = self._constant(factor)
            if constant is not None and constant.size == 1 and constant.item() > 0:
                name, scale = self._uncast(rest), float(constant.item())
                break
        parted = self._node(name, "Reshape")
        if parted is not None:
            name = self._uncast(parted.input[0])
        return self._node(name, "MatMul"), scale, parted is not None

    def _seen(self, name: str) -> tuple[str | None, int]:
        """The booleans that a bias is written from, and how often its rows are repeated."""
        repeats, repeated = 1, self._node(name, "Concat")
        if repeated is not None:
            if len(set(repeated.input)) != 1 or _attribute(repeated, "axis", 0) not in (2, -2):
                return None, 1
            repeats, name = len(repeated.input), repeated.input[0]
        where = self._node(name, "Where")
        shown, hidden = map(self._constant, where.input[1:]) if where else (None, None)
        if where is None or shown is None or hidden is None or shown.size * hidden.size != 1:
            return None, 1
        fits = shown.item() == 0 and hidden.item() <= LARGE
        return (where.input[0] if fits else None), repeats

    def _element(self, *products: onnx.NodeProto) -> int | None:
        """The half precision that products are computed in; None in float32."""
        cast = {self._cast_to(name) for node in products for name in node.input} - {None}
        return cast.pop() if len(cast) == 1 and cast <= set(HIDDEN) else None

    def _cast_to(self, name: str) -> int | None:
        node = self._node(name, "Cast")
        return None if node is None else int(_attribute(node, "to", 0))

    def _uncast(self, name: str) -> str:
        """The value that was cast between floating types."""
        node = self._node(name, "Cast")
        return name if node is None else node.input[0]

    def _node(self, name: str, op_type: str) -> onnx.NodeProto | None:
        node = self.made.get(name)
        return node if node is not None and node.op_type == op_type and not node.domain else None

    def _reader(self, name: str) -> onnx.NodeProto | None:
        """The one node that reads a value, past a cast."""
        readers = self.readers.get(name, [])
        if len(readers) == 1 and readers[0].op_type == "Cast":
            readers = self.readers.get(readers[0].output[0], [])
        found = readers[0] if len(readers) == 1 else None
        return found if found is not None and found.op_type in ("MatMul", "Reshape") else None

    def _constant(self, name: str) -> np.ndarray | None:
        tensor = self.constants.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)

    def _integers(self, name: str) -> list[int] | None:
        constant = self._constant(name)
        return None if constant is None else [int(n) for n in constant.ravel()]


def _attribute(node: onnx.NodeProto, name: str, default: object) -> Any:
    found = [helper.get_attribute_value(a) for a in node.attribute if a.name == name]
    return found[0] if found else default
