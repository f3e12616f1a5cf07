"""Rewrites of the traced graph, on onnx-graphsurgeon: one rewrite a file, found by scanning here.

A pass is a module with ``STAGE``, one of ``STAGES``, and ``run(graph)``, which changes a graph in
place and may return ``Findings`` about what it saw. Stages run in order; within a stage the order
of passes does not matter.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import onnx
import onnx_graphsurgeon as gs

from linexport import aside
from linexport.recognise import Findings

STAGES = ("canonicalise", "fuse", "stream", "state", "absorb")
STATELESS = ("canonicalise", "fuse", "absorb")
"""Those that leave the inputs and outputs of the graph as they are."""


@dataclass(frozen=True)
class Rewritten:
    """A model after the passes, and what they found on the way.

    Attributes:
        weights: kept beside the model, see ``aside``.
    """

    model: onnx.ModelProto
    findings: Findings
    weights: aside.Weights


def rewrite(
    model: onnx.ModelProto,
    stages: tuple[str, ...] = STAGES,
    weights: aside.Weights | None = None,
) -> Rewritten:
    """Apply all passes of the given stages.

    Args:
        model: left as it is.
        stages: some of ``STAGES``, in order.
        weights: those that were taken from the model; large ones of the result are then kept beside
            it as well.
    """
    graph = gs.import_onnx(model)
    aside.fill(graph, weights or {})
    findings = Findings()
    for stage in stages:
        for found in passes():
            if stage == found.STAGE:
                findings += found.run(graph) or Findings()
        # Passes disconnect what they replace; the next stage is to see only what is left.
        graph.cleanup().toposort()
    kept = {} if weights is None else aside.empty(graph)
    return Rewritten(gs.export_onnx(graph, do_type_check=False), findings, kept)


def run(model: onnx.ModelProto, stages: tuple[str, ...] = STAGES) -> onnx.ModelProto:
    """The model after all passes of the given stages."""
    return rewrite(model, stages).model


def passes() -> Iterator[ModuleType]:
    """Every pass module, by name."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        yield importlib.import_module(f"{__name__}.{module.name}")
