"""Rewrites of the traced graph, on onnx-graphsurgeon: one rewrite a file, found by scanning here.

A pass is a module with ``STAGE``, one of ``STAGES``, and ``run(graph)``, which changes a graph in
place. Stages run in order; within a stage the order of passes does not matter.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import onnx
import onnx_graphsurgeon as gs

STAGES = ("canonicalise", "state", "absorb")


def stages(with_state: bool = True) -> tuple[str, ...]:
    """All stages, or all but the one that gives causal nodes a past."""
    return tuple(stage for stage in STAGES if with_state or stage != "state")


def run(model: onnx.ModelProto, chosen: tuple[str, ...] = STAGES) -> onnx.ModelProto:
    """The model after all passes of the given stages."""
    graph = gs.import_onnx(model)
    for stage in chosen:
        for found in passes():
            if stage == found.STAGE:
                found.run(graph)
    graph.cleanup().toposort()
    return gs.export_onnx(graph, do_type_check=False)


def passes() -> Iterator[ModuleType]:
    """Every pass module, by name."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        yield importlib.import_module(f"{__name__}.{module.name}")
