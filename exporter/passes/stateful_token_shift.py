"""x_{t-1} of a tensor of tokens -> CausalConvWithState with the taps 1, 0.

    Pad(x[:, :-1], one zero in front)     Concat(zeros, x[:, :-1])     Pad(x, 1 in front)[:, :-1]

along the axis that holds the tokens, as RWKV mixes each token with the one before. The state is the
last token, so that a piece of a sequence knows the token before its first.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.edit import is_output, producer
from linexport.passes.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.plugins.ops.causal_conv import OP
from linexport.plugins.ops.op import DOMAIN
from linexport.recognise.sizes import Size, parse
from linexport.recognise.values import Values

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shift:
    """A tensor (B, T, C) or (B, C, T), and the value that is it one token later."""

    given: gs.Tensor
    result: gs.Tensor
    axis: int


def run(graph: gs.Graph) -> PassResult:
    """Replace every such shift, where other nodes tell which axis holds the tokens."""
    length = sequence_axis.symbol(graph)
    if length is None:
        log.debug("no shift gets a state: no causal node tells the axis of the tokens")
        return PassResult(False)
    known = Values.of_graph(graph)

    def match(graph: gs.Graph, node: gs.Node) -> _Shift | None:
        read = {"Pad": _padded, "Concat": _concatenated, "Slice": _cut}.get(node.op)
        found = None if read is None or not node.inputs else read(node, known)
        if found is None:
            return None
        shape = found.given.shape
        if shape is None or len(shape) != 3 or not found.axis or shape[found.axis] != length:
            raise NoMatchError("it is not a shift of (B, T, C) or (B, C, T) along the tokens")
        channels = shape[3 - found.axis]
        if found.given.dtype not in (np.float32, np.float16) or not isinstance(channels, int):
            raise NoMatchError("its type or the number of its channels is not known")
        if is_output(graph, found.result):
            raise NoMatchError("it is an output of the graph")
        return found

    return rewrite_matches(graph, match, _replace, log)


def _padded(node: gs.Node, known: Values) -> _Shift | None:
    """Pad(x[:, :-1], 1 in front), or one Pad that does both."""
    pads = _pads(node, known)
    if pads is None or len(pads) != 2 * len(node.inputs[0].shape or ()):
        return None
    front, behind = np.split(pads, 2)
    (places,) = np.nonzero(front)
    if len(places) != 1 or front[places[0]] != 1:
        return None
    axis, end = int(places[0]), behind[places[0]]
    if end == -1 and np.count_nonzero(behind) == 1:
        return _Shift(node.inputs[0], node.outputs[0], axis)
    whole = None if behind.any() else _shortened(node.inputs[0], axis, known)
    return None if whole is None else _Shift(whole, node.outputs[0], axis)


def _concatenated(node: gs.Node, known: Values) -> _Shift | None:
    """Concat(zeros, x[:, :-1])."""
    if len(node.inputs) != 2:
        return None
    axis, zeros = node.attrs["axis"], node.inputs[0]
    one = zeros.shape is not None and zeros.shape[axis] == 1
    whole = _shortened(node.inputs[1], axis, known) if one and known.is_zero(zeros) else None
    rank = None if whole is None else len(whole.shape or ())
    return _Shift(whole, node.outputs[0], axis % rank) if whole is not None and rank else None


def _cut(node: gs.Node, known: Values) -> _Shift | None:
    """Pad(x, 1 in front)[:, :-1]."""
    pad = producer(node.inputs[0], "Pad")
    pads = None if pad is None else _pads(pad, known)
    if pad is None or pads is None or np.count_nonzero(pads) != 1 or pads.max() != 1:
        return None
    axis = int(np.argmax(pads))
    rank = len(pads) // 2
    whole = pad.inputs[0].shape
    sizes = None if whole is None else [parse(d) for d in whole]
    if axis >= rank or sizes is None or not _lacks_last(node, axis, rank, known, sizes[axis]):
        return None
    return _Shift(pad.inputs[0], node.outputs[0], axis)


def _pads(node: gs.Node, known: Values) -> np.ndarray | None:
    """Return the pads of all axes, where zeros are padded."""
    if node.attrs.get("mode", "constant") != "constant" or len(node.inputs) < 2:
        return None
    rest = [t for t in node.inputs[2:] if not t.is_empty()]
    fill = known.numbers(rest[0]) if rest else np.zeros(1)
    pads = known.numbers(node.inputs[1])
    return pads if len(rest) < 2 and fill is not None and not fill.any() else None


def _shortened(tensor: gs.Tensor, axis: int, known: Values) -> gs.Tensor | None:
    """Return x of x[:, :-1]."""
    cut = producer(tensor, "Slice")
    if cut is None or cut.inputs[0].shape is None:
        return None
    rank = len(cut.inputs[0].shape)
    return cut.inputs[0] if _lacks_last(cut, axis % rank, rank, known, None) else None


def _lacks_last(node: gs.Node, axis: int, rank: int, known: Values, length: Size | None) -> bool:
    """Return whether a Slice takes all but the last of an axis, of that length if it is known."""
    start, *rest = [known.numbers(node.inputs[i]) for i in (1, *range(3, len(node.inputs)))]
    end = known.get(node.inputs[2])
    if start is None or end is None or start.tolist() != [0] or end.size != 1:
        return False
    if any(r is None for r in rest) or len(rest) == 0:
        return False
    along = [r.tolist() for r in rest if r is not None]
    if along[0] not in ([axis], [axis - rank]) or along[1:] not in ([], [[1]]):
        return False
    last = end.item()
    return bool(last == -1 or (length is not None and last == length))


def _replace(graph: gs.Graph, node: gs.Node, found: _Shift) -> None:
    name, given = found.result.name, found.given
    dtype, shape = given.dtype, list(given.shape)
    node.outputs.clear()
    taps = np.tile(np.asarray([1, 0], dtype), (shape[3 - found.axis], 1, 1))
    weight = gs.Constant(f"{name}/taps", taps)
    inside, shifted = given, found.result
    if found.axis == 1:
        across = {"perm": [0, 2, 1]}
        first = [shape[0], shape[2], shape[1]]
        inside, shifted = (gs.Variable(f"{name}/{n}", dtype, first) for n in ("before", "after"))
        graph.nodes += [
            gs.Node("Transpose", inside.name, dict(across), [given], [inside]),
            gs.Node("Transpose", shifted.name, dict(across), [shifted], [found.result]),
        ]
    attributes = {"activation": "none"}
    graph.nodes.append(
        gs.Node(OP.name, name, attributes, [inside, weight], [shifted], domain=DOMAIN)
    )


PASS = Pass(
    name="stateful_token_shift",
    stage="stream",
    requires="linear attention is fused: its nodes tell which axis holds the tokens",
    ensures="every shift of (B, T, C) by one token is a CausalConvWithState",
    run=run,
)
