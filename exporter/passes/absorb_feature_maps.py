"""LinearAttention(FeatureMap(q), FeatureMap(k), v) -> one LinearAttention that applies the map.

Both nodes must be the two sides of one map with the same parameters, read by nothing else, and the
attention causal, or the map's kernel a function of the score alone. What is gained is locality: a
lowering computes features for the tokens it is about to use, and those of a wide map never exist
for a whole sequence; and, with such a kernel, weights of nearby keys whose sums do not cancel.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import is_output, producer
from linexport.plugins.ops import feature_map, linear_attention
from linexport.plugins.ops.linear_attention import INPUTS
from linexport.plugins.ops.op import DOMAIN

log = logging.getLogger(__name__)

Maps = tuple[gs.Node, gs.Node]
"""FeatureMap nodes of the query and of the key."""


def run(graph: gs.Graph) -> PassResult:
    """Let every attention that can apply its feature map itself."""
    return rewrite_matches(graph, _match, _absorb, log)


def _match(graph: gs.Graph, node: gs.Node) -> Maps | None:
    if node.domain != DOMAIN or node.op != linear_attention.OP.name:
        return None
    if not any(_is_map(producer(value)) for value in node.inputs[:2]):
        return None
    query = _map(graph, node.inputs[0], "query")
    formulas = feature_map.formulas(query.attrs["kind"])
    if not node.attrs.get("causal", 1) and (formulas.kappa is None or formulas.elementwise):
        raise NoMatchError("it is bidirectional")
    key = _map(graph, node.inputs[1], "key")
    kinds = query.attrs["kind"], key.attrs["kind"]
    if kinds[0] != kinds[1]:
        raise NoMatchError(f"query and key have the maps {' and '.join(kinds)}")
    if [x.name for x in query.inputs[1:]] != [x.name for x in key.inputs[1:]]:
        raise NoMatchError("the maps of query and key have different parameters")
    return query, key


def _is_map(node: gs.Node | None) -> bool:
    return node is not None and (node.domain, node.op) == (DOMAIN, feature_map.OP.name)


def _map(graph: gs.Graph, value: gs.Tensor, side: str) -> gs.Node:
    """Return the feature map of that side that computes a value nothing else reads."""
    node = producer(value)
    if node is None or not _is_map(node):
        raise NoMatchError(f"its {side} is not computed by a FeatureMap")
    formulas = feature_map.formulas(node.attrs["kind"])
    if formulas.over_time:
        raise NoMatchError(f"the map {node.attrs['kind']} normalises keys over the sequence")
    if node.attrs.get("log", 0):
        raise NoMatchError(f"the map of its {side} gives logarithms")
    if formulas.query is not formulas.key and node.attrs.get("side", "query") != side:
        raise NoMatchError(f"its {side} has the other side of the map {node.attrs['kind']}")
    if len(value.outputs) > 1 or is_output(graph, value):
        raise NoMatchError(f"the features of its {side} are read elsewhere, too")
    return node


def _absorb(graph: gs.Graph, node: gs.Node, maps: Maps) -> None:
    query, key = maps
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


PASS = Pass(
    name="absorb_feature_maps",
    stage="absorb",
    requires="feature maps and attention are nodes of the linexport domain",
    ensures="no causal LinearAttention is the only consumer of the two sides of one map",
    run=run,
)
