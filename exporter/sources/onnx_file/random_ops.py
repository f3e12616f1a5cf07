"""Rejection of ONNX files that draw random numbers at every call; see ``trace.random_ops``."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto, numpy_helper

from linexport.errors import UnsupportedModelError
from linexport.graph.operators import RANDOM
from linexport.graph.walk import all_graphs, all_nodes

_TRAINING_MODE = 2
"""Place of the input that makes Dropout random."""


def reject_nondeterminism(model: onnx.ModelProto) -> None:
    """Raise where the file draws random numbers; a seed only fixes those of the first call.

    Raises:
        UnsupportedModelError: names the nodes.
    """
    found = list(_random_nodes(model))
    if found:
        raise UnsupportedModelError(
            "it draws random numbers at every call, so that no two of its outputs are equal and no "
            f"conversion can be checked: {', '.join(found)}"
        )


def _random_nodes(model: onnx.ModelProto) -> Iterator[str]:
    off = set(_false(model))
    for node in all_nodes(model):
        if node.domain not in ("", "ai.onnx"):
            continue
        training = [name for name in node.input[_TRAINING_MODE:] if name and name not in off]
        if node.op_type in RANDOM or (node.op_type == "Dropout" and training):
            yield f"{node.op_type} {node.name}".strip()


def _false(model: onnx.ModelProto) -> Iterator[str]:
    """Yield the names of scalar constants that are false."""
    stored = [(t.name, t) for graph in all_graphs(model) for t in graph.initializer]
    stored += [
        (node.output[0], attribute.t)
        for node in all_nodes(model)
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value"
    ]
    for name, tensor in stored:
        scalar = tensor.data_type == TensorProto.BOOL and not tensor.dims
        if scalar and not numpy_helper.to_array(tensor):
            yield name
