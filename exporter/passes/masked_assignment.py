"""ScatterND(x, Transpose(NonZero(mask)), value) -> Where(mask, value, x).

``x[mask] = value`` of PyTorch is exported so. How many places there are is known at run time only,
while Where gives the same of known size.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import producer

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such assignment of one number."""
    return rewrite_matches(graph, _match, _replace, log)


def _match(graph: gs.Graph, node: gs.Node) -> tuple[gs.Tensor, gs.Tensor] | None:
    """Return the mask and the number."""
    if node.op != "ScatterND" or not node.inputs or node.attrs.get("reduction", "none") != "none":
        return None
    turned = producer(node.inputs[1], "Transpose")
    places = None if turned is None else producer(turned.inputs[0], "NonZero")
    if turned is None or places is None or list(turned.attrs.get("perm", [1, 0])) != [1, 0]:
        return None
    mask = places.inputs[0]
    spread = producer(mask, "Expand")
    mask = mask if spread is None else spread.inputs[0]
    rank = None if node.inputs[0].shape is None else len(node.inputs[0].shape)
    if mask.dtype != np.bool_ or mask.shape is None or len(mask.shape) != rank:
        raise NoMatchError("its mask has not the rank of what is assigned to")
    value = _number(node.inputs[2])
    if value is None or value.dtype != node.inputs[0].dtype:
        raise NoMatchError("not one number is assigned")
    return mask, value


def _number(tensor: gs.Tensor) -> gs.Tensor | None:
    """Return the number that a tensor is everywhere, of shape ()."""
    while (node := tensor.inputs[0] if tensor.inputs else None) is not None:
        if node.op not in ("Expand", "Reshape", "Identity", "Unsqueeze", "Squeeze"):
            return None
        tensor = node.inputs[0]
    if not isinstance(tensor, gs.Constant) or np.asarray(tensor.values).size != 1:
        return None
    return gs.Constant(f"{tensor.name}/number", np.asarray(tensor.values).reshape(()))


def _replace(graph: gs.Graph, node: gs.Node, found: tuple[gs.Tensor, gs.Tensor]) -> None:
    (mask, value), (output,) = found, node.outputs
    x = node.inputs[0]
    node.outputs.clear()
    graph.nodes.append(gs.Node("Where", node.name, {}, [mask, value, x], [output]))


PASS = Pass(
    name="masked_assignment",
    stage="canonicalise",
    requires="a mask has a known rank",
    ensures="no ScatterND writes one number where a mask is true",
    run=run,
)
