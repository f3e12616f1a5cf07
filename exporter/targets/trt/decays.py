"""Decays in two factors multiplied out in the graph: plugins take one per key channel.

LinearAttention(..., decay (B, T, H), ..., decay_scale (H, d_k))
-> LinearAttention(..., Reshape(Unsqueeze(decay) * decay_scale) (B, T, H * d_k), ...)
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.linear_attention import INPUTS, SCALE
from linexport.plugins.ops.registry import linexport_nodes

DECAY = INPUTS.index("decay")


def multiply_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a float32 model in which no node has the input ``decay_scale``."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph, nodes = copy.graph, []
    found = {node.name: view for node, _, view in linexport_nodes(copy) if SCALE in view.shapes}
    for node in graph.node:
        if node.name in found:
            shapes = found[node.name].shapes
            heads, width = shapes[SCALE]
            assert isinstance(heads, int) and isinstance(width, int)
            axis, packed, column, wide, decay = (
                f"{node.name}/{part}" for part in ("axis", "packed", "column", "wide", "decay")
            )
            graph.initializer.append(numpy_helper.from_array(np.array([-1]), axis))
            graph.initializer.append(
                numpy_helper.from_array(np.array([0, 0, heads * width]), packed)
            )
            nodes += [
                helper.make_node("Unsqueeze", [node.input[DECAY], axis], [column]),
                helper.make_node("Mul", [column, node.input[-1]], [wide]),
                helper.make_node("Reshape", [wide, packed], [decay]),
            ]
            shape = [*shapes["decay"][:2], heads * width]
            graph.value_info.append(helper.make_tensor_value_info(decay, TensorProto.FLOAT, shape))
            node.input[DECAY] = decay
            while len(node.input) > len(INPUTS) or not node.input[-1]:
                node.input.pop()
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return copy
