"""The axis that holds the tokens, by the symbol of its size, which shapes carry."""

from __future__ import annotations

import re

import onnx
import onnx_graphsurgeon as gs

from linexport.graph.operators import WINDOWS
from linexport.plugins.ops.op import DOMAIN, Op
from linexport.plugins.ops.registry import all_ops

ALONG_AXIS = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK"), -1),
    **dict.fromkeys(("ArgMax", "ArgMin"), 0),
}
"""Operators that work along the axis their attribute names, with its default."""

FROM_AXIS = {"LayerNormalization": -1, "RMSNormalization": -1}
"""Operators that work along the axis their attribute names and all after it, with its default."""

LAYERS = ("RNN", "LSTM", "GRU")
"""Operators along their first axis, or their second one in another layout."""

MIXING_ELEMENTS = ("DynamicQuantizeLinear",)
"""Operators that mix all elements of their first input."""

RECURRENT = (*LAYERS, "Scan", "Loop", "CumSum", "ReverseSequence")
ALWAYS = (*RECURRENT, *MIXING_ELEMENTS, "InstanceNormalization", "GroupNormalization", "LRN")
"""Operators that mix tokens wherever the token axis is among their first input's, the batch aside:
CumSum keeps its axis in a tensor, and is not worth reading to find one that does no harm."""

DIMENSION = re.compile(r"(\d+\*)?[^\W\d]\w*")
"""Sizes that are a dimension: "seq", or "64*blocks" of one whose sizes are multiples."""

KNOWN = (None, "", "ai.onnx", "com.microsoft")
"""Domains whose operators are known here; an op of another domain may do anything."""


def symbol(graph: gs.Graph) -> str | None:
    """Return the size of the token axis: the length of all nodes that may have a state.

    Where no op of linexport has one, it is what every Scan with a state goes along.
    """
    lengths = set()
    for node in graph.nodes:
        op = _op(node)
        if op and op.has_state and op.causal(node.attrs):
            shape = node.inputs[0].shape
            lengths.add(shape[op.tokens(node.attrs)[op.input_names[0]]] if shape else None)
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
        tensor.shape[op.tokens(node.attrs)[name]]
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


def changes_along(node: gs.Node, tokens: str) -> bool:
    """Return whether a node changes the length of the token axis, or works along it."""
    return _changes_length(node, tokens) or _works_along(node, tokens)


def _changes_length(node: gs.Node, tokens: str) -> bool:
    """Return whether an output has a size such as "seq + 3" where the inputs have "seq"."""
    sizes = {d for t in node.outputs for d in t.shape or () if isinstance(d, str)}
    before = {d for t in node.inputs for d in t.shape or ()}
    return any(tokens in size and size != tokens for size in sizes - before)


def _works_along(node: gs.Node, tokens: str) -> bool:
    shape = list(node.inputs[0].shape or ())
    if node.op in LAYERS:
        return tokens in shape[node.attrs.get("layout", 0) :][:1]
    if node.op in MIXING_ELEMENTS:
        return tokens in shape
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
