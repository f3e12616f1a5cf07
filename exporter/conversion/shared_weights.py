"""Weights that two models of a folder have: one keeps them, and the other names their place.

Weights in the data file of ``model.onnx`` are shared with the head for multi-token prediction,
which has the same embeddings and output layer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from linexport.artifact import write
from linexport.graph import external_data
from linexport.manifest import DATA, MODEL
from linexport.manifest.file_names import MTP, MTP_DATA
from linexport.manifest.folder import file_record
from linexport.manifest.records import FileRecord


def share_weights(folder: Path) -> dict[str, FileRecord]:
    """Let the head name weights of the model where these are the same, and have no such of its own.

    Returns:
        The head's files, by name.
    """
    if DATA in external_data.files_beside(external_data.read_graph(folder / MODEL)):
        model, stored = external_data.read_mapped(folder / MODEL)
        head, own = external_data.read_mapped(folder / MTP)
        shared = {}
        for name, values in own.items():
            found = (t for t in model.graph.initializer if _holds(t, stored, values))
            if (tensor := next(found, None)) is not None:
                shared[name] = tensor
        for tensor in head.graph.initializer:
            if (place := shared.get(tensor.name)) is not None:
                name = tensor.name
                tensor.CopyFrom(place)
                tensor.name = name
        rest = {name: values for name, values in own.items() if name not in shared}
        write.save_model(head, folder, rest, names=(MTP, MTP_DATA))
    there = (folder / name for name in (MTP, MTP_DATA))
    return {path.name: file_record(path) for path in there if path.exists()}


def write_apart(source: Path, folder: Path) -> None:
    """Write the head of an artifact to another folder with all its weights."""
    head, weights = external_data.read_mapped(source / MTP)
    write.save_model(head, folder, weights, names=(MTP, MTP_DATA))


def _holds(tensor: onnx.TensorProto, stored: external_data.Weights, values: np.ndarray) -> bool:
    """Return whether an initializer of the model has these values, bit for bit."""
    held = stored.get(tensor.name)
    if held is None or (held.dtype, held.shape) != (values.dtype, values.shape):
        return False
    one, other = (np.ravel(x).view(np.uint8) for x in (held, values))
    starts = range(0, len(one), external_data.AT_ONCE)
    ends = (start + external_data.AT_ONCE for start in starts)
    return all(
        np.array_equal(one[start:end], other[start:end])
        for start, end in zip(starts, ends, strict=True)
    )
