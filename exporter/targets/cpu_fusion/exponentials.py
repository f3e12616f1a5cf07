"""Normalised causal attention with exponential features, projection and stabilising as one node.

    LinearAttention(StabilizedExp(FeatureMap(q), FeatureMap(k)), v)
        ->  linexport.cpu.ExponentialAttention(q, k, v)

Neither the exponents nor the features, each of more values than the queries and keys that they are
made of, are written to memory for all tokens, and decays by channel become one a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper, inliner

from linexport.plugins.ops import feature_map, linear_attention, stabilized_exp
from linexport.plugins.ops.op import DOMAIN, VERSION, name_overload
from linexport.plugins.ops.registry import all_ops
from linexport.targets.cpu_fusion.convolutions import is_function_of
from linexport.targets.cpu_fusion.nodes import attributes

OP = "ExponentialAttention"

KINDS = ("favor+", "favor+flat", "favor+hyperbolic", "favor+*gaussian")
"""Maps that the library projects itself."""

PARAMETERS = 3
"""Most inputs that those have besides x."""

Places = tuple[int, int, int, int]
"""Positions of the maps of queries and keys, of the exponentials and of the attention."""


def find_exponentials(model: onnx.ModelProto, readers: Mapping[str, Sequence[int]]) -> list[Places]:
    """Return the positions of the nodes of each such attention, whose inner values are not read.

    Args:
        model: the nodes of its graph that have a function are looked at.
        readers: positions of the nodes that read a value, -1 for an output of the graph.
    """
    nodes = model.graph.node
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    found = []
    for index, node in enumerate(nodes):
        if not _is_op(node, linear_attention.OP.name) or len(node.input) < 6:
            continue
        features = producer.get(node.input[0], -1)
        if features < 0 or not _is_op(nodes[features], stabilized_exp.OP.name):
            continue
        maps = [producer.get(name, -1) for name in nodes[features].input[:2]]
        places = (maps[0], maps[1], features, index)
        if min(maps) >= 0 and _fits(model, places, readers):
            found.append(places)
    return found


def _is_op(node: onnx.NodeProto, name: str) -> bool:
    return (node.domain, node.op_type) == (DOMAIN, name)


def _fits(model: onnx.ModelProto, places: Places, readers: Mapping[str, Sequence[int]]) -> bool:
    query, key, features, attention = nodes = [model.graph.node[place] for place in places]
    functions = [f for node in nodes for f in model.functions if is_function_of(f, node)]
    opsets = {(o.domain, o.version) for f in functions for o in f.opset_import}
    if len(functions) < len(nodes) or len(dict(opsets)) < len(opsets):
        return False
    alone = {query.output[0]: 2, key.output[0]: 2} | dict.fromkeys(features.output[:3], 3)
    if any(readers.get(name, ()) != [places[reader]] for name, reader in alone.items()):
        return False
    return _are_maps(query, key, attributes(features)) and _is_attention(features, attention)


def _are_maps(query: onnx.NodeProto, key: onnx.NodeProto, heads: Mapping[str, object]) -> bool:
    """Return whether they are the logarithms of one map's sides, for so many heads."""
    if not all(_is_op(node, feature_map.OP.name) for node in (query, key)):
        return False
    kind = attributes(query).get("kind")
    sides = {"query": heads["q_num_heads"], "key": heads["k_num_heads"]}
    expected = [{"kind": kind, "log": 1, "side": s, "num_heads": n} for s, n in sides.items()]
    return (
        kind in KINDS
        and [attributes(node) for node in (query, key)] == expected
        and query.input[1:] == key.input[1:]
        and 2 <= len(query.input) <= 1 + PARAMETERS
    )


def _is_attention(features: onnx.NodeProto, attention: onnx.NodeProto) -> bool:
    """Return whether attention normalises what the exponentials make, with no decay of its own."""
    heads, read = dict(attributes(features)), _inputs(features)
    own, given = dict(attributes(attention)), _inputs(attention)
    for name in ("scale", "eps", "chunk_size"):
        own.pop(name, None)
    expected = {
        "q_num_heads": max(heads["q_num_heads"], heads["k_num_heads"]),
        "kv_num_heads": heads["k_num_heads"],
        "update_rule": "gated",
        "causal": 1,
        "normalize": 1,
        "feature_map": "",
    }
    return (
        {"causal": 1, "feature_map": ""} | own == expected
        and heads.get("causal", 1) == 1
        and read.keys() <= {"query", "key", "past_key_max", "key_mask"}
        and [given.pop(n, "") for n in ("query", "key", "decay")] == list(features.output[:3])
        and given.pop("key_mask", "") == read.get("key_mask", "")
        and given.keys() <= {"value", "past_state", "past_normalizer"}
    )


def _inputs(node: onnx.NodeProto) -> dict[str, str]:
    """Return the inputs that a node has, by their formal names."""
    formal = (formal.name for formal in all_ops()[node.op_type].schema.inputs)
    return {name: value for name, value in zip(formal, node.input, strict=False) if value}


def fused_exponentials(
    nodes: Sequence[onnx.NodeProto], domain: str, functions: Sequence[onnx.FunctionProto]
) -> tuple[onnx.NodeProto, onnx.FunctionProto]:
    """Return the node in the place of maps, exponentials and attention, and its function.

    Args:
        nodes: the four.
        domain: of the new node.
        functions: of the model; those of the four become parts of the new one, as ONNX Runtime does
            not find functions of functions.
    """
    query, key, features, attention = nodes
    given = _inputs(attention) | {n: v for n, v in _inputs(features).items() if "past" in n}
    own = attributes(attention)
    optional = ("past_state", "past_normalizer", "past_key_max", "key_mask")
    inputs = [query.input[0], key.input[0], given["value"], *(given.get(n, "") for n in optional)]
    inputs += query.input[1:]
    outputs = [*attention.output, "", ""][:3] + [*features.output[3:], ""][:1]
    names: dict[str, str] = {}
    formal = [_named(names, name, f"x{i}") for i, name in enumerate(inputs)]
    results = [_named(names, name, f"y{i}") for i, name in enumerate(outputs)]
    body, opsets = inlined(nodes, functions, names)
    settings = {
        "q_num_heads": attributes(features)["q_num_heads"],
        "kv_num_heads": own["kv_num_heads"],
        "scale": own.get("scale", 1.0),
        "eps": own.get("eps", 0.0),
        "feature_map": attributes(query)["kind"],
    }
    function = helper.make_function(domain, OP, formal, results, body, opsets, [*settings])
    name_overload(function)
    name = f"{attention.name}/exponential"
    made = helper.make_node(
        OP, inputs, outputs, name, domain=domain, overload=function.overload, **settings
    )
    return made, function


def _named(names: dict[str, str], name: str, formal: str) -> str:
    """Return what a function calls an input or output; nothing reads one without a name."""
    if not name or name in names:
        return f"unread_{formal}"
    names[name] = formal
    return formal


def inlined(
    nodes: Sequence[onnx.NodeProto],
    functions: Sequence[onnx.FunctionProto],
    names: dict[str, str],
) -> tuple[Sequence[onnx.NodeProto], Sequence[onnx.OperatorSetIdProto]]:
    """Return the nodes of these nodes' functions, and what operators they are of.

    Args:
        nodes: in their order.
        functions: theirs among others.
        names: of their inputs and outputs in the result; it gets those of inner values.
    """
    made = onnx.ModelProto(ir_version=10)
    own = [next(f for f in functions if is_function_of(f, node)) for node in nodes]
    opsets = {o.domain: o for f in own for o in f.opset_import}
    opsets |= {node.domain: helper.make_opsetid(node.domain, VERSION) for node in nodes}
    made.opset_import.extend(opsets.values())
    made.functions.extend({f.overload + f.name: f for f in own}.values())
    for node in nodes:
        made.graph.node.append(node)
        for side in (made.graph.node[-1].input, made.graph.node[-1].output):
            side[:] = [name and names.setdefault(name, f"v{len(names)}") for name in side]
    flat = inliner.inline_local_functions(made)
    domains = {node.domain for node in nodes}
    return flat.graph.node, [o for o in flat.opset_import if o.domain not in domains]
