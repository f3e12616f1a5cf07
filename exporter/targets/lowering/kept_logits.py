"""A language model's head, run on the last tokens alone where no other logits are read.

    x (B, T, W) -> head -> logits (B, T, V)
    x (B, T, W) -> Slice [s:] -> head -> logits (B, n, V)          s = -n, n = logits_to_keep
    x (B, T, W) -> GatherND places -> head -> logits (B, n, V)     places (B, n), of an engine

For 0 the Slice begins at -0 and takes all tokens. The head works on each token alone, so that the
logits of the others are the same numbers. This is made of a model when it is opened: its file, and
what other programs read of it, does not change. ``logits_to_keep``, and 0 for all, are those of
transformers. The input is s, which a GPU's Slice reads on the host: a node that negates n there
would be one that no CUDA graph takes. (An initializer that is an input, too, would be a default;
ONNX Runtime binds no arrays to it.)

An engine has memory for the largest shapes it is built for. Sizes that depend on values have no
bound there; those of the input ``logits_at`` are in its profiles, as the batch and the tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.graph.operators import ELEMENTWISE
from linexport.graph.walk import reads
from linexport.plugins.ops.registry import dim_of
from linexport.targets.runtime.options import LOGITS_AT, LOGITS_FROM, LOGITS_TO_KEEP

PRODUCTS = ("MatMul", "MatMulNBits")
"""Operators that a head may be: with tokens as their first input, and weights."""

BATCH, TOKENS, END = 0, 1, np.iinfo(np.int64).max


def with_kept_logits(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """Return a model that takes ``logits_from``, or the very one given where it cannot.

    Args:
        model: with a head that is one product with stored weights.
        output: name of the logits, (B, T, V).
    """
    end, axis, kept = (f"{LOGITS_FROM}/{name}" for name in ("end", "axis", "tokens"))
    constants = {end: np.full(1, END), axis: np.full(1, TOKENS)}

    def kept_tokens(hidden: str) -> list[onnx.NodeProto]:
        given = [hidden, LOGITS_FROM, end, axis]
        return [helper.make_node("Slice", given, [kept], name=LOGITS_FROM)]

    start = helper.make_tensor_value_info(LOGITS_FROM, onnx.TensorProto.INT64, [1])
    return _selecting(model, output, start, constants, kept_tokens, f"{LOGITS_FROM}/length")


def with_logits_at(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """Return a model that takes ``logits_at``, or the very one given where it cannot.

    The input has, for each row of the batch, the places of the tokens whose logits are computed,
    int64 (B, n); the dimension n is called ``logits_to_keep``.

    Args:
        model: with a head that is one product with stored weights.
        output: name of the logits, (B, T, V).
    """
    shape = next(o for o in model.graph.output if o.name == output).type.tensor_type.shape
    batch = dim_of(shape.dim[BATCH])
    if batch is None:
        return model
    axis, places, kept = (f"{LOGITS_AT}/{name}" for name in ("axis", "places", "tokens"))

    def kept_tokens(hidden: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("Unsqueeze", [LOGITS_AT, axis], [places], name=places),
            helper.make_node("GatherND", [hidden, places], [kept], LOGITS_AT, batch_dims=1),
        ]

    sizes = [batch, LOGITS_TO_KEEP]
    given = helper.make_tensor_value_info(LOGITS_AT, onnx.TensorProto.INT64, sizes)
    return _selecting(model, output, given, {axis: np.full(1, 2)}, kept_tokens, LOGITS_TO_KEEP)


def _selecting(
    model: onnx.ModelProto,
    output: str,
    given: onnx.ValueInfoProto,
    constants: Mapping[str, np.ndarray],
    kept_tokens: Callable[[str], list[onnx.NodeProto]],
    length: str,
) -> onnx.ModelProto:
    """Return the model with nodes before its head that select tokens by an input of the graph.

    Args:
        model: not changed, and returned where it has no head or a value of the input's name.
        output: name of the logits.
        given: the input.
        constants: int64 values that the nodes read, by name.
        kept_tokens: returns the nodes for the name of the head's input; the last one's first
            output takes its place.
        length: name of the dimension of tokens in the logits.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    head = find_head(graph, output)
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    if head is None or given.name in taken | {i.name for i in graph.input}:
        return model
    for name, value in constants.items():
        graph.initializer.append(numpy_helper.from_array(value.astype(np.int64), name))
    graph.input.append(given)
    index = next(i for i, node in enumerate(graph.node) if node is head)
    nodes = kept_tokens(head.input[0])
    head.input[0] = nodes[-1].output[0]
    for place, node in enumerate(nodes):
        graph.node.insert(index + place, node)
    _forget_sizes(graph, {name for name, _ in made_of(graph, output)})
    logits = next(o for o in graph.output if o.name == output)
    logits.type.tensor_type.shape.dim[TOKENS].dim_param = length
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
