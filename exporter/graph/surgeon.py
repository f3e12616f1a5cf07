"""ModelProto <-> onnx-graphsurgeon graph, with large weights kept out of both.

A ModelProto holds its weights by value. ``externalize_constants`` takes them out of a graph, so
that it becomes a model without copies of them; ``restore_constants`` puts them back.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from linexport.graph.external_data import LARGE, Weights, external_initializer

# It prints warnings to the standard output, which is JSON alone where --json is given.
G_LOGGER.severity = G_LOGGER.ERROR


def to_model(graph: gs.Graph) -> onnx.ModelProto:
    """Return the graph as a model; nodes of linexport ops have no bodies yet, nor a type check."""
    return gs.export_onnx(graph, do_type_check=False)


def restore_constants(graph: gs.Graph, weights: Weights) -> None:
    """Give external initializers their values, in place, in the bodies of nodes too."""
    for place in (graph, *graph.subgraphs(recursive=True)) if weights else ():
        for tensor in place.tensors().values():
            if isinstance(tensor, gs.Constant) and tensor.name in weights:
                tensor.values, tensor.data_location = weights[tensor.name], None


def externalize_constants(graph: gs.Graph, size: int = LARGE) -> Weights:
    """Turn constants of at least ``size`` bytes into external initializers; returns the values.

    Those that bodies of nodes read stay as they are: a model has external ones in its own graph.
    """
    found = {}
    bodies = graph.subgraphs(recursive=True)
    within = {id(tensor) for body in bodies for tensor in body.tensors().values()}
    for tensor in graph.tensors().values():
        if id(tensor) in within:
            continue
        # onnx-graphsurgeon has a number for the dtype of values that NumPy has no dtype for.
        if not isinstance(tensor, gs.Constant) or isinstance(tensor.dtype, int):
            continue
        if np.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize >= size:
            found[tensor.name] = tensor.values
            tensor.values = LazyValues(external_initializer(tensor.name, tensor.values))
    return found
