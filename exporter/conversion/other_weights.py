"""Divergence of finer weights, measured where the requested weights exceed ``--max-kld``.

    int4 -> int8 -> bf16 -> fp16     one after another, until one is within the limit

What fewer bits lose does not say what more would: activations are rounded to int8 with weights of
4 and of 8 bits alike, and on some models that is nearly all of the divergence. Weights of 8 bits
are rounded to the nearest value here; ``--weights int8`` takes longer, and loses less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from linexport.artifact.temporary import Run
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.errors import UnsupportedModelError
from linexport.manifest.options import KEEP
from linexport.manifest.quantisation import AlternativeRecord, QuantisationRecord
from linexport.quantization.choose_bits import AUTO, BITS, Quantiser
from linexport.quantization.form import StorageForm
from linexport.quantization.half import half_model
from linexport.quantization.opened import FloatModel
from linexport.quantization.proof import divergence
from linexport.quantization.window_pieces import Outputs, Window, outputs_of

FINER = {
    "int4": ("int8", "bf16", "fp16"),
    "int8": ("bf16", "fp16"),
    AUTO: ("bf16", "fp16"),  # past its limit, all its weights have 8 bits
    KEEP: ("bf16", "fp16"),  # its weights are exact: activations in 8 bits make the difference
    "bf16": ("fp16",),
    "fp8": ("int8",),
    "fp16": (),
}


def with_alternatives(
    record: QuantisationRecord,
    model: FloatModel,
    quantiser: Quantiser,
    form: StorageForm,
    language: LanguageInterface,
    reference: Outputs,
    windows: Sequence[Window],
) -> QuantisationRecord:
    """Measure the finer choices of weights where the divergence is past its limit.

    Args:
        record: with the divergence of the requested weights.
        model: the float32 model.
        quantiser: of its weights.
        form: how the target stores them.
        language: names tokens and logits.
        reference: outputs of the float32 model.
        windows: the text that the divergence was measured on.
    """
    limit, found = record.max_kld, record.divergence
    if limit is None or found is None or found.mean <= limit:
        return record
    alternatives: list[AlternativeRecord] = []
    for weights in FINER[record.weights]:
        if weights not in form.choices:
            continue
        try:
            run = _opened(weights, model, quantiser, form)
        except UnsupportedModelError:  # a weight beyond the range of fp16
            continue
        ours = outputs_of(model.artifact, language, run)
        mean = divergence(model.artifact, language, reference, ours, windows)[0].mean
        alternatives.append(AlternativeRecord(weights, mean))
        if mean <= limit:
            break
    return replace(record, alternatives=tuple(alternatives))


def _opened(weights: str, model: FloatModel, quantiser: Quantiser, form: StorageForm) -> Run:
    if weights in BITS:
        chosen = quantiser.uniform(BITS[weights])
        return model.deployed(form.rewrite(model.written, {c.weight.name: c for c in chosen}))
    made = half_model(model.graph, model.values, quantiser.weights, weights)
    return model.deployed(made.graph, made.values)
