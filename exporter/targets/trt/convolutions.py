"""Convolutions on tokens before channels, as their kernel takes them.

    CausalConvWithState(x)  ->  Transpose(CausalConvTokens(Transpose(x)))

Models have tokens before channels, so that the two Transposes cancel those that were around the
node, or move behind the neighbouring gates (LFM2). The states keep their layout, and their float32.
"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from linexport.graph.dims import Shape
from linexport.passes import fold_transposes, sink_transposes
from linexport.plugins.ops import causal_conv, causal_conv_tokens
from linexport.plugins.ops.op import DOMAIN

PERM = [0, 2, 1]
"""Between (B, C, T) and (B, T, C)."""


def tokens_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every CausalConvWithState is a CausalConvTokens of its name."""
    graph = gs.import_onnx(model)
    found = [n for n in graph.nodes if (n.domain, n.op) == (DOMAIN, causal_conv.OP.name)]
    for node in found:
        _turn(graph, node)
    if not found:
        return model
    graph.cleanup().toposort()
    sink_transposes.PASS.run(graph)
    fold_transposes.PASS.run(graph)
    graph.cleanup().toposort()
    return gs.export_onnx(graph, do_type_check=False)


def _turn(graph: gs.Graph, node: gs.Node) -> None:
    node.op = causal_conv_tokens.OP.name
    given, output = node.inputs[0], node.outputs[0]
    turned, computed = (
        gs.Variable(f"{node.name}/{part}", tensor.dtype, tensor.shape and _turned(tensor.shape))
        for part, tensor in (("turned", given), ("tokens", output))
    )
    node.inputs[0], node.outputs[0] = turned, computed
    for name, source, target in (("turn", given, turned), ("turn_back", computed, output)):
        graph.nodes.append(
            gs.Node("Transpose", f"{node.name}/{name}", {"perm": PERM}, [source], [target])
        )


def _turned(shape: Shape) -> Shape:
    return [shape[axis] for axis in PERM]
