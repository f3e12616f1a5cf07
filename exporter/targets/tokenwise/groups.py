"""Which nodes of a graph become one program.

A node's level is how many operators that no program has lie on the longest way to it. Connected
nodes of one level are a group: no way leads out of it and back in. Then a node that only one other
group reads joins that group.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from linexport.graph.walk import reads
from linexport.targets.tokenwise.nodes import VIEWS, data_inputs, results
from linexport.targets.tokenwise.values import TokenValues

MOVES = (*VIEWS, "Split", "Slice")
"""Operators that compute nothing."""

LEAST = 2
"""Nodes that are worth a program."""

Group = list[int]
"""Positions of nodes in a graph, in order."""


def find_groups(graph: onnx.GraphProto, values: TokenValues) -> list[Group]:
    """Return the groups of a graph; ``values`` gets what their nodes make."""
    level: dict[str, int] = {}
    group_of: dict[int, int] = {}
    producer: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        made = results(node, values)
        given = data_inputs(node) if made else reads(node)
        own = max((level.get(name, 0) for name in given), default=0)
        level |= dict.fromkeys(node.output, own if made else own + 1)
        if not made:
            continue
        values.tokens.update(zip(node.output, made, strict=True))
        producer |= dict.fromkeys(node.output, index)
        group_of[index] = index
        for name in given:
            if name in producer and level[name] == own:
                _join(group_of, producer[name], index)
    readers = readers_of(graph)
    joined = {index: _root(group_of, index) for index in group_of}
    for index in reversed(joined):
        read_by = {
            joined.get(r) for name in graph.node[index].output for r in readers.get(name, ())
        }
        if len(read_by) == 1 and None not in read_by:
            joined[index] = next(iter(read_by))  # type: ignore[assignment]
    found: dict[int, Group] = {}
    for index, root in joined.items():
        found.setdefault(root, []).append(index)
    trimmed = (_trimmed(graph, group, readers) for group in found.values())
    return [
        group
        for group in trimmed
        if _is_worth(graph, group) and not _tears(graph, group, values, readers)
    ]


def outputs_of(graph: onnx.GraphProto, group: Group, readers: dict[str, list[int]]) -> list[str]:
    """Return the values of a group that something outside of it reads."""
    inside = set(group)
    return [
        name
        for index in group
        for name in graph.node[index].output
        if any(reader not in inside for reader in readers.get(name, ()))
    ]


def readers_of(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Return the nodes that read a value; -1 stands for the graph's outputs."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        for name in reads(node):
            found.setdefault(name, []).append(index)
    for output in graph.output:
        found.setdefault(output.name, []).append(-1)
    return found


def _root(parents: dict[int, int], index: int) -> int:
    while parents[index] != index:
        index = parents[index]
    return index


def _join(parents: dict[int, int], a: int, b: int) -> None:
    parents[_root(parents, b)] = _root(parents, a)


def _trimmed(graph: onnx.GraphProto, group: Group, readers: dict[str, list[int]]) -> Group:
    """Return the group without views of what it is given that only others read."""
    inside = set(group)
    while True:
        made = {name for index in inside for name in graph.node[index].output}
        idle = {
            index
            for index in inside
            if graph.node[index].op_type in MOVES
            and graph.node[index].input[0] not in made
            and not any(
                r in inside for name in graph.node[index].output for r in readers.get(name, ())
            )
        }
        if not idle:
            return sorted(inside)
        inside -= idle


def _is_worth(graph: onnx.GraphProto, group: Sequence[int]) -> bool:
    computing = [index for index in group if graph.node[index].op_type not in MOVES]
    return len(group) >= LEAST and bool(computing)


def _tears(
    graph: onnx.GraphProto, group: Group, values: TokenValues, readers: dict[str, list[int]]
) -> bool:
    """Return whether a value would leave the group or enter it that only a program can have."""
    given = {n for i in group for n in graph.node[i].input} - {
        n for i in group for n in graph.node[i].output
    }
    ends = [*outputs_of(graph, group, readers), *given]
    inner = (values.tokens[name] for name in ends if name in values.tokens)
    return any(value.is_condition or value.is_flat for value in inner)
