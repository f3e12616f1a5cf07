"""The operators of linexport in a model."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from linexport.errors import OpError
from linexport.manifest.inspected import OpRecord
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.ops.op import DOMAIN, Node, Op
from linexport.plugins.ops.registry import linexport_nodes
from linexport.targets.lowering.packed_batches import rows_of

UNKNOWN = "of a package that is not installed: the function in the file runs"
MAPS = ("feature_map", "kind")
"""Attributes that name a feature map."""

FUSED_WITH_OPERANDS = "attention and what its operands are computed from"


def linexport_ops(model: onnx.ModelProto) -> tuple[OpRecord, ...]:
    """Return the nodes of linexport's domain, in order, also those whose op is not installed.

    Without PyTorch, which has the formulas of feature maps, a node that names one is described by
    its attributes.
    """
    own = [node for node in model.graph.node if node.domain == DOMAIN]
    named = any(a.name in MAPS and a.s for node in own for a in node.attribute)
    complete = not named or _maps_are_known()
    nodes = (*linexport_nodes(model, checked=complete), *rows_of(model))
    known = {node.name: (op, seen) for node, op, seen in nodes}
    return tuple(_record(node, known, complete) for node in own)


def _record(node: onnx.NodeProto, known: Mapping[str, tuple[Op, Node]], complete: bool) -> OpRecord:
    if node.name not in known:
        details = FUSED_WITH_OPERANDS if node.op_type == LAYER else UNKNOWN
        return OpRecord(node.name, node.op_type, {}, {}, details)
    op, seen = known[node.name]
    try:
        sizes, details = op.sizes(seen), op.describe(seen)
    except OpError:
        if complete:
            raise
        kind = next(seen.attributes[name] for name in MAPS if seen.attributes.get(name))
        sizes, details = {}, f"feature map {kind}; with PyTorch installed, its sizes are shown"
    return OpRecord(node.name, node.op_type, seen.attributes, sizes, details)


def _maps_are_known() -> bool:
    """Register the formulas of maps; return False without PyTorch, which artifacts do without."""
    try:
        from linexport.models import feature_maps as feature_maps
    except ModuleNotFoundError:
        return False
    return True
