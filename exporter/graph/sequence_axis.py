"""The axis that holds the tokens, and the operations that mix tokens along it.

A graph streams if every operation besides those with a state acts on each token alone. The token
axis is followed by the symbol of its size, which shapes carry: an operation mixes tokens if it
removes that axis, doubles it, changes its length, or works along it. A linexport op declares where
it has tokens, and whether it mixes them only by its states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.operators import SIZES_ONLY
from linexport.graph.states import CONVOLVED, SCAN, is_rows
from linexport.plugins.ops.op import DOMAIN, Op
from linexport.plugins.ops.registry import all_ops

ALONG_AXIS = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK"), -1),
    **dict.fromkeys(("ArgMax", "ArgMin"), 0),
}
"""Operators that work along the axis their attribute names, with its default."""

FROM_AXIS = {"LayerNormalization": -1, "RMSNormalization": -1}
"""Operators that work along the axis their attribute names and all after it, with its default."""

RECURRENT = ("Scan", "Loop", "RNN", "LSTM", "GRU", "CumSum", "ReverseSequence")
ALWAYS = (*RECURRENT, "InstanceNormalization", "GroupNormalization", "LRN")
"""Operators that mix tokens wherever the token axis is among their first input's, the batch aside:
CumSum keeps its axis in a tensor, and is not worth reading to find one that does no harm."""

DIMENSION = re.compile(r"(\d+\*)?[^\W\d]\w*")
"""Sizes that are a dimension: "seq", or "64*blocks" of one whose sizes are multiples."""

KNOWN = (None, "", "ai.onnx", "com.microsoft")
"""Domains whose operators are told apart here; any other may do anything."""

WINDOWS = ("Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool")


def symbol(graph: gs.Graph) -> str | None:
    """Return the size of the token axis: the length of all nodes that may have a state.

    Where no op of linexport has one, it is what every Scan with a state goes along.
    """
    lengths = set()
    for node in graph.nodes:
        op = _op(node)
        if op and op.has_state and op.causal(node.attrs):
            shape = node.inputs[0].shape
            lengths.add(shape[op.token_axis[op.input_names[0]]] if shape else None)
    if not lengths:
        lengths = {scanned(n) for n in graph.nodes if n.op == "Scan"}
    found = lengths.pop() if len(lengths) == 1 else None
    # A Scan over the n chunks of an input of "64*n" tokens is none over tokens.
    known = any(found in (t.shape or ()) for t in graph.inputs)
    return found if known and isinstance(found, str) and DIMENSION.fullmatch(found) else None


def op_lengths(model: onnx.ModelProto) -> frozenset[str]:
    """Return the dynamic sizes of what ops that may have a state take for tokens."""
    nodes = [(node, op) for node in gs.import_onnx(model).nodes if (op := _op(node))]
    sizes = (
        tensor.shape[op.token_axis[name]]
        for node, op in nodes
        if op.has_state
        for name, tensor in zip(op.input_names, node.inputs, strict=False)
        if name in op.token_axis and tensor.shape
    )
    return frozenset(size for size in sizes if isinstance(size, str))


def scanned(scan: gs.Node) -> int | str | None:
    """Return the one size that a Scan goes along; None where that is not known."""
    count = scan.attrs["num_scan_inputs"]
    axes = scan.attrs.get("scan_input_axes") or [0] * count
    given = zip(scan.inputs[-count:], axes, strict=True)
    sizes = {None if t.shape is None else t.shape[axis] for t, axis in given}
    return sizes.pop() if len(sizes) == 1 else None


def _op(node: gs.Node) -> Op | None:
    return all_ops().get(node.op) if node.domain == DOMAIN else None


def mixing(model: onnx.ModelProto) -> list[str]:
    """Return operations that mix tokens and have no state, in order: "ReduceMean node_mean"."""
    graph = gs.import_onnx(model)
    tokens = symbol(graph)
    if tokens is None:
        return []
    own = _with_past(graph)
    found = [n for n in graph.nodes if _mixes(n, tokens) and not _has_size(n, own)]
    return [f"{node.op} {node.name}".strip() for node in found]


def _with_past(graph: gs.Graph) -> set[int | str]:
    """Return the sizes of axes that hold rows of past pieces and tokens, as those of pairs do."""
    joined = [n for n in graph.nodes if n.op == "Concat" and _is_past(n.inputs[0].name)]
    return {n.outputs[0].shape[n.attrs["axis"]] for n in joined}


def _is_past(name: str) -> bool:
    return is_rows(name) or name.startswith(CONVOLVED[0])


def _is_carried(state: gs.Tensor) -> bool:
    """Return whether a state of a Scan is an input, or is one after the first call."""
    start = producer(state, "Where")
    return any(t.name.startswith(SCAN[0]) for t in (state, *(start.inputs if start else ())))


def _has_size(node: gs.Node, sizes: set[int | str]) -> bool:
    return any(size in sizes for t in (*node.inputs, *node.outputs) for size in t.shape or ())


def _mixes(node: gs.Node, tokens: str) -> bool:
    if node.op in SIZES_ONLY or not node.inputs:
        return False
    if node.op == "Scan" and any(_is_carried(t) for t in node.inputs):
        return False
    op = _op(node)
    if op and op.causal(node.attrs):
        return _elsewhere(node, op, tokens)
    if _moves(node, tokens):
        return True
    places = list(_places(node.inputs, tokens))
    if not places:
        return False
    made = list(_places(node.outputs, tokens))
    known = [t for t in node.outputs if t.shape is not None]
    lost = bool(known) and not made
    doubled = max(made, default=0) > max(places)
    return lost or doubled or changes_along(node, tokens)


def changes_along(node: gs.Node, tokens: str) -> bool:
    """Return whether a node changes the length of the token axis, or works along it."""
    return _changes_length(node, tokens) or _works_along(node, tokens)


def _moves(node: gs.Node, tokens: str) -> bool:
    """Return whether a node gives as many tokens in other places: flipped, shifted or joined."""
    given, made = (list(t.shape or ()) for t in (node.inputs[0], node.outputs[0]))
    if node.op == "Concat":
        return bool(made) and made[node.attrs["axis"]] == tokens
    if node.op not in ("Pad", "Slice"):  # others may read weights, whose values are elsewhere
        return False
    numbers = [t.values if isinstance(t, gs.Constant) else None for t in node.inputs[1:]]
    if node.op == "Pad" and numbers[0] is not None and len(numbers) < 3:
        front, behind = np.reshape(numbers[0], (2, -1)).tolist()
        padded = zip(given, front, behind, strict=False)
        return any(size == tokens and (a or b) for size, a, b in padded)
    if node.op != "Slice" or len(numbers) < 3 or numbers[2] is None:
        return False
    cut = [given[axis] for axis in np.ravel(numbers[2]) if given]
    backwards = len(numbers) > 3 and numbers[3] is not None and bool((numbers[3] < 0).any())
    return tokens in cut and (backwards or not made)


def _elsewhere(node: gs.Node, op: Op, tokens: str) -> bool:
    """The token axis is at another place than the op has it: among channels, or heads."""
    given = zip(op.input_names, node.inputs, strict=False)
    return any(
        axis != op.token_axis.get(name)
        for name, tensor in given
        for axis, size in enumerate(tensor.shape or ())
        if size == tokens
    )


def _places(tensors: list[gs.Tensor], tokens: str) -> Iterator[int]:
    """Yield how often the token axis occurs in each tensor that has it."""
    for tensor in tensors:
        count = list(tensor.shape or ()).count(tokens)
        if count:
            yield count


def _changes_length(node: gs.Node, tokens: str) -> bool:
    """Return whether an output has a size such as "seq + 3" where the inputs have "seq"."""
    sizes = {d for t in node.outputs for d in t.shape or () if isinstance(d, str)}
    before = {d for t in node.inputs for d in t.shape or ()}
    return any(tokens in size and size != tokens for size in sizes - before)


def _works_along(node: gs.Node, tokens: str) -> bool:
    shape = list(node.inputs[0].shape or ())
    if node.op in ALWAYS or node.domain not in KNOWN:
        return tokens in shape[1:] or node.domain == DOMAIN
    axes: list[str | int] = []
    if node.op in ALONG_AXIS:
        axes = shape[node.attrs.get("axis", ALONG_AXIS[node.op]) :][:1]
    elif node.op in FROM_AXIS:
        axes = shape[node.attrs.get("axis", FROM_AXIS[node.op]) :]
    elif node.op in WINDOWS:
        kernel = node.attrs.get("kernel_shape") or list(node.inputs[1].shape or ())[2:]
        axes = [d for d, size in zip(shape[2:], kernel, strict=False) if size != 1]
    return tokens in axes
