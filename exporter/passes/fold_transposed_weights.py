"""Transpose(initializer) -> the transposed initializer.

torch multiplies by the transpose of a weight. Runtimes that fold it themselves may do so after
having fused it into the product, which then packs the weight again at every call. A weight that
others read as it is, such as a tied embedding, is left alone: folding would store it twice.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

STAGE = "canonicalise"


def run(graph: gs.Graph) -> None:
    """Apply to every match."""
    for node in graph.nodes:
        if node.op != "Transpose" or not isinstance(node.inputs[0], gs.Constant):
            continue
        weight, output = node.inputs[0], node.outputs[0]
        if len(weight.outputs) > 1 or output in graph.outputs:
            continue
        folded = gs.Constant(
            f"{weight.name}.T",
            np.ascontiguousarray(weight.values.transpose(node.attrs.get("perm"))),
        )
        for reader in list(output.outputs):
            reader.inputs = [folded if x is output else x for x in reader.inputs]
        node.outputs.clear()
