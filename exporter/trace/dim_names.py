"""Names for the dynamic sizes of a program: the user's own, else batch, seq, seq_2 ... by axis."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
import torch

from linexport.graph.dims import DimRange, batch_dims

SYMBOL = re.compile(r"\b[su]\d+\b")


def name_symbols(
    program: torch.export.ExportedProgram, spec: Any
) -> tuple[dict[str, str], dict[str, DimRange], dict[str, int]]:
    """Name the program's input symbols; returns the names, the ranges and the example's sizes."""
    own = _own_names(spec)
    names: dict[str, str] = {}
    sizes: dict[str, int] = {}
    dims: dict[str, DimRange] = {}
    axes: dict[str, set[int]] = {}
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaf = -1
    for entry in program.graph_signature.input_specs:
        if entry.kind.name != "USER_INPUT":
            continue
        leaf += 1
        value = placeholders[entry.arg.name].meta.get("val")
        for axis, size in enumerate(getattr(value, "shape", ())):
            symbol = str(size)
            axes.setdefault(symbol, set()).add(axis)
            if isinstance(size, int) or symbol in names or not SYMBOL.fullmatch(symbol):
                continue
            given = own.get((leaf, axis))
            stem = given or {0: "batch", 1: "seq"}.get(axis, f"dim_{axis}")
            name, count = stem, 1
            # One Dim may be several symbols, which torch has found to be equal.
            while given is None and name in names.values():
                count += 1
                name = f"{stem}_{count}"
            names[symbol] = name
            sizes[name] = int(size.node.hint)
            limits = program.range_constraints.get(size.node.expr)
            # torch assumes sizes of at least 2 while it traces; that is not a limit of the model.
            low, high = (limits.lower, limits.upper) if limits else (1, None)
            finite = isinstance(high, int) or getattr(high, "is_Integer", False)
            bound = int(str(high)) if finite else None
            dims[name] = DimRange(1 if low <= 2 else int(low), None, bound)
    batch = batch_dims({name: axes[symbol] for symbol, name in names.items()})
    return names, {n: replace(d, batch=n in batch) for n, d in dims.items()}, sizes


def _own_names(spec: Any) -> dict[tuple[int, int], str]:
    """Return the names of ``torch.export.Dim`` objects in dynamic_shapes, by input and axis."""
    leaves: list[Any] = []

    def walk(node: Any) -> None:
        per_axis = isinstance(node, dict) and all(isinstance(k, int) for k in node)
        if node is None or per_axis:
            leaves.append(node or {})
        elif isinstance(node, dict):
            for value in node.values():
                walk(value)
        elif isinstance(node, list | tuple):
            if any(not isinstance(x, dict | list | tuple | None.__class__) for x in node):
                leaves.append(dict(enumerate(node)))
            else:
                for value in node:
                    walk(value)

    walk(spec)
    return {
        (leaf, axis): dim.__name__
        for leaf, axes in enumerate(leaves)
        for axis, dim in axes.items()
        if isinstance(dim, torch.export.Dim) and not dim.__name__.startswith("_")
    }


def rename_symbols(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename size symbols; a compound expression such as 2*s3 keeps its form."""
    graph = model.graph
    for info in [*graph.input, *graph.output, *graph.value_info]:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = SYMBOL.sub(lambda m: names.get(m[0], m[0]), dim.dim_param)
