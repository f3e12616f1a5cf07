"""A causal depthwise convolution -> CausalConvWithState, whose state carries it over a split.

    Conv(Pad(x, k-1 zeros on the left), W, b)           y_t = b + sum_j W_j x_{t-(k-1)+j}
    Conv(x, W, b; pads = [k-1, 0])                      the same
    Conv(x, W, b; pads = [k-1, k-1])[..., :T]           the same

along the axis that holds the tokens, stride and dilation 1, one kernel a channel.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.plugins.ops.op import DOMAIN
from linexport.recognise.sizes import Size, parse
from linexport.recognise.values import Values

STAGE = "stream"


def run(graph: gs.Graph) -> None:
    """Apply to every match, where other nodes make the model causal."""
    length = sequence_axis.symbol(graph)
    if length is None:
        return
    known = Values(lambda t: None if t.shape is None else [parse(d) for d in t.shape])
    for node in graph.nodes:
        known.visit(node)
    for node in [n for n in graph.nodes if n.op == "Conv" and _is_depthwise(n)]:
        found = _causal(graph, node, known, length)
        if found is None:
            continue
        given, output = found
        stored = [_stored(t, known) for t in node.inputs[1:]]
        output.inputs[0].outputs.clear()
        graph.nodes.append(
            gs.Node(
                "CausalConvWithState",
                node.name,
                {"activation": "none"},
                [given, *stored],
                [output],
                domain=DOMAIN,
            )
        )


def _stored(tensor: gs.Tensor, known: Values) -> gs.Tensor:
    """A constant as an initializer, whose shape the graph states; other tensors as they are."""
    value = known.numbers(tensor)
    if value is None or isinstance(tensor, gs.Constant):
        return tensor
    return gs.Constant(f"{tensor.name}/stored", value)


def _is_depthwise(node: gs.Node) -> bool:
    """A convolution of one axis with one kernel a channel, of stride and dilation 1."""
    weight = node.inputs[1]
    if not isinstance(weight, gs.Constant) or len(weight.shape) != 3 or weight.shape[1] != 1:
        return False
    plain = all(
        list(node.attrs.get(name, [1])) == [1] for name in ("strides", "dilations")
    ) and node.attrs.get("auto_pad", "NOTSET") in ("NOTSET", b"NOTSET")
    return plain and node.attrs.get("group", 1) == weight.shape[0] and weight.shape[2] > 1


def _causal(
    graph: gs.Graph, node: gs.Node, known: Values, length: str
) -> tuple[gs.Tensor, gs.Tensor] | None:
    """Input and output of the causal convolution that the node is the middle of."""
    given, output = node.inputs[0], node.outputs[0]
    before = node.inputs[1].shape[2] - 1
    pads = list(node.attrs.get("pads", [0, 0]))
    if pads == [0, 0]:
        given = _unpadded(given, known, before)
    elif pads == [before, before]:
        output = _cut(graph, output, known, length)
    elif pads != [before, 0]:
        return None
    if given is None or output is None or not given.shape or given.shape[2] != length:
        return None
    return given, output


def _unpadded(padded: gs.Tensor, known: Values, before: int) -> gs.Tensor | None:
    """What was padded with that many zeros on the left of its last axis."""
    maker = padded.inputs[0] if padded.inputs else None
    if maker is None or maker.op != "Pad" or maker.attrs.get("mode", "constant") != "constant":
        return None
    pads, given = known.numbers(maker.inputs[1]), [t for t in maker.inputs[2:] if not t.is_empty()]
    fill = known.numbers(given[0]) if given else np.zeros(1)
    whole = pads is not None and pads.tolist() == [0, 0, before, 0, 0, 0]
    if not whole or fill is None or fill.any() or len(given) > 1:
        return None
    return maker.inputs[0]


def _cut(graph: gs.Graph, long: gs.Tensor, known: Values, length: str) -> gs.Tensor | None:
    """The first T positions of it, if nothing else of it is used."""
    if len(long.outputs) != 1 or long in graph.outputs or long.outputs[0].op != "Slice":
        return None
    cut = long.outputs[0]
    end = known.get(cut.inputs[2])
    others = [known.numbers(cut.inputs[i]) for i in (1, *range(3, len(cut.inputs)))]
    start, *rest = [None if value is None else value.tolist() for value in others]
    lengthwise = start == [0] and rest in ([[2]], [[-1]], [[2], [1]], [[-1], [1]])
    if not lengthwise or end is None or end.size != 1 or end.item() != Size(1, (length,)):
        return None
    return cut.outputs[0]
