"""Any spelling of linear attention -> FeatureMap and LinearAttention nodes.

    sum_s [s <= t] phi(q_t) . phi(k_s) v_s / (sum_s [s <= t] phi(q_t) . phi(k_s) + eps)

however it is multiplied out, masked, summed, transposed and reshaped; see
``linexport.recognise``. Each rewrite is proven by running both sides; what fails stays as it was.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.passes import simplify
from linexport.recognise.find import Search
from linexport.recognise.findings import Findings

STAGE = "fuse"


def run(graph: gs.Graph) -> Findings:
    """Apply to every match that can be proven."""
    findings = Search(graph).run()
    if findings.matches:
        graph.cleanup().toposort()
        # Several matches may have written the same node, such as the shape of an input.
        simplify.run(graph)
    return findings
