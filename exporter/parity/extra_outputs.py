"""Running an artifact with more of its values as outputs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np
import onnx

from linexport.graph import external_data
from linexport.targets import InferenceSession


def outputs_of(model: onnx.ModelProto, targets: Collection[str]) -> list[onnx.ValueInfoProto]:
    """Return the outputs to add to a model so that it gives each of these values it computes."""
    there = {o.name for o in model.graph.output}
    computed = (name for node in model.graph.node for name in node.output if name)
    return [onnx.ValueInfoProto(name=n) for n in computed if n in targets and n not in there]


def run(
    path: Path,
    targets: Collection[str],
    inputs: Mapping[str, np.ndarray],
    open_session: Callable[..., InferenceSession],
) -> tuple[dict[str, np.ndarray], list[onnx.NodeProto]]:
    """Outputs of the model in that file and these values, by name; and its nodes."""
    model = external_data.read_graph(path)
    more = onnx.ModelProto()
    more.graph.output.extend(outputs_of(model, targets))
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        copy = Path(work) / path.name
        shutil.copyfile(path, copy)
        for name in external_data.files_beside(model):
            os.link(path.parent / name, copy.parent / name)
        with copy.open("ab") as file:
            file.write(more.SerializeToString())  # joined with what is there
        return open_session(copy, low_memory=True).run(inputs), list(model.graph.node)
