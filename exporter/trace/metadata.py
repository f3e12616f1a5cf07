"""Metadata of exporters: local paths and stack traces, which do not belong in an artifact."""

from __future__ import annotations

import onnx


def drop_metadata(model: onnx.ModelProto) -> None:
    """Remove the metadata of a graph, in place."""
    graph = model.graph
    for item in [model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output]:
        del item.metadata_props[:]
