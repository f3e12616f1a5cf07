"""The values that integer inputs of an ONNX graph may take where they index a table: token ids."""

from __future__ import annotations

import onnx

from linexport.graph.operators import CHOICES

_TABLES = {"Gather": "axis", "GatherBlockQuantized": "gather_axis"}
"""Operators that index their first input by their second, along the axis of this attribute."""


def index_range(model: onnx.ModelProto, name: str) -> tuple[int, int] | None:
    """Return the half-open range of indices into the smallest table that an input indexes.

    ``None`` where it indexes none. Gather takes negative indices, which count from the end: no
    model's token ids do.
    """
    tables = {t.name: tuple(t.dims) for t in model.graph.initializer}
    reached, rows = {name}, list[int]()
    for node in model.graph.node:
        taken = [source in reached for source in node.input]
        if node.op_type in CHOICES and taken[:1] == [True]:
            reached.update(node.output[:1])
        name_of_axis = _TABLES.get(node.op_type)
        if name_of_axis and taken[1:2] == [True] and node.input[0] in tables:
            sizes = tables[node.input[0]]
            axis = next((a.i for a in node.attribute if a.name == name_of_axis), 0)
            rows += sizes[axis:][:1] if axis >= 0 else sizes[:axis][-1:]
    return (0, max(1, min(rows))) if rows else None
