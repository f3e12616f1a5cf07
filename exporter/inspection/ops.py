"""The operators of linexport in a model."""

from __future__ import annotations

import onnx

from linexport.manifest.inspected import OpRecord
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import linexport_nodes
from linexport.targets.lowering.packed_batches import rows_of

UNKNOWN = "of a package that is not installed: the function in the file runs"
MAPS = ("feature_map", "kind")
"""Attributes that name a feature map."""

FUSED_WITH_OPERANDS = "attention and what its operands are computed from"


def linexport_ops(model: onnx.ModelProto) -> tuple[OpRecord, ...]:
    """Return the nodes of linexport's domain, in order, also those whose op is not installed."""
    own = [node for node in model.graph.node if node.domain == DOMAIN]
    if any(a.name in MAPS and a.s for node in own for a in node.attribute):
        # It registers the formulas of maps, and takes PyTorch, which other artifacts do without.
        from linexport.models import feature_maps as feature_maps
    known = {node.name: (op, seen) for node, op, seen in (*linexport_nodes(model), *rows_of(model))}
    records = []
    for node in own:
        if node.name in known:
            op, seen = known[node.name]
            record = OpRecord(
                node.name, node.op_type, seen.attributes, op.sizes(seen), op.describe(seen)
            )
        else:
            details = FUSED_WITH_OPERANDS if node.op_type == LAYER else UNKNOWN
            record = OpRecord(node.name, node.op_type, {}, {}, details)
        records.append(record)
    return tuple(records)
