"""Running an artifact with more of its values as outputs, or with its graph changed otherwise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import onnx

from linexport.graph import external_data
from linexport.targets import InferenceSession

Change = Callable[[onnx.ModelProto], None]
"""Changes a graph in place."""

OpenChanged = Callable[[Change], InferenceSession]
"""Opens a model with its graph changed."""


def outputs_of(model: onnx.ModelProto, targets: Collection[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs to add to a model so that it gives each of these values it computes."""
    there = {o.name for o in model.graph.output}
    computed = (name for node in model.graph.node for name in node.output if name)
    return [onnx.ValueInfoProto(name=n) for n in computed if n in targets and n not in there]


def open_changed(
    path: Path, change: Change, open_session: Callable[[Path], InferenceSession]
) -> InferenceSession:
    """Open a copy of the model in that file with its graph changed; the file is not changed."""
    model = external_data.read_graph(path)
    change(model)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        copy = Path(work) / path.name
        external_data.save_with_graph(path, model, copy)
        for name in external_data.files_beside(model):
            os.link(path.parent / name, copy.parent / name)
        return open_session(copy)


def run(
    path: Path,
    targets: Collection[str],
    inputs: Mapping[str, np.ndarray],
    open_session: Callable[..., InferenceSession],
) -> tuple[dict[str, np.ndarray], list[onnx.NodeProto]]:
    """Outputs of the model in that file and these values, by name; and its nodes."""
    nodes: list[onnx.NodeProto] = []

    def expose(model: onnx.ModelProto) -> None:
        nodes.extend(model.graph.node)
        model.graph.output.extend(outputs_of(model, targets))

    session = open_changed(path, expose, lambda copy: open_session(copy, low_memory=True))
    return session.run(inputs), nodes
