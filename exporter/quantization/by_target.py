"""How weights in fewer bits are stored, by target.

ort             for ONNX Runtime's CPU kernels, which round activations to int8
onnx            in standard operators
ort-cuda        for ONNX Runtime's CUDA kernels, which take activations as they are
tensorrt-rtx    in standard operators, as its builder keeps them packed
tensorrt        the same
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from linexport.errors import UsageError
from linexport.quantization import engines
from linexport.quantization.cuda import cuda_model
from linexport.quantization.form import StorageForm, in_blocks, with_large_tables
from linexport.quantization.portable import portable_model
from linexport.quantization.rewrite import quantised_model

FP8 = "fp8"
ON_CPU = ("fp16", "bf16", "int8", "int4", "auto", "keep")
ON_CUDA = ("int8", "int4", "auto")
IN_ENGINES = ("int8", "int4", FP8, "auto")

ENGINES = StorageForm(
    engines.engine_model,
    IN_ENGINES,
    engines.grid,
    "one layer",
    on_cpu=False,
    few_bits_looked_up=False,
)

FORMS = {
    "ort": StorageForm(
        quantised_model, ON_CPU, in_blocks, "kernel", on_cpu=True, few_bits_looked_up=True
    ),
    "onnx": StorageForm(
        portable_model, ON_CPU, in_blocks, "none", on_cpu=True, few_bits_looked_up=False
    ),
    "ort-cuda": StorageForm(
        cuda_model, ON_CUDA, in_blocks, "products", on_cpu=False, few_bits_looked_up=False
    ),
    "tensorrt-rtx": ENGINES,
    "tensorrt": ENGINES,
}
"""Targets that have weights in fewer bits."""

GRIDS = {
    ("ort", "int4"): with_large_tables,
    ("tensorrt-rtx", FP8): engines.floats,
    ("tensorrt", FP8): engines.floats,
}
"""Grids of a target and a choice of ``--weights``, where they are not those of its form."""

LEAST_SM = {FP8: 89, "int4": 80, "auto": 80}
"""Oldest compute capability whose engines have such weights, ten times its number."""


def form_of(target: str, weights: str) -> StorageForm:
    """Return how a target stores weights of this choice."""
    form = FORMS[target]
    return replace(form, grid=GRIDS.get((target, weights), form.grid))


def check_gpus(target: str, weights: str, sms: Iterable[int]) -> None:
    """Refuse engines for GPUs that have no such weights.

    Raises:
        UsageError: one of the compute capabilities is too old.
    """
    least = LEAST_SM.get(weights, 0) if FORMS[target] is ENGINES else 0
    older = [sm for sm in sms if sm < least]
    if older:
        raise UsageError(
            f"--weights {weights} is for engines of compute capability {least / 10:.1f} and later; "
            f"--sm names {older[0] / 10:.1f}. Use --weights "
            f"{'int8' if older[0] < LEAST_SM['int4'] else 'int4 or int8'} for it."
        )
