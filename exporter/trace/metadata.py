"""What exporters note about a graph: local paths and stack traces, of no use in an artifact."""

from __future__ import annotations

import onnx


def drop_metadata(model: onnx.ModelProto) -> None:
    """Remove it, in place."""
    graph = model.graph
    for item in [model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output]:
        del item.metadata_props[:]
