"""Bytes of the values that a graph holds at once, from the sizes of its inputs alone.

    at the worst moment:  sum over values that were made and are still to be read

Shapes follow node by node from those of the inputs, values of shapes among them: a graph computes
where a Reshape leads, and which branch is taken. A loop has one turn of its body in memory, and
what it stacks. Weights are not counted; functions are where they are called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from linexport.graph.dims import StaticShape
from linexport.graph.operators import VIEWS
from linexport.graph.walk import reads, subgraphs

log = logging.getLogger(__name__)

KNOWN = 2**10
"""Elements of a value that may be a shape, and is computed."""

ATTENTION = {
    ("", "Attention"),
    ("com.microsoft", "GroupQueryAttention"),
    ("com.microsoft", "MultiHeadAttention"),
}
HEADS = ("q_num_heads", "num_heads")
"""Operators that compute scores inside, and their attributes for the number of heads."""

LIKE = {
    "LinearAttention": (2, 3),
    "GatedDeltaNet": (2, 6),
    "CausalConvWithState": (0, 3),
    "VarlenCausalConvWithState": (0, 4),
    "QMoE": (0,),
}
"""ONNX Runtime's operators, of which onnx has no shapes, and the inputs that their outputs are
like: the output of attention is like its values, a new state is like the one before."""

ONNX_RUNTIME = "com.microsoft"


@dataclass(frozen=True)
class _Value:
    """A value: its shape and type, and its numbers where they are known."""

    shape: StaticShape
    kind: int
    numbers: np.ndarray | None = None

    @property
    def bytes(self) -> int:
        try:
            size = helper.tensor_dtype_to_np_dtype(self.kind).itemsize
        except (KeyError, TypeError):  # a sequence, or what onnx has no type for
            size = 4
        return prod(self.shape) * size

    def sized(self, shape: Iterable[int]) -> _Value:
        return _Value(tuple(shape), self.kind)


class Footprint:
    """The memory of calls of a graph.

    Args:
        model: with the values of its small weights; is not changed.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = inliner.inline_local_functions(model)
        self._opsets = {o.domain: o.version for o in self._model.opset_import}
        self._folded: set[str] = _folded(self._model.graph)

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of values at the worst moment of a call.

        Args:
            sizes: of the dynamic dimensions of its inputs, by name; others count as 1.
        """
        graph, values = self._model.graph, {}
        for tensor in graph.initializer:
            values[tensor.name] = _stored(tensor)
        for given in graph.input:
            kind = given.type.tensor_type
            shape = tuple(
                d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, 1)
                for d in kind.shape.dim
            )
            values.setdefault(given.name, _Value(shape, kind.elem_type))
        return self._run(graph, values)

    def _run(self, graph: onnx.GraphProto, values: dict[str, _Value]) -> int:
        """Give every value of a graph its shape, in order; return the bytes at the worst moment.

        Args:
            graph: whose inputs are in ``values``.
            values: by name, those of graphs around it among them.
        """
        last = {name: i for i, node in enumerate(graph.node) for name in reads(node)}
        last |= dict.fromkeys((o.name for o in graph.output), len(graph.node))
        holder: dict[str, str] = {}  # the value whose memory a view is
        left: dict[str, int] = {}  # views and values of each memory that are still to be read
        held = worst = 0
        ends: dict[int, list[str]] = {}
        for name, end in last.items():
            ends.setdefault(end, []).append(name)
        for i, node in enumerate(graph.node):
            inner, made = self._node(node, values)
            for name, value in zip(node.output, made, strict=False):
                if not name:
                    continue
                values[name] = value
                # The runtime gives such an operator the memory of its input.
                source = holder.get(node.input[0]) if node.op_type in VIEWS else None
                holder[name] = name if source is None else source
                left[holder[name]] = left.get(holder[name], 0) + 1
                if source is None and name not in self._folded:
                    held += value.bytes
                if name not in last:
                    ends.setdefault(i, []).append(name)
            worst = max(worst, held + inner)
            for name in ends.pop(i, ()):
                memory = holder.get(name)
                if memory is None:  # of a graph around this one, or given
                    continue
                left[memory] -= 1
                if not left[memory] and memory not in self._folded:
                    held -= values[memory].bytes
        return worst

    def _node(self, node: onnx.NodeProto, values: dict[str, _Value]) -> tuple[int, list[_Value]]:
        """Return the bytes that a node takes while it runs, and what it makes."""
        if node.op_type == "If" and not node.domain:
            return self._branches(node, values)
        if node.op_type == "Loop" and not node.domain:
            return self._loop(node, values)
        if node.op_type == "Scan" and not node.domain:
            return self._scan(node, values)
        given = [values.get(name) for name in node.input]
        return _scores(node, given), self._made(node, given)

    def _branches(
        self, node: onnx.NodeProto, values: dict[str, _Value]
    ) -> tuple[int, list[_Value]]:
        """Take the branch that the condition says, or each where it is known in a call alone."""
        taken = values[node.input[0]].numbers if node.input[0] in values else None
        names: tuple[str, ...] = ("then_branch", "else_branch")
        if taken is not None and taken.size == 1:
            names = names[:1] if taken.item() else names[1:]
        found = []
        for attribute in node.attribute:
            if attribute.name in names:
                inside = dict(values)
                worst = self._run(attribute.g, inside)
                found.append((worst, [inside[o.name] for o in attribute.g.output]))
        return max(found, key=lambda one: one[0] + sum(v.bytes for v in one[1]))

    def _loop(self, node: onnx.NodeProto, values: dict[str, _Value]) -> tuple[int, list[_Value]]:
        (body,) = subgraphs(node)
        trips = values[node.input[0]].numbers if node.input[0] else None
        count = int(trips.item()) if trips is not None and trips.size == 1 else _longest(values)
        carried = [values[name] for name in node.input[2:]]
        counter, going = _Value((), TensorProto.INT64), _Value((), TensorProto.BOOL)
        given = [counter, going, *(one.sized(one.shape) for one in carried)]
        worst, made = self._turn(body, values, given)
        outputs = made[1:]
        stacked = [one.sized((count, *one.shape)) for one in outputs[len(carried) :]]
        return worst, [*outputs[: len(carried)], *stacked]

    def _scan(self, node: onnx.NodeProto, values: dict[str, _Value]) -> tuple[int, list[_Value]]:
        (body,) = subgraphs(node)
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        given = [values[name] for name in node.input]
        states = len(given) - attributes["num_scan_inputs"]
        scanned = given[states:]
        axes = attributes.get("scan_input_axes") or [0] * len(scanned)
        count = max((s.shape[axis] for s, axis in zip(scanned, axes, strict=True)), default=1)
        rows = [s.sized(_without(s.shape, axis)) for s, axis in zip(scanned, axes, strict=True)]
        worst, made = self._turn(body, values, [*given[:states], *rows])
        stacked = [one.sized((count, *one.shape)) for one in made[states:]]
        return worst, [*made[:states], *stacked]

    def _turn(
        self, body: onnx.GraphProto, values: dict[str, _Value], given: Sequence[_Value]
    ) -> tuple[int, list[_Value]]:
        inside = dict(values)
        inside |= {t.name: _stored(t) for t in body.initializer}
        inside |= {i.name: value for i, value in zip(body.input, given, strict=True)}
        worst = self._run(body, inside)
        return worst, [inside[o.name] for o in body.output]

    def _made(self, node: onnx.NodeProto, given: Sequence[_Value | None]) -> list[_Value]:
        """Return what a node without a body makes; like its largest input where nothing says it."""
        if node.op_type == "Shape" and given[0] is not None:
            bounds = {a.name: a.i for a in node.attribute}
            shape = given[0].shape[bounds.get("start", 0) : bounds.get("end")]
            return [_numbers(np.array(shape, np.int64))]
        if node.op_type == "Size" and given[0] is not None:
            return [_numbers(np.array(prod(given[0].shape), np.int64))]
        found = self._inferred(node, given)
        if all(one is not None and prod(one.shape) <= KNOWN for one in found):
            return self._computed(node, given) or [one for one in found if one is not None]
        sizes = [value for value in given if value is not None]
        largest = max(sizes, key=lambda v: prod(v.shape), default=_Value((), TensorProto.FLOAT))
        own = _of_runtime(node, given) if node.domain == ONNX_RUNTIME else []
        own += [largest.sized(largest.shape)] * (len(found) - len(own))
        return [like if one is None else one for like, one in zip(own, found, strict=False)]

    def _computed(
        self, node: onnx.NodeProto, given: Sequence[_Value | None]
    ) -> list[_Value] | None:
        """Return what a node computes of known numbers; None where one is not known."""
        names = [name for name in node.input if name]
        known = [value.numbers for value in given if value is not None]
        if node.domain or len(names) != len(known) or any(one is None for one in known):
            return None
        try:
            feeds = dict(zip(names, known, strict=True))
            found = ReferenceEvaluator(node, opsets=self._opsets).run(None, feeds)
            return [_numbers(np.asarray(one)) for one in found]
        except Exception as error:  # the reference has no common error
            log.debug("%s %r is not computed: %s", node.op_type, node.name, error)
            return None

    def _inferred(
        self, node: onnx.NodeProto, given: Sequence[_Value | None]
    ) -> list[_Value | None]:
        """Return what onnx infers; None where it does not."""
        types, data = {}, {}
        try:
            for name, value in zip(node.input, given, strict=True):
                if value is not None:
                    types[name] = helper.make_tensor_type_proto(value.kind, value.shape)
                    if value.numbers is not None:
                        data[name] = numpy_helper.from_array(value.numbers, name)
            version = self._opsets.get(node.domain, 1)
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            imports = [helper.make_opsetid(*one) for one in self._opsets.items()]
            found = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=imports
            )
        except Exception as error:  # of onnx, for operators and nodes that it does not know
            log.debug("%s %r has no shape: %s", node.op_type, node.name, error)
            return [None] * len(node.output)
        return [_whole(found.get(name)) for name in node.output]


def _scores(node: onnx.NodeProto, given: Sequence[_Value | None]) -> int:
    """Return the bytes of the scores inside an operator for attention: queries times keys."""
    if (node.domain, node.op_type) not in ATTENTION or None in given[:2] or len(given) < 2:
        return 0
    heads = max((a.i for a in node.attribute if a.name in HEADS), default=1)
    query, key = (value.shape for value in given[:2] if value is not None)
    if len(query) not in (3, 4) or len(key) < 2:
        return 0
    return 4 * query[0] * (heads if len(query) == 3 else query[1]) * query[-2] * key[-2]


def _folded(graph: onnx.GraphProto) -> set[str]:
    """Return the values that are made of weights alone, once, when a graph is opened.

    They are transposed weights, above all: products read those as they are stored.
    """
    known = {tensor.name for tensor in graph.initializer} - {i.name for i in graph.input}
    for node in graph.node:
        if node.input and known.issuperset(filter(None, reads(node))):
            known.update(node.output)
    return known


def _of_runtime(node: onnx.NodeProto, given: Sequence[_Value | None]) -> list[_Value]:
    """Return what the first outputs of an operator of ONNX Runtime are, as far as is known."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    first = given[0] if given else None
    if node.op_type == "MatMulNBits" and first is not None:
        return [first.sized((*first.shape[:-1], attributes["N"]))]
    if node.op_type == "GatherBlockQuantized" and None not in given[1:3]:
        index, scales = (value for value in given[1:3] if value is not None)
        return [scales.sized((*index.shape, scales.shape[-1] * attributes["block_size"]))]
    found = []
    for place in LIKE.get(node.op_type, ()):
        value = given[place] if place < len(given) else None
        if value is None:
            break
        found.append(value.sized(value.shape))
    if found and node.op_type == "LinearAttention":
        heads = attributes["kv_num_heads"], attributes["q_num_heads"]
        width = found[0].shape[-1] // heads[0] * max(heads)
        found[0] = found[0].sized((*found[0].shape[:-1], width))
    return found


def _numbers(values: np.ndarray) -> _Value:
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    return _Value(values.shape, kind, values if values.size <= KNOWN else None)


def _stored(tensor: TensorProto) -> _Value:
    value = _Value(tuple(tensor.dims), tensor.data_type)
    if prod(tensor.dims) > KNOWN or tensor.data_location == TensorProto.EXTERNAL:
        return value
    try:
        return _Value(value.shape, value.kind, numpy_helper.to_array(tensor))
    except (ValueError, TypeError):  # its values were left out
        return value


def _whole(found: onnx.TypeProto | None) -> _Value | None:
    """Return a value of an inferred type, where all sizes are known."""
    if found is None or not found.tensor_type.HasField("shape"):
        return None
    dims = found.tensor_type.shape.dim
    if not all(d.HasField("dim_value") for d in dims):
        return None
    return _Value(tuple(d.dim_value for d in dims), found.tensor_type.elem_type)


def _longest(values: Mapping[str, _Value]) -> int:
    return max((max(v.shape, default=1) for v in values.values()), default=1)


def _without(shape: StaticShape, axis: int) -> StaticShape:
    kept = list(shape)
    del kept[axis]
    return tuple(kept)
