"""x_{t-1} of (B, T, C) or (B, C, T) as a CausalConvWithState with the taps 1, 0.

The op has a packed form and a kernel on every target, with what follows it; rows in front of a
value have neither.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.tensors import known_shape, static_size
from linexport.match.search.shifts import Moved
from linexport.plugins.ops.causal_conv import OP
from linexport.plugins.ops.op import DOMAIN


def is_token_shift(moved: Moved) -> bool:
    """Return whether the op gives a value."""
    plain = moved.is_delay and moved.front == 1 and moved.fill == 0 and moved.axis > 0
    if not plain or moved.source.dtype not in (np.float32, np.float16):
        return False
    shape = known_shape(moved.source)
    return len(shape) == 3 and isinstance(shape[3 - moved.axis], int)


def write_token_shift(graph: gs.Graph, moved: Moved) -> None:
    """Have a value be computed by the op."""
    given, result = moved.source, moved.result
    name, dtype, shape = result.name, given.dtype, list(known_shape(given))
    result.inputs[0].outputs = []
    taps = np.tile(np.asarray([1, 0], dtype), (static_size(given, 3 - moved.axis), 1, 1))
    weight = gs.Constant(f"{name}/taps", taps)
    inside, shifted = given, result
    if moved.axis == 1:
        across = {"perm": [0, 2, 1]}
        first = [shape[0], shape[2], shape[1]]
        inside, shifted = (gs.Variable(f"{name}/{n}", dtype, first) for n in ("before", "after"))
        graph.nodes += [
            gs.Node("Transpose", inside.name, dict(across), [given], [inside]),
            gs.Node("Transpose", shifted.name, dict(across), [shifted], [result]),
        ]
    attributes = {"activation": "none"}
    graph.nodes.append(
        gs.Node(OP.name, name, attributes, [inside, weight], [shifted], domain=DOMAIN)
    )
