"""A causal convolution of one kernel a channel -> CausalConvWithState.

    Conv(Pad(x, n zeros on the left), W, b)          y_t = b + sum_j W_j x_{t-n+j}, n = k - 1
    Conv(Concat(n zeros, x), W, b)                   the same
    Conv(x, W, b; pads = [n, 0])                     the same
    Conv(x, W, b; pads = [n, n])[..., :T]            the same; or [..., :-n]

along the axis that holds the tokens, stride 1, without gaps. Any other convolution keeps its last
inputs, see ``delay_lines``.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import is_output, producer
from linexport.graph.monomials import parse
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import static_size
from linexport.plugins.ops.causal_conv import OP
from linexport.plugins.ops.op import DOMAIN

log = logging.getLogger(__name__)

Ends = tuple[gs.Tensor, gs.Variable]
"""Input and output of a causal convolution, its padding and cut included."""


def run(graph: gs.Graph) -> PassResult:
    """Replace every such convolution, where other nodes make the model causal."""
    length = sequence_axis.symbol(graph)
    if length is None:
        log.debug("no convolution gets a state: no causal node tells the axis of the tokens")
        return PassResult(False)
    known = Values.of_graph(graph)

    def match(graph: gs.Graph, node: gs.Node) -> Ends | None:
        return causal_ends(graph, node, known, length)

    def replace(graph: gs.Graph, node: gs.Node, ends: Ends) -> None:
        given, output = ends
        output.inputs[0].outputs.clear()
        inputs = [given, *(_stored(t, known) for t in node.inputs[1:])]
        attributes = {"activation": "none"}
        graph.nodes.append(gs.Node(OP.name, node.name, attributes, inputs, [output], domain=DOMAIN))

    return rewrite_matches(graph, match, replace, log)


def _stored(tensor: gs.Tensor, known: Values) -> gs.Tensor:
    """Return a constant as an initializer, which has a shape; other tensors as they are."""
    value = known.numbers(tensor)
    if value is None or isinstance(tensor, gs.Constant):
        return tensor
    return gs.Constant(f"{tensor.name}/stored", value)


def becomes_op(graph: gs.Graph, node: gs.Node, known: Values, length: str) -> bool:
    """Return whether this pass replaces a node."""
    try:
        return causal_ends(graph, node, known, length) is not None
    except NoMatchError:
        return False


def _is_plain(node: gs.Node) -> bool:
    """Return whether a node is a convolution of one axis, stride 1 and no gaps, channel by channel.

    It has two taps or more.
    """
    weight = node.inputs[1] if node.op == "Conv" and node.inputs else None
    if not isinstance(weight, gs.Constant) or len(weight.shape) != 3 or weight.shape[2] < 2:
        return False
    own = weight.shape[:2] == (node.attrs.get("group", 1), 1)
    strides, gaps = (list(node.attrs.get(name) or [1]) for name in ("strides", "dilations"))
    return own and strides == gaps == [1] and node.attrs.get("auto_pad") in (None, "NOTSET")


def _before(node: gs.Node) -> int:
    """Return how many tokens before its own a causal convolution sees."""
    return static_size(node.inputs[1], 2) - 1


def causal_ends(graph: gs.Graph, node: gs.Node, known: Values, length: str) -> Ends | None:
    """Return the ends of the causal convolution that a Conv is the middle of.

    Returns:
        None where it is another convolution than the op does.

    Raises:
        NoMatchError: it is not causal.
    """
    if not _is_plain(node):
        return None
    given, output = node.inputs[0], node.outputs[0]
    before = _before(node)
    pads = list(node.attrs.get("pads", [0, 0]))
    if pads == [0, 0]:
        given = _unpadded(given, known, before)
    elif pads == [before, before]:
        output = _cut(graph, output, known, length, before)
    elif pads != [before, 0]:
        raise NoMatchError(f"its padding is {pads}; a causal one is {[before, 0]}")
    if not given.shape or given.shape[2] != length:
        raise NoMatchError("it is not along the axis of the tokens")
    return given, output


def _unpadded(padded: gs.Tensor, known: Values, before: int) -> gs.Tensor:
    """Return the value that was padded with that many zeros on the left of its last axis."""
    joined = producer(padded, "Concat")
    if joined is not None and joined.attrs["axis"] in (2, -1) and len(joined.inputs) == 2:
        zeros, given = joined.inputs
        if list(zeros.shape or ())[2:] == [before] and known.is_zero(zeros):
            return given
    pad = producer(padded, "Pad")
    if pad is None or pad.attrs.get("mode", "constant") != "constant":
        raise NoMatchError("it has no padding, nor has its input")
    pads, rest = known.numbers(pad.inputs[1]), [t for t in pad.inputs[2:] if not t.is_empty()]
    fill = known.numbers(rest[0]) if rest else np.zeros(1)
    if pads is None or pads.tolist() != [0, 0, before, 0, 0, 0] or len(rest) > 1:
        raise NoMatchError(f"its input is not padded by {before} on the left alone")
    if fill is None or fill.any():
        raise NoMatchError("its input is padded with something else than zeros")
    return pad.inputs[0]


def _cut(graph: gs.Graph, long: gs.Tensor, known: Values, length: str, before: int) -> gs.Variable:
    """Return the first T of T + n positions of a value of which nothing else is used."""
    if len(long.outputs) != 1 or is_output(graph, long) or long.outputs[0].op != "Slice":
        raise NoMatchError("it is padded on both sides, and its output is not cut at once")
    cut = long.outputs[0]
    end = known.get(cut.inputs[2])
    others = [known.numbers(cut.inputs[i]) for i in (1, *range(3, len(cut.inputs)))]
    start, *rest = [None if value is None else value.tolist() for value in others]
    lengthwise = start == [0] and rest in ([[2]], [[-1]], [[2], [1]], [[-1], [1]])
    ends = (parse(length), -before)
    if not lengthwise or end is None or end.size != 1 or end.item() not in ends:
        raise NoMatchError("it is padded on both sides, and its output is not cut to the tokens")
    return cut.outputs[0]


PASS = Pass(
    name="stateful_causal_conv",
    stage="stream",
    requires="linear attention is fused: its nodes tell which axis holds the tokens",
    ensures="every causal convolution along the tokens of one kernel a channel is a "
    "CausalConvWithState",
    run=run,
)
