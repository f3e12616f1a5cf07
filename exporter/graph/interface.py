"""Inputs and outputs of a graph -> records of their names, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from linexport.manifest.records import InputRecord, TensorRecord
from linexport.plugins.ops.registry import dim


def input_records(
    infos: Iterable[onnx.ValueInfoProto], defaults: Mapping[str, int] | None = None
) -> tuple[InputRecord, ...]:
    """Name, dtype, shape and default of graph inputs."""
    known = defaults or {}
    return tuple(InputRecord(**vars(t), default=known.get(t.name)) for t in tensor_records(infos))


def tensor_records(infos: Iterable[onnx.ValueInfoProto]) -> tuple[TensorRecord, ...]:
    """Name, dtype and shape of graph inputs or outputs."""
    return tuple(
        TensorRecord(
            info.name,
            onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name,
            tuple(dim(d) for d in info.type.tensor_type.shape.dim),
        )
        for info in infos
    )
