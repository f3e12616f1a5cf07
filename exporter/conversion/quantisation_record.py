"""Quantised weights -> the record of how they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from linexport.manifest import DATA, MODEL
from linexport.manifest.quantisation import (
    KeptTensorRecord,
    ParetoPoint,
    QuantisationRecord,
    QuantisedTensorRecord,
)
from linexport.manifest.records import FileRecord
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.opened import FloatModel
from linexport.quantization.quantisable import KeptWeight, Weight


def record_of(
    weights: str,
    limit: float | None,
    tensors: tuple[QuantisedTensorRecord, ...],
    kept: Sequence[KeptWeight],
    model: FloatModel,
    pareto: tuple[ParetoPoint, ...] = (),
) -> QuantisationRecord:
    """Say how weights are stored; nothing compared yet."""
    stored = sum(t.bytes for t in tensors)
    count = sum(t.outputs * t.inputs for t in tensors)
    float32_bytes = model_bytes(model.artifact.manifest.files)
    return QuantisationRecord(
        weights=weights,
        data="",
        reference="",
        tensors=tensors,
        kept=tuple(
            KeptTensorRecord(k.name, int(model.stored[k.name].nbytes), k.reason) for k in kept
        ),
        bits_per_weight=8 * stored / count,
        model_bytes=float32_bytes,
        float32_bytes=float32_bytes,
        max_kld=limit,
        divergence=None,
        output_error=None,
        drift=None,
        pareto=pareto,
    )


def half_tensor(weight: Weight, name: str) -> QuantisedTensorRecord:
    """Return the record of a weight in half precision, fp16 or bf16."""
    n, k = weight.outputs, weight.inputs
    return QuantisedTensorRecord(weight.name, n, k, 16, None, name, 2 * n * k, None)


def integer_tensor(chosen: Chosen, divergence: float | None) -> QuantisedTensorRecord:
    """Return the record of a weight in blocks of integers, with its divergence alone."""
    weight, grid = chosen.weight, chosen.quantised.grid
    return QuantisedTensorRecord(
        weight.name,
        weight.outputs,
        weight.inputs,
        grid.bits,
        grid.block,
        chosen.method,
        chosen.bytes,
        divergence,
    )


def model_bytes(files: Mapping[str, FileRecord]) -> int:
    """Return the size of a model and its external data."""
    return sum(record.bytes for name, record in files.items() if name in (MODEL, DATA))
