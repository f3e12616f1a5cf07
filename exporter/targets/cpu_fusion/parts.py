"""Parts of a value that nodes of the library read where they lie.

    x, z = Split(y), with z in a program and x in a convolution
        ->  program(y) at an offset, CausalConvTokens<first_channel>(y)

What reads a part has the Split or Slice among its own nodes, which copies nothing there. One that
nothing else reads is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from linexport.targets.cpu_fusion.groups import Group, outputs_of, readers_of
from linexport.targets.cpu_fusion.nodes import CUTS, results
from linexport.targets.cpu_fusion.values import TokenValues


@dataclass(frozen=True)
class Members:
    """Nodes that become one.

    Attributes:
        own: positions of those that are nowhere else then, in order.
        whole: those that it computes, in order.
        outputs: values of its own nodes that something reads that lacks them.
    """

    own: Group
    whole: Group
    outputs: Sequence[str]


def take_parts(
    graph: onnx.GraphProto,
    groups: Sequence[Group],
    convolutions: Sequence[Group],
    values: TokenValues,
) -> tuple[list[Members], list[Members]]:
    """Return groups and convolutions with the nodes that cut what they read.

    Groups that consisted of such nodes only, for others that have them now, are not among them.

    Args:
        graph: what ``groups`` and ``convolutions`` are positions in.
        groups: of programs.
        convolutions: each between two Transposes.
        values: of the graph, those that nodes of the groups make among them.
    """
    readers = readers_of(graph)
    wholes = [set(group) for group in (*groups, *convolutions)]
    # A program has what any of its nodes reads cut; a convolution its input, along the channels.
    reading_cuts = [*wholes[: len(groups)], *({before} for before, *_ in convolutions)]
    cuts = [
        index
        for index, node in enumerate(graph.node)
        if node.op_type in CUTS and results(node, values) is not None
    ]
    for index in reversed(cuts):  # a part may be cut again
        node = graph.node[index]
        read = _readers_of_node(node, readers)
        has_channels = len(values.tokens[node.input[0]].shape) == 1
        for place, (whole, reading) in enumerate(zip(wholes, reading_cuts, strict=True)):
            if (has_channels or place < len(groups)) and not reading.isdisjoint(read):
                whole.add(index)
                reading.add(index)

    own = [[*group] for group in (*groups, *convolutions)]
    for group, whole in zip(own, wholes, strict=True):
        for index in reversed([index for index in group if index in cuts]):
            read = _readers_of_node(graph.node[index], readers)
            if whole.isdisjoint(read) and not outputs_of(graph, [index], readers, wholes):
                group.remove(index)
                whole.remove(index)
    made = [
        Members(group, sorted(whole), outputs_of(graph, group, readers, wholes))
        for group, whole in zip(own, wholes, strict=True)
    ]
    return [one for one in made[: len(groups)] if one.own], made[len(groups) :]


def _readers_of_node(node: onnx.NodeProto, readers: Mapping[str, Sequence[int]]) -> set[int]:
    return {reader for name in node.output for reader in readers.get(name, ())}
