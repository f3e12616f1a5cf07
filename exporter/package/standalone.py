"""An artifact's graph in a form that other systems read: no functions, all shapes, plain names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx

from linexport.artifact import write
from linexport.errors import UsageError
from linexport.graph.walk import all_graphs, nodes_within, rename_values
from linexport.manifest import MODEL, Manifest
from linexport.package.destination import Packaging
from linexport.targets.lowering import op_functions
from linexport.targets.lowering.inlined import inlined


def standalone(job: Packaging) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return the model, inlined, and the inputs and outputs that got other names.

    Raises:
        UsageError: its weights do not fit into one file, or it has GatedDeltaNet.
    """
    check_size(job)
    written = onnx.load_model(str(job.source / MODEL))
    if op_functions.are_in(written):
        raise UsageError(
            f"{job.source} is of target {job.manifest.target}: it has GatedDeltaNet, "
            "which ONNX Runtime 1.31 has for GPUs alone, and this destination runs models on a "
            "CPU. Convert with --target ort or --target onnx for it."
        )
    model = inlined(written)
    return model, rename_interface(model)


def save_one_file(model: onnx.ModelProto, folder: Path) -> Path:
    """Write ``model.onnx`` with all weights inside; returns its path."""
    return write.save_model(model, folder, above=write.ONE_FILE)


def check_size(job: Packaging) -> None:
    """Refuse an artifact that is not a single file.

    Raises:
        UsageError: it is too large.
    """
    if sum(file.bytes for file in job.manifest.files.values()) > write.ONE_FILE:
        raise UsageError(
            f"{job.source} is larger than the 2 GB of one ONNX file, and this destination takes no "
            "weights in others. Quantise it: linexport quantize."
        )


def rename_interface(model: onnx.ModelProto) -> dict[str, str]:
    """Give inputs and outputs names of letters, digits and _, in place; returns what changed."""
    graph = model.graph
    taken = _names(model)
    renamed: dict[str, str] = {}
    for info in (*graph.input, *graph.output):
        plain = re.sub(r"\W", "_", info.name, flags=re.ASCII)
        if plain == info.name:
            continue
        count, name = 1, plain
        while name in taken:
            count += 1
            name = f"{plain}_{count}"
        taken.add(name)
        renamed[info.name] = name
    rename_values(graph, renamed)
    for info in (*graph.input, *graph.output, *graph.value_info):
        info.name = renamed.get(info.name, info.name)
    return renamed


def _names(model: onnx.ModelProto) -> set[str]:
    """Return the names of all values, in subgraphs too."""
    found = {
        name for node in nodes_within(model.graph.node) for name in (*node.input, *node.output)
    }
    for graph in all_graphs(model):
        found |= {i.name for i in (*graph.input, *graph.output, *graph.initializer)}
    return found


def rename_records(manifest: Manifest, renamed: Mapping[str, str]) -> Manifest:
    """Return a manifest of a model whose inputs and outputs have other names.

    Args:
        manifest: of the artifact.
        renamed: names that were changed, old to new.
    """

    def new(name: str) -> str:
        return renamed.get(name, name)

    return replace(
        manifest,
        inputs=tuple(replace(i, name=new(i.name)) for i in manifest.inputs),
        outputs=tuple(replace(o, name=new(o.name)) for o in manifest.outputs),
        states=tuple(replace(s, past=new(s.past), present=new(s.present)) for s in manifest.states),
    )
