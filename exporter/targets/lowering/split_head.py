"""A language model in two parts: the decoder, which gives hidden states, and the head.

    input_ids, mask, past states -> decoder -> hidden (B, T, W), present states
    hidden (1, n, W) -> head -> logits (1, n, V)

Both are the nodes and weights of the model itself. The head is one product with stored weights, and
operators on each number alone, see ``kept_logits``: it gives a token's logits for its hidden
states, whatever the other tokens are.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.graph.walk import reads
from linexport.targets.lowering.kept_logits import find_head, made_of

HIDDEN = "hidden_states"
"""Name of the decoder's output, and of the head's input."""


SCALING = frozenset(("Mul", "Div"))
"""Operators behind the head that multiply differences."""

NOT_EXPANDING = frozenset(("Identity", "Cast", "Tanh", "Add", "Sub", "Clip"))
"""Operators that leave differences as they are, or reduce them."""


def find_stretch(model: onnx.ModelProto, output: str) -> float | None:
    """Return what operators behind the head multiply differences of its product by, at the most.

    None where the model cannot be split before the product that gives this output.
    """
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken |= {value.name for value in (*graph.input, *graph.output)}
    if HIDDEN in taken or find_head(graph, output) is None:
        return None
    *behind, _ = [node for _, node in made_of(graph, output)]
    if any(node.op_type not in SCALING | NOT_EXPANDING for node in behind):
        return None
    factors = [_factor(graph, node) for node in behind if node.op_type in SCALING]
    return math.prod(factors) if all(map(math.isfinite, factors)) else None


def _factor(graph: onnx.GraphProto, node: onnx.NodeProto) -> float:
    """Return what a product or quotient multiplies differences by; infinity where unknown."""
    stored = {t.name: t for t in graph.initializer}
    stored |= {
        made.output[0]: attribute.t
        for made in graph.node
        if made.op_type == "Constant"
        for attribute in made.attribute
        if attribute.name == "value"
    }
    [*known] = [stored[name] for name in node.input if name in stored]
    is_quotient = node.op_type == "Div"
    if len(known) != 1 or (is_quotient and node.input[1] not in stored):
        return math.inf
    if known[0].data_location == onnx.TensorProto.EXTERNAL:
        return math.inf
    values = np.abs(numpy_helper.to_array(known[0]).astype(np.float64))
    with np.errstate(divide="ignore"):
        return float((1 / values if is_quotient else values).max(initial=0.0))


def keep_decoder(model: onnx.ModelProto, output: str) -> None:
    """Have a model that can be split give hidden states in the place of this output."""
    graph = model.graph
    head = find_head(graph, output)
    assert head is not None
    graph.node.append(helper.make_node("Identity", [head.input[0]], [HIDDEN], name=HIDDEN))
    outputs = [o if o.name != output else onnx.ValueInfoProto(name=HIDDEN) for o in graph.output]
    _set_outputs(graph, outputs)
    _drop_unused(graph)


def keep_head(model: onnx.ModelProto, output: str) -> None:
    """Have a model that can be split compute this output of hidden states, and nothing else."""
    graph = model.graph
    head = find_head(graph, output)
    assert head is not None
    head.input[0] = HIDDEN
    logits = next(o for o in graph.output if o.name == output)
    kind = logits.type.tensor_type.elem_type
    _set_outputs(graph, [helper.make_tensor_value_info(output, kind, [None] * 3)])
    del graph.value_info[:]
    _drop_unused(graph)
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info(HIDDEN, kind, [None] * 3))


def _set_outputs(graph: onnx.GraphProto, outputs: list[onnx.ValueInfoProto]) -> None:
    del graph.output[:]
    graph.output.extend(outputs)


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop nodes that no output depends on, and small weights that only they read."""
    needed = {o.name for o in graph.output}
    kept = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(reads(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    weights = [t for t in graph.initializer if t.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(weights)
