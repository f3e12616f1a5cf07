"""LinearAttention(FeatureMap(q), FeatureMap(k), v) -> one LinearAttention that applies the map.

Both nodes must be the two sides of one map with the same parameters, read by nothing else, and the
attention causal. What is gained is locality: a lowering computes features for the tokens it is
about to use, and those of a wide map never exist for a whole sequence.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.plugins.ops import feature_map
from linexport.plugins.ops.linear_attention import INPUTS
from linexport.plugins.ops.op import DOMAIN

STAGE = "absorb"


def run(graph: gs.Graph) -> None:
    """Apply to every match."""
    for node in graph.nodes:
        if node.domain == DOMAIN and node.op == "LinearAttention" and node.attrs.get("causal", 1):
            query = _map(graph, node.inputs[0], "query")
            key = _map(graph, node.inputs[1], "key")
            if query is not None and key is not None and _same(query, key):
                _absorb(node, query, key)


def _map(graph: gs.Graph, value: gs.Tensor, side: str) -> gs.Node | None:
    """The feature map of that side which only this value carries on."""
    made_by = value.inputs[0] if value.inputs else None
    if made_by is None or (made_by.domain, made_by.op) != (DOMAIN, "FeatureMap"):
        return None
    attributes = made_by.attrs
    formulas = feature_map.formulas(attributes["kind"])
    if formulas.over_time or attributes.get("log", 0):
        return None
    if formulas.query is not formulas.key and attributes.get("side", "query") != side:
        return None
    alone = len(value.outputs) == 1 and value not in graph.outputs
    return made_by if alone else None


def _same(query: gs.Node, key: gs.Node) -> bool:
    parameters = [[x.name for x in node.inputs[1:]] for node in (query, key)]
    return query.attrs["kind"] == key.attrs["kind"] and parameters[0] == parameters[1]


def _absorb(node: gs.Node, query: gs.Node, key: gs.Node) -> None:
    node.attrs["feature_map"] = query.attrs["kind"]
    parameters = list(query.inputs[1:])
    while parameters and parameters[-1].is_empty():
        parameters.pop()
    if parameters:
        end = len(INPUTS) + len(parameters)
        node.inputs.extend([gs.Variable.empty() for _ in range(end - len(node.inputs))])
        for place, parameter in enumerate(parameters, len(INPUTS)):
            node.inputs[place] = parameter
    node.inputs[0], node.inputs[1] = query.inputs[0], key.inputs[0]
