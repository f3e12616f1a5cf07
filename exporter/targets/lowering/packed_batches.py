"""A lowered model whose calls take sequences of their own lengths, side by side.

    tokens (B, T, ...), past (B, ...)  ->  tokens (1, n, ...), cu_seqlens (B + 1), past (B, ...)

Sequence i of a call is tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1, one at least. What mixes
tokens are attentions and convolutions with states, which become functions of one more input; all
other nodes treat tokens alike, and see one long sequence. A model with any other state is refused.
Where a token becomes m of them, the ends are m times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.errors import UnsupportedModelError
from linexport.graph.states import State, find_states
from linexport.manifest.records import TOKENS
from linexport.plugins.ops import causal_conv_tokens, linear_attention
from linexport.plugins.ops.body import import_microsoft
from linexport.plugins.ops.op import (
    DOMAIN,
    Lowering,
    Node,
    Op,
    function_for,
    name_overload,
    read_node,
)
from linexport.plugins.ops.registry import dim_of, known_shapes, linexport_nodes

ENDS = "cu_seqlens"
"""Input with the end of each sequence, after a zero."""

OPS: Mapping[Op, str] = {
    linear_attention.OP: "VarlenLinearAttention",
    causal_conv_tokens.OP: "VarlenCausalConv",
}
"""Operator types that nodes become, by their op."""


@dataclass(frozen=True)
class _Rows:
    """Names in a model of rows.

    Attributes:
        batch: the axis of its rows.
        length: that of their tokens.
        held: inputs and outputs that are states.
    """

    batch: str
    length: str
    held: frozenset[str]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> _Rows:
        """Read a model.

        Raises:
            UnsupportedModelError: it has no states, or its inputs have not these two axes.
        """
        states = find_states(model)
        if not states:
            raise refused("it has no states")
        batch = states[0].shape[0]
        if not isinstance(batch, str):
            raise refused(f"its batch is fixed at {batch}; trace it with a dynamic one")
        if batch == TOKENS:
            raise refused(f"its batch is called {TOKENS}, as the axis of all tokens is")
        graph = model.graph
        values = {name for node in graph.node for name in (*node.input, *node.output)}
        if ENDS in values | {i.name for i in graph.input}:
            raise refused(f"it has a value called {ENDS}, as the ends of sequences are")
        _check_states(model, states)
        held = frozenset(name for s in states for name in (s.past, s.present))
        lengths = {_length("input", i, batch) for i in _given(graph) if i.name not in held}
        if len(lengths) != 1:
            raise refused(f"its inputs have {len(lengths)} dynamic axes besides the batch")
        return cls(batch, lengths.pop(), held)

    def joined(self, what: str, infos: Iterable[onnx.ValueInfoProto]) -> None:
        """Make (B, ..., T, ...) of inputs or outputs (1, ..., n, ...), in place.

        Raises:
            UnsupportedModelError: one has other axes.
        """
        for info in infos:
            if info.name in self.held:
                continue
            if _length(what, info, self.batch) != self.length:
                raise refused(f"its {what} {info.name} has another axis than its tokens")
            for size in info.type.tensor_type.shape.dim:
                if size.dim_param == self.length:
                    size.dim_param = TOKENS
                elif size.dim_param:
                    size.dim_value = 1

    def times(self, node: onnx.NodeProto, op: Op, view: Node) -> int:
        """Return how many tokens of a node there are for each of a sequence.

        Raises:
            UnsupportedModelError: they are no multiple.
        """
        first = op.input_names[0]
        size = view.shapes[first][op.tokens(view.attributes)[first]]
        number = str(size).removesuffix(f"*{self.length}")
        if size is None or size == self.length:
            return 1
        if not number.isdecimal() or isinstance(size, int):
            raise refused(f"{node.name} is over {size} tokens where a sequence has {self.length}")
        return int(number)


def packed(model: onnx.ModelProto, lowering: Callable[[Op, Node], Lowering]) -> onnx.ModelProto:
    """Return the model for packed batches.

    Args:
        model: lowered, with its states exposed.
        lowering: of a node of ``OPS`` whose tokens are (1, n, ...); it reads ``ENDS``.

    Raises:
        UnsupportedModelError: a state, an input or an output is not of one sequence each.
    """
    rows = _Rows.of(model)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    functions: dict[str, onnx.FunctionProto] = {}
    times = set()
    _count_one_row(graph, rows.batch)
    for node, op, view in linexport_nodes(made):
        if op in OPS:
            function = _function(view, op, lowering(op, view), made.opset_import)
            node.op_type, node.overload = function.name, function.overload
            functions[function.overload] = function
            number = rows.times(node, op, view)
            node.input.append(_ends(number))
            times.add(number)
    for number in sorted(times - {1}):
        factor = numpy_helper.from_array(np.array(number, np.int32), f"{_ends(number)}/factor")
        graph.initializer.append(factor)
        graph.node.insert(0, helper.make_node("Mul", [ENDS, factor.name], [_ends(number)]))
    replaced = {(DOMAIN, op.name) for op in OPS}
    kept = [f for f in made.functions if (f.domain, f.name) not in replaced]
    del made.functions[:]
    made.functions.extend([*kept, *functions.values()])
    import_microsoft(made)
    rows.joined("input", _given(graph))
    rows.joined("output", graph.output)
    sizes = [f"{rows.batch} + 1"]
    graph.input.append(helper.make_tensor_value_info(ENDS, TensorProto.INT32, sizes))
    for info in graph.value_info:  # sizes that are known are of one token or of a sequence's state
        for size in info.type.tensor_type.shape.dim:
            size.ClearField("dim_param")
    return made


def rows_of(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, Op, Node]]:
    """Yield the nodes of packed batches with their op and their view as it, for rows."""
    ops, shapes = {name: op for op, name in OPS.items()}, known_shapes(model)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type in ops:
            op, rows = ops[node.op_type], onnx.NodeProto()
            rows.CopyFrom(node)
            del rows.input[-1]
            yield node, op, read_node(rows, op, shapes)


def refused(reason: str) -> UnsupportedModelError:
    """Return the error that says why a model has no packed form."""
    return UnsupportedModelError(
        f"This model takes no packed batches: {reason}. Leave out --packed-batches for rows."
    )


def _check_states(model: onnx.ModelProto, states: Sequence[State]) -> None:
    """Check that every state is of a node that has a packed form, and no node is without its state.

    Raises:
        UnsupportedModelError: one is not.
    """
    packable = {op.name for op in OPS}
    for state in states:
        if state.op not in packable:
            raise refused(
                f"its state {state.past} is of {state.op}; those of linear attention and of short "
                "convolutions have a packed form"
            )
    for node, op, view in linexport_nodes(model):
        mixes = not op.causal(view.attributes) or op.has_state
        if mixes and op not in OPS:
            raise refused(f"{node.name} is {op.name}, which has no packed form")
        pasts = [node.input[s.past : s.past + 1] for s in op.states(view)]
        if mixes and not (pasts and all(past and past[0] for past in pasts)):
            raise refused(f"{node.name}, {op.name}, reads a whole sequence and has no state")
    held = {state.past for state in states}
    for node in model.graph.node:
        turned = held.intersection(node.input)
        if turned and node.op_type not in (*packable, "Cast", "Shape"):
            raise refused(f"its state {min(turned)} is changed before its op reads it")


def _count_one_row(graph: onnx.GraphProto, batch: str) -> None:
    """Make the batch of a state, where sizes of tokens are computed from it, one, in place."""
    shapes = {i.name: i.type.tensor_type.shape.dim for i in (*graph.input, *graph.value_info)}
    for node in graph.node:
        sizes = [dim_of(size) for size in shapes.get(node.input[0], ())] if node.input else []
        known = [size for size in sizes if isinstance(size, int)]
        if node.op_type == "Shape" and sizes == [batch, *known]:
            ends = {a.name: a.i for a in node.attribute}
            kept = [1, *known][ends.get("start", 0) : ends.get("end", len(sizes))]
            node.CopyFrom(helper.make_node("Constant", [], node.output, node.name, value_ints=kept))


def _length(what: str, info: onnx.ValueInfoProto, batch: str) -> str:
    """Return the axis of the tokens of an input or output.

    Raises:
        UnsupportedModelError: it has other axes.
    """
    sizes = [dim_of(size) for size in info.type.tensor_type.shape.dim]
    named = [size for size in sizes if isinstance(size, str)]
    if sizes[:1] != [batch] or len(named) != len([batch, TOKENS]) or None in sizes:
        shown = f"({', '.join(map(str, sizes))})"
        raise refused(f"its {what} {info.name} is {shown}; expected ({batch}, tokens, ...)")
    return named[1]


def _given(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    stored = {t.name for t in graph.initializer}
    return [i for i in graph.input if i.name not in stored]


def _ends(times: int) -> str:
    return ENDS if times == 1 else f"{ENDS}/{times}"


def _function(
    view: Node, op: Op, lowering: Lowering, opsets: Iterable[onnx.OperatorSetIdProto]
) -> onnx.FunctionProto:
    function = function_for(view, op, lowering)
    function.name = OPS[op]
    function.input.append(ENDS)
    versions = {opset.domain: opset.version for opset in opsets}
    for opset in function.opset_import:
        opset.version = versions.get(opset.domain, opset.version)
    name_overload(function)
    return function
