"""A language model's head, run on the last tokens alone where no other logits are read.

    x (B, T, W) -> head -> logits (B, T, V)
    x (B, T, W) -> Slice [s:] -> head -> logits (B, n, V)          s = -n, n = logits_to_keep

For 0 the Slice begins at -0 and takes all tokens. The head works on each token alone, so that the
logits of the others are the same numbers. This is made of a model when it is opened: its file, and
what other programs read of it, does not change. ``logits_to_keep``, and 0 for all, are those of
transformers. The input is s, which a GPU's Slice reads on the host: a node that negates n there
would be one that no CUDA graph takes. (An initializer that is an input, too, would be a default;
ONNX Runtime binds no arrays to it.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.graph.operators import ELEMENTWISE
from linexport.graph.walk import reads
from linexport.targets.runtime.options import LOGITS_FROM

PRODUCTS = ("MatMul", "MatMulNBits")
"""Operators that a head may be: with tokens as their first input, and weights."""

TOKENS, END = 1, np.iinfo(np.int64).max


def with_kept_logits(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """Return a model that takes ``logits_from``, or the very one given where it cannot.

    Args:
        model: with a head that is one product with stored weights.
        output: name of the logits, (B, T, V).
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    head = find_head(graph, output)
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    if head is None or LOGITS_FROM in taken | {i.name for i in graph.input}:
        return model
    end, axis, kept = (f"{LOGITS_FROM}/{name}" for name in ("end", "axis", "tokens"))
    for name, value in ((end, END), (axis, TOKENS)):
        graph.initializer.append(numpy_helper.from_array(np.full(1, value, np.int64), name))
    graph.input.append(helper.make_tensor_value_info(LOGITS_FROM, onnx.TensorProto.INT64, [1]))
    index = next(i for i, node in enumerate(graph.node) if node is head)
    given = [head.input[0], LOGITS_FROM, end, axis]
    head.input[0] = kept
    graph.node.insert(index, helper.make_node("Slice", given, [kept], name=LOGITS_FROM))
    _forget_sizes(graph, {name for name, _ in made_of(graph, output)})
    logits = next(o for o in graph.output if o.name == output)
    logits.type.tensor_type.shape.dim[TOKENS].dim_param = f"{LOGITS_FROM}/length"
    return changed


def find_head(graph: onnx.GraphProto, output: str) -> onnx.NodeProto | None:
    """Return the product that gives logits, of which nothing else is made; None without one.

    Between it and the logits are operators on each number alone: the head works on each token.
    """
    path = list(made_of(graph, output))
    if any(_readers(graph, name) != 1 for name, _ in path):
        return None
    _, last = path[-1] if path else ("", onnx.NodeProto())
    data = _data(graph)
    tokens_first = [name in data for name in last.input[:2]] == [True, False]
    return last if last.op_type in PRODUCTS and tokens_first else None


def made_of(graph: onnx.GraphProto, output: str) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Yield values from the logits back to the head, each with the node that gives it.

    It ends where a node has two inputs that depend on those of the model, or does something else
    than is known to act on each number alone.
    """
    makers = {name: node for node in graph.node for name in node.output}
    data, name = _data(graph), output
    while (node := makers.get(name)) is not None:
        yield name, node
        given = [n for n in node.input if n in data]
        # Scales, biases and caps of logits.
        if node.op_type not in ELEMENTWISE or len(given) != 1:
            return
        name = given[0]


def _data(graph: onnx.GraphProto) -> set[str]:
    """Return the values that depend on inputs.

    All others are weights, be they listed or not: large ones follow the graph in its file.
    """
    found = {i.name for i in graph.input} - {t.name for t in graph.initializer}
    for node in graph.node:
        if not found.isdisjoint(reads(node)):
            found |= {*node.output}
    return found


def _readers(graph: onnx.GraphProto, name: str) -> int:
    shown = sum(o.name == name for o in graph.output)
    return shown + sum(name in reads(node) for node in graph.node)


def _forget_sizes(graph: onnx.GraphProto, names: set[str]) -> None:
    """Drop the stored shapes of values that have fewer tokens now."""
    kept = [v for v in graph.value_info if v.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)
