"""A decay in two factors: one per token and head, and one per head and key channel.

    log alpha_{t,h,c} = decay_{t,h} * decay_scale_{h,c}

Mamba decays so, by its step delta times A. Multiplied out there are d_k values per token and head;
a lowering that does not multiply token by token is written behind the product of all of them,
which is in float32.
"""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto, helper

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import Lowering, Node

SCALE = "decay_scale"
"""Name of the input, the last one."""

_PRODUCT = "decay_per_channel"


def multiplied_out(write: Lowering) -> Lowering:
    """A lowering of nodes with both factors, from one of nodes with a decay per channel."""

    def written(node: Node) -> tuple[Body, list[str]]:
        if SCALE not in node.shapes:
            return write(node)
        heads, width = node.shapes[SCALE]
        assert isinstance(heads, int) and isinstance(width, int)
        shapes = {name: shape for name, shape in node.shapes.items() if name != SCALE}
        shapes["decay"] = (*shapes["decay"][:2], heads * width)
        names = tuple(_PRODUCT if name == "decay" else name for name in node.inputs)
        body, values = write(replace(node, inputs=names, shapes=shapes))
        front = Body(body)
        decay = front.Unsqueeze(front.Cast("decay", to=TensorProto.FLOAT), front.const([-1]))
        shape = front.const([0, 0, heads * width])
        product = front.Mul(decay, SCALE)
        front.nodes.append(helper.make_node("Reshape", [product, shape], [_PRODUCT]))
        body.nodes[:0] = front.nodes
        return body, values

    return written
