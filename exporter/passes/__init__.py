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

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues

from linexport.graph.external_data import LARGE, Weights, placeholder
from linexport.recognise import Findings

STAGES = ("canonicalise", "fuse", "stream", "state", "absorb", "tidy")
STATELESS = ("canonicalise", "fuse", "absorb", "tidy")
"""Those that leave the inputs and outputs of the graph as they are."""


@dataclass(frozen=True)
class Rewritten:
    """A model after the passes, its weights that are apart, and what was found on the way."""

    model: onnx.ModelProto
    findings: Findings
    weights: Weights


def rewrite(
    model: onnx.ModelProto, stages: tuple[str, ...] = STAGES, weights: Weights | None = None
) -> Rewritten:
    """Apply all passes of the given stages.

    ``weights`` are those that are not in the model; where it is given, the large ones of the
    result are not in the result either.
    """
    graph = gs.import_onnx(model)
    _fill(graph, weights or {})
    findings = Findings()
    for stage in stages:
        for found in passes():
            if stage == found.STAGE:
                findings += found.run(graph) or Findings()
        # Passes disconnect what they replace; the next stage is to see only what is left.
        graph.cleanup().toposort()
    apart = {} if weights is None else _empty(graph)
    return Rewritten(gs.export_onnx(graph, do_type_check=False), findings, apart)


def run(model: onnx.ModelProto, stages: tuple[str, ...] = STAGES) -> onnx.ModelProto:
    """The model after all passes of the given stages."""
    return rewrite(model, stages).model


def _fill(graph: gs.Graph, weights: Weights) -> None:
    """Give constants the values that were apart."""
    for tensor in graph.tensors().values() if weights else ():
        if tensor.name in weights:
            tensor.values, tensor.data_location = weights[tensor.name], None


def _empty(graph: gs.Graph) -> Weights:
    """Take the values of large constants out of the graph."""
    found = {}
    for tensor in graph.tensors().values():
        # onnx-graphsurgeon has a number for the dtype of values that NumPy has no dtype for.
        if not isinstance(tensor, gs.Constant) or isinstance(tensor.dtype, int):
            continue
        if np.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize >= LARGE:
            found[tensor.name] = tensor.values
            tensor.values = LazyValues(placeholder(tensor.name, tensor.values))
    return found


def passes() -> Iterator[ModuleType]:
    """Every pass module, by name."""
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        yield importlib.import_module(f"{__name__}.{module.name}")
