"""Names of the values of a graph: each has one of its own.

torch's exporter names initializers after parameters and buffers, other values after the program's
nodes, and numbers its own, each without regard to the others: a buffer ``linear`` and a call of
``F.linear`` give two values of one name, and so would an output that is called ``output``.
The first one keeps the name: inputs, outputs, values of nodes (which are looked up by the
program's names), and initializers last. A value that is returned twice is copied for the second
output.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxscript import ir


def name_values(
    graph: ir.Graph, outputs: Sequence[str] | None = None, presents: Sequence[str] = ()
) -> None:
    """Name the outputs, and give values that share a name other ones.

    ``outputs`` are the names of the outputs, else ``output`` or ``output_0`` ...; torch names them
    by operator. ``presents`` are those of states, which come last. An output that is an input keeps
    its name.
    """
    _copy_repeated_outputs(graph)
    count = len(graph.outputs) - len(presents)
    numbered = [f"output_{i}" if count > 1 else "output" for i in range(count)]
    names = {value: value.name or "" for value in graph.inputs}
    for value, name in zip(graph.outputs, [*(outputs or numbered), *presents], strict=True):
        if not value.is_graph_input():
            names[value] = name
    inner = [value for node in graph.all_nodes() for value in node.outputs]
    for value in [*inner, *graph.initializers.values()]:
        names.setdefault(value, value.name or "")
    _make_unique(names)
    # Initializers, which are last, make room for an output that is one of them.
    for value, name in reversed(names.items()):
        value.name = name


def _copy_repeated_outputs(graph: ir.Graph) -> None:
    for index, value in enumerate(graph.outputs):
        if value in graph.outputs[:index]:
            copy = ir.node("Identity", [value], name=f"node_{value.name}_copy")
            graph.append(copy)
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.outputs[index] = copy.outputs[0]


def _make_unique(names: dict[ir.Value, str]) -> None:
    """Number all but the first value of each name, in place."""
    taken, seen = set(names.values()), set[str]()
    for value, name in names.items():
        count = 0
        while names[value] in seen or (count and names[value] in taken):
            count += 1
            names[value] = f"{name}_{count}"
        seen.add(names[value])
