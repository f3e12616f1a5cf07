"""Which nodes of a graph become one program.

A node's level is how many operators that no program has lie on the longest way to it. Connected
nodes of one level are a group: no way leads out of it and back in. Then a node that only one other
group reads joins that group. A single node is worth a program next to a node of the library, with
which it may become one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import onnx
from onnx import helper

from linexport.graph.walk import reads
from linexport.plugins.cpu import library
from linexport.plugins.ops import op
from linexport.targets.cpu_fusion.nodes import CUTS, VIEWS, data_inputs, results
from linexport.targets.cpu_fusion.program import UnfitError
from linexport.targets.cpu_fusion.values import TokenValues

MOVES = (*VIEWS, *CUTS)
"""Operators that compute nothing."""

LEAST = 2
"""Nodes that are worth a program, where no node of the library is next to them."""

VERSION = 1
"""Version of the domain of nodes that are made."""

Group = list[int]
"""Positions of nodes in a graph, in order."""


def find_groups(graph: onnx.GraphProto, values: TokenValues) -> list[Group]:
    """Return the groups of a graph; ``values`` gets what their nodes make."""

    def token_values(node: onnx.NodeProto) -> Sequence[str] | None:
        made = results(node, values)
        if not made:
            return None
        values.tokens.update(zip(node.output, made, strict=True))
        return data_inputs(node)

    groups = connected(graph, token_values)
    joined = dict(sorted((index, group[0]) for group in groups for index in group))
    readers = readers_of(graph)
    for index in reversed(joined):
        read_by = {
            joined.get(r) for name in graph.node[index].output for r in readers.get(name, ())
        }
        if len(read_by) == 1 and None not in read_by:
            joined[index] = next(iter(read_by))  # type: ignore[assignment]
    found: dict[int, Group] = {}
    for index, root in joined.items():
        found.setdefault(root, []).append(index)
    near = _beside_library(graph, readers)
    trimmed = (_trimmed(graph, group, readers, near) for group in found.values())
    return [
        group
        for group in trimmed
        if _is_worth(graph, group, near) and not _tears(graph, group, values, readers)
    ]


def connected(
    graph: onnx.GraphProto, given: Callable[[onnx.NodeProto], Sequence[str] | None]
) -> list[Group]:
    """Return groups of connected nodes, each of one level.

    Args:
        graph: its nodes are in order.
        given: returns the values by which a node is connected, None for one that is in no group;
            called once for each node, in order.
    """
    level: dict[str, int] = {}
    group_of: dict[int, int] = {}
    producer: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        read = given(node)
        own = max(
            (level.get(name, 0) for name in (reads(node) if read is None else read)), default=0
        )
        level |= dict.fromkeys(node.output, own + 1 if read is None else own)
        if read is None:
            continue
        producer |= dict.fromkeys(node.output, index)
        group_of[index] = index
        for name in read:
            if name in producer and level[name] == own:
                _join(group_of, producer[name], index)
    found: dict[int, Group] = {}
    for index in group_of:
        found.setdefault(_root(group_of, index), []).append(index)
    return [*found.values()]


def outputs_of(
    graph: onnx.GraphProto,
    group: Group,
    readers: Mapping[str, Sequence[int]],
    wholes: Sequence[Collection[int]] = (),
) -> list[str]:
    """Return the values of a group that something reads which does not make them itself.

    Args:
        graph: what positions are of.
        group: the nodes that make the values.
        readers: see ``readers_of``.
        wholes: nodes that are computed together; some may be in several. By default the group.
    """
    wholes = wholes or [set(group)]

    def is_read(index: int, name: str) -> bool:
        homes = ([one for one in wholes if reader in one] for reader in readers.get(name, ()))
        return any(not own or any(index not in one for one in own) for own in homes)

    return [
        name
        for index in group
        for name in graph.node[index].output
        if name and is_read(index, name)
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


def _beside_library(graph: onnx.GraphProto, readers: dict[str, list[int]]) -> set[int]:
    """Return the nodes that read from nodes of the library or are read by them, views aside.

    A convolution's Transposes count as the convolution.
    """
    own = {
        index
        for index, node in enumerate(graph.node)
        if node.domain == op.DOMAIN and node.op_type in library.OPS
    }
    around = _neighbours(graph, readers, own)
    own |= {index for index in around if graph.node[index].op_type == "Transpose"}
    return {
        index
        for index in _neighbours(graph, readers, own)
        if graph.node[index].op_type not in VIEWS
    }


def _neighbours(graph: onnx.GraphProto, readers: dict[str, list[int]], own: set[int]) -> set[int]:
    made = {name for index in own for name in graph.node[index].output if name}
    return {
        index
        for index, node in enumerate(graph.node)
        if not made.isdisjoint(node.input)
        or any(r in own for name in node.output for r in readers.get(name, ()))
    }


def _trimmed(
    graph: onnx.GraphProto, group: Group, readers: dict[str, list[int]], near: set[int]
) -> Group:
    """Return the group without views of what it is given that only others read."""
    inside = set(group)
    while True:
        made = {name for index in inside for name in graph.node[index].output}
        idle = {
            index
            for index in inside
            if graph.node[index].op_type in MOVES
            and index not in near
            and graph.node[index].input[0] not in made
            and not any(
                r in inside for name in graph.node[index].output for r in readers.get(name, ())
            )
        }
        if not idle:
            return sorted(inside)
        inside -= idle


def _is_worth(graph: onnx.GraphProto, group: Sequence[int], near: set[int]) -> bool:
    if not near.isdisjoint(group):
        return True
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


def ordered(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes with each behind those it reads from, otherwise in their order.

    Raises:
        UnfitError: they form a cycle, which the runtime refuses.
    """
    producer = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{producer[name] for name in reads(node) if name in producer} for node in nodes]
    done: set[int] = set()
    found: list[onnx.NodeProto] = []
    waiting, passed = deque(range(len(nodes))), 0
    while waiting:
        if passed == len(waiting):
            raise UnfitError("nodes form a cycle")
        index = waiting.popleft()
        if needs[index] <= done:
            done.add(index)
            found.append(nodes[index])
            passed = 0
        else:
            waiting.append(index)
            passed += 1
    return found


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove what nothing reads, such as sizes for Reshape, and what is known of inner values."""
    read = {output.name for output in graph.output}
    kept = []
    for node in reversed(graph.node):
        if not read.isdisjoint(node.output):
            kept.append(node)
            read |= set(reads(node))
    made = {name for node in kept for name in node.output}
    for field, own in (
        (graph.node, kept[::-1]),
        (graph.initializer, [t for t in graph.initializer if t.name in read]),
        (graph.value_info, [v for v in graph.value_info if v.name in made]),
    ):
        del field[:]
        field.extend(own)


def add_functions(
    model: onnx.ModelProto, functions: Iterable[onnx.FunctionProto], domain: str
) -> None:
    """Add functions of a domain, which they have overloads in, and the import of that domain."""
    model.functions.extend(functions)
    if all(imported.domain != domain for imported in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, VERSION))
    model.ir_version = max(model.ir_version, 10)  # the first with overloads
