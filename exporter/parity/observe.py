"""Running an artifact with more of its values as outputs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import onnx

from linexport import heap
from linexport.artifact import write
from linexport.targets import Session


def observed(model: onnx.ModelProto, wanted: Collection[str]) -> onnx.ModelProto:
    """``model``, changed: every wanted value that it computes is among its outputs."""
    there = {o.name for o in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name and name in wanted and name not in there:
                there.add(name)
                model.graph.output.append(onnx.ValueInfoProto(name=name))
    return model


def run(
    path: Path,
    wanted: Collection[str],
    inputs: Mapping[str, np.ndarray],
    open_session: Callable[..., Session],
) -> tuple[dict[str, np.ndarray], list[onnx.NodeProto]]:
    """Outputs of the model in that file and the wanted values, by name; and its nodes."""
    with tempfile.TemporaryDirectory() as work:
        model = observed(onnx.load_model(str(path)), wanted)
        written = write.save_model(model, Path(work))
        nodes = [copy.deepcopy(node) for node in model.graph.node]
        del model  # a node of it would hold its weights
        heap.give_back()
        return open_session(written, arena=False).run(inputs), nodes
