"""Convolutions on tokens before channels, as models have them between two transposes.

    Transpose(CausalConvWithState(Transpose(x))) * mask
        ->  linexport.cpu.CausalConvTokens<first_channel>(y, ..., mask)

where x may be cut out of y, and a factor of each token follow. For one token both layouts are the
same; for many the transposes take as long as the convolution, and so does what is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import helper

from linexport.plugins.ops import causal_conv
from linexport.plugins.ops.op import DOMAIN, attribute_value, name_overload
from linexport.targets.cpu_fusion.groups import Group
from linexport.targets.cpu_fusion.nodes import parts_of
from linexport.targets.cpu_fusion.values import TokenValues

OP = "CausalConvTokens"

FACTOR = 4
"""Place of the factor among its inputs."""

PERM = [0, 2, 1]
"""Between (B, T, C) and (B, C, T)."""


def find_convolutions(model: onnx.ModelProto, readers: Mapping[str, Sequence[int]]) -> list[Group]:
    """Return the positions of transpose, convolution and transpose, where nothing else reads them.

    Args:
        model: the nodes of its graph that have a function are looked at.
        readers: positions of the nodes that read a value, -1 for an output of the graph.
    """
    graph = model.graph
    producer = {name: index for index, node in enumerate(graph.node) for name in node.output}
    found = []
    for index, node in enumerate(graph.node):
        if node.domain != DOMAIN or node.op_type != causal_conv.OP.name:
            continue
        before, after = producer.get(node.input[0], -1), _reader(readers, node.output[0])
        alone = _reader(readers, node.input[0]) == index
        alone &= any(is_function_of(f, node) for f in model.functions)
        if (
            alone
            and min(before, after) >= 0
            and all(map(turns, (graph.node[before], graph.node[after])))
        ):
            found.append([before, index, after])
    return found


def _reader(readers: Mapping[str, Sequence[int]], name: str) -> int:
    """Return the one node that reads a value, -1 where there is another or none."""
    own = readers.get(name, ())
    return own[0] if len(own) == 1 else -1


def turns(node: onnx.NodeProto) -> bool:
    """Return whether a node swaps tokens and channels."""
    return node.op_type == "Transpose" and [attribute_value(a) for a in node.attribute] == [PERM]


def take_factors(
    graph: onnx.GraphProto,
    convolutions: Sequence[Group],
    groups: Sequence[Group],
    values: TokenValues,
    readers: Mapping[str, Sequence[int]],
) -> tuple[list[Group], list[Group]]:
    """Return convolutions with products that would be programs of one node, and the other groups.

    Args:
        graph: what positions are of.
        convolutions: see ``find_convolutions``.
        groups: of programs; that a node is alone in one says what shapes it reads.
        values: of the graph.
        readers: see ``find_convolutions``.
    """
    found = [[*places] for places in convolutions]
    for places in found:
        [name] = graph.node[places[-1]].output
        product = _reader(readers, name)
        if [product] not in groups or graph.node[product].op_type != "Mul":
            continue
        others = [values.tokens.get(other) for other in graph.node[product].input if other != name]
        if [other.shape for other in others if other] == [(1,)]:
            places.append(product)
    taken = {places[-1] for places in found}
    return found, [group for group in groups if len(group) > 1 or group[0] not in taken]


def fused_convolution(
    nodes: Sequence[onnx.NodeProto],
    domain: str,
    functions: Sequence[onnx.FunctionProto],
    values: TokenValues,
) -> tuple[onnx.NodeProto, onnx.FunctionProto]:
    """Return the node in the place of transpose, convolution and transpose, and its function.

    Args:
        nodes: the three, behind those that cut what they read out of another value, and in front of
            the product with a factor of each token.
        domain: of the new node.
        functions: of the model; that of the convolution becomes a part of the new one.
        values: of the graph.
    """
    at = next(index for index, node in enumerate(nodes) if node.domain)
    cuts, products = nodes[: at - 1], nodes[at + 2 :]
    first, convolution, last = nodes[at - 1 : at + 2]
    own = next(f for f in functions if is_function_of(f, convolution))
    attributes = {a.name: attribute_value(a) for a in convolution.attribute}
    source, body, start = first.input[0], [], 0
    for cut in reversed(cuts):
        start += parts_of(cut, values)[[*cut.output].index(source)][1]
        source = cut.input[0]
    if cuts:
        attributes["first_channel"] = start
        [channels] = values.tokens[first.input[0]].shape
        bounds = {"start": start, "end": start + channels, "axis": -1}
        body = [helper.make_node("Constant", [], [n], value_ints=[i]) for n, i in bounds.items()]
        body.append(helper.make_node("Slice", ["x0", *bounds], ["part"]))
    inputs = [source, *convolution.input[1:]]
    outputs = [nodes[-1].output[0], *filter(None, convolution.output[1:])]
    for product in products:
        factors = [name for name in product.input if name != last.output[0]]
        inputs = [*inputs, *("",) * (FACTOR - len(inputs)), *factors]
    given = [name and f"x{i}" for i, name in enumerate(inputs)]
    body += [
        helper.make_node("Transpose", ["part" if cuts else "x0"], ["turned"], perm=PERM),
        *_renamed(own, ["turned", *given[1:]], ["convolved", "y1"]),
        helper.make_node("Transpose", ["convolved"], ["all" if products else "y0"], perm=PERM),
        *(helper.make_node("Mul", ["all", given[FACTOR]], ["y0"]) for _ in products),
    ]
    function = helper.make_function(
        domain,
        OP,
        [name or f"absent{i}" for i, name in enumerate(given)],
        [f"y{i}" for i in range(len(outputs))],
        body,
        own.opset_import,
        [*attributes],
    )
    name_overload(function)
    name = f"{convolution.name}/tokens"
    made = helper.make_node(
        OP, inputs, outputs, name, domain=domain, overload=function.overload, **attributes
    )
    return made, function


def is_function_of(function: onnx.FunctionProto, node: onnx.NodeProto) -> bool:
    """Return whether a node runs a function."""
    own = node.domain, node.op_type, node.overload
    return (function.domain, function.name, function.overload) == own


def _renamed(
    function: onnx.FunctionProto, inputs: Sequence[str], outputs: Sequence[str]
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a function with these names for its inputs and outputs."""
    names = dict(zip(function.input, inputs, strict=False))
    names |= dict(zip(function.output, outputs, strict=True))
    for node in function.node:
        made = onnx.NodeProto()
        made.CopyFrom(node)
        for side in (made.input, made.output):
            side[:] = [name and names.get(name, f"inner_{name}") for name in side]
        yield made
