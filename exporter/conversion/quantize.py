"""A float32 artifact -> one with weights in fewer bits, and the proof of what that changes.

read -> calibrate -> quantise -> write -> compare -> report
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import onnx
from numpy.typing import NDArray

from linexport import targets
from linexport.artifact import write
from linexport.artifact.checked import checked_artifact
from linexport.artifact.runtime import Artifact
from linexport.artifact.signature import Trust
from linexport.artifact.temporary import runs
from linexport.conversion.add_records import with_status
from linexport.conversion.choose_weights import ChosenWeights, choose, keep
from linexport.conversion.engines import files_of, with_engines_of
from linexport.conversion.model_under_test import model_under_test
from linexport.conversion.other_weights import with_alternatives
from linexport.conversion.publish import check_place, publish
from linexport.conversion.quantisation_record import (
    half_tensor,
    integer_tensor,
    model_bytes,
    record_of,
)
from linexport.conversion.quantised import run_in_half
from linexport.conversion.shared_weights import write_apart
from linexport.errors import UsageError
from linexport.graph.walk import count_nodes
from linexport.manifest import DATA, MODEL, ConvertOptions, Manifest, describe_files
from linexport.manifest.file_names import MTP, MTP_DATA
from linexport.manifest.options import FLOAT32, KEEP
from linexport.manifest.quantisation import QuantisationRecord
from linexport.manifest.records import HeadName, StageRecord
from linexport.manifest.rewriting import NodesRecord
from linexport.quantization import forecast
from linexport.quantization.by_target import FORMS, check_gpus, form_of
from linexport.quantization.calibration_inputs import inputs_of
from linexport.quantization.choose_bits import AUTO, CHOICES, Quantiser
from linexport.quantization.half import HALF, half_model
from linexport.quantization.opened import FloatModel, open_deployed, open_exactly, unopened
from linexport.quantization.portable import portable_model
from linexport.quantization.proof import Runs, with_proof
from linexport.sources import LoadedModel
from linexport.sources.metric import Evaluate, Metric, as_metric, check_drop
from linexport.sources.packed import StoredWeights
from linexport.system.progress import Progress, Silent, Stopwatch

MAX_KLD = 0.01
"""Limit of ``auto`` where the user names none, nats."""


def quantize(
    artifact: str | Path,
    output: str | Path,
    *,
    weights: str = "int4",
    data: str | Path | None = None,
    max_kld: float | None = None,
    evaluate: Metric | Evaluate | str | None = None,
    lower_is_better: bool = False,
    max_drop: float | None = None,
    threads: int = 0,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
    options: ConvertOptions | None = None,
    original: LoadedModel | None = None,
    checkpoint: StoredWeights | None = None,
    trust: Trust | None = None,
) -> Manifest:
    """Write a copy of a checked artifact whose weights take fewer bits.

    Args:
        artifact: folder that ``linexport convert`` wrote for target ort, onnx or ort-cuda.
        output: the folder to make.
        weights: fp16 or bf16; int8, int4, or auto: 4 or 8 bits for each, until ``max_kld`` holds;
            keep: the integers of ``checkpoint``.
        data: text to choose values by and to compare on: a file or a folder of ``.txt`` files.
            None: the source of Python's standard library.
        max_kld: largest mean KL divergence from the float32 model, nats; more is a failure. None:
            no limit, for auto 0.01.
        evaluate: gives a score for an opened artifact, of the float32 one and of the new one; a
            function, or ``package.module:evaluate``.
        lower_is_better: that score is a loss.
        max_drop: by how much it may get worse; more is a failure. None: no limit.
        threads: of every session, 0 for ONNX Runtime's choice.
        seed: of random choices.
        overwrite: replace an artifact that is there, once the new one is complete.
        progress: shown the stages.
        options: those of the conversion that this is part of, for the manifest.
        original: the model in PyTorch; half precision is compared with its own, too.
        checkpoint: the stored weights that the artifact was made of; None where they are not known.
        trust: whose artifacts are taken; None for anybody's.

    Returns:
        The manifest of the new artifact, with a ``quantisation`` record. Its ``status`` is
        "quantisation_failed" where ``max_kld`` or ``max_drop`` is exceeded, among others.

    Raises:
        UsageError: no such artifact, not a float32 one, data that cannot be read, or ``keep``
            without a checkpoint.
        UnsupportedModelError: nothing of it can be quantised.
    """
    source, place = Path(artifact), Path(output)
    check_quantisation(weights, None, max_kld)
    if weights == KEEP and checkpoint is None:
        raise UsageError(
            f"--weights keep needs the quantised checkpoint, and {source} is an artifact: float32 "
            "weights. Pass it to linexport convert with the checkpoint, or pass --weights int8 or "
            "int4."
        )
    check_drop(evaluate, max_drop)
    metric = as_metric(evaluate, lower_is_better)
    check_place(place, overwrite, source)
    watch = Stopwatch(progress or Silent())
    with watch.stage("read"):
        checked = checked_artifact(source, trust)
        opened = unopened(checked, threads)
        _check(opened, weights)
        if options is None:  # else it was said of the whole conversion
            size = forecast.ModelSize(model_bytes(opened.manifest.files))
            forecast.announce(forecast.QUANTISE, size, place, watch.shown)
        model = FloatModel.of(opened, source / MODEL, threads)
        form = form_of(opened.manifest.target, weights)
        quantiser = Quantiser(model, form, integers=weights not in HALF)
        inputs = inputs_of(opened, None if data is None else Path(data), seed)
    check_head(weights, max_kld, "causal_lm" if inputs.language else opened.manifest.head)
    limit = MAX_KLD if weights == AUTO and max_kld is None else max_kld
    found = chain = None
    if checkpoint is not None and weights == KEEP:
        portable = form.rewrite is portable_model
        found, chain = keep(checkpoint, model, quantiser, portable, inputs, watch)
    elif weights not in HALF:
        found, chain = choose(weights, limit, model, quantiser, inputs, watch)
    with write.staged(place) as folder:
        with watch.stage("write"):
            manifest, record = _stored(
                weights, limit, found, quantiser, model, checked.manifest, folder
            )
        with watch.stage("compare"):
            session = open_deployed(folder / MODEL, manifest, threads)
            exact = (
                partial(open_exactly, folder / MODEL, threads) if found and form.on_cpu else None
            )
            half = None
            if found is None and original is not None:
                tested = model_under_test(manifest, original, lambda: session)
                half = run_in_half(tested, weights)
            reference, name = model.reference()
            name = name if chain is None else "the float32 layers"
            at = cache(model.open_at_positions)
            both = Runs(reference, runs(session), exact, name, half, chain, at_positions=at)
            record = with_proof(record, opened, both, inputs, seed)
            if inputs.language is not None and inputs.windows is not None:
                exactly = both.reference_outputs(opened, inputs.language)
                text = inputs.windows.compared
                record = with_alternatives(
                    record, model, quantiser, form, inputs.language, exactly, text
                )
        if metric is not None:
            with watch.stage("evaluate"):
                made_of = Artifact(folder, manifest, session)
                record = replace(record, metric=metric.compared(opened, made_of), max_drop=max_drop)
        if targets.find_target(manifest.target).deploy is not None:
            with watch.stage("build"):
                manifest = with_engines_of(manifest, folder, options or _options(manifest))
        stages = (*manifest.stages, *(StageRecord(**stage) for stage in watch.stages))
        manifest = replace(
            manifest,
            quantisation=record,
            seed=seed,
            stages=stages,
            options=options or manifest.options,
        )
        checked.check_unchanged()
        return publish(folder, place, with_status(manifest))


def check_quantisation(weights: str, target: str | None, max_kld: float | None) -> None:
    """Refuse what cannot be done, before work is spent on it.

    Raises:
        UsageError: an unknown choice of weights, a target without kernels for them, or a limit that
            is not positive.
    """
    if weights not in CHOICES:
        known = ", ".join((FLOAT32, *CHOICES))
        raise UsageError(f"--weights is {weights!r}; expected one of {known}.")
    if target is not None:
        check_choice(weights, target)
    if max_kld is not None and not 0 < max_kld < float("inf"):
        raise UsageError(f"--max-kld is {max_kld}; expected a positive number of nats.")


def check_choice(weights: str, target: str) -> None:
    """Refuse weights that a target has not.

    Raises:
        UsageError: it has no such weights.
    """
    if target in FORMS and weights in FORMS[target].choices:
        return
    *known, last = (name for name, form in FORMS.items() if weights in form.choices)
    instead = "Leave out --weights or --target."
    if target in FORMS:
        own = ", ".join(FORMS[target].choices)
        instead = f"For {target} there are {own}."
        if weights in HALF:
            instead += f" --precision {weights} computes in half precision."
    raise UsageError(
        f"--weights {weights} is for targets {', '.join(known)} and {last}; found target {target}. "
        f"{instead}"
    )


def check_head(weights: str, max_kld: float | None, head: HeadName | None) -> None:
    """Refuse ``auto`` and a limit of the divergence for a model that is not a language model.

    Raises:
        UsageError: one is requested for a model with another head, or none.
    """
    if head == "causal_lm":
        return
    kind = f"; this model's output is of the kind {head}" if head else ""
    if weights == AUTO:
        raise UsageError(
            f"--weights auto compares distributions of tokens: it is for language models{kind}. "
            "Pass --weights int8 or int4."
        )
    if max_kld is not None:
        raise UsageError(
            f"--max-kld limits the divergence of distributions of tokens: it is for language "
            f"models{kind}. Pass --evaluate and --max-drop, a score of your own and its limit."
        )


def _stored(
    weights: str,
    limit: float | None,
    found: ChosenWeights | None,
    quantiser: Quantiser,
    model: FloatModel,
    before: Manifest,
    folder: Path,
) -> tuple[Manifest, QuantisationRecord]:
    """Write the model; returns its manifest, and how its weights are stored."""
    if found is None:
        made = half_model(model.graph, model.values, quantiser.weights, weights)
        manifest = _write(model, made.graph, made.values, before, folder)
        tensors = tuple(half_tensor(w, weights) for w in quantiser.weights)
        record = record_of(weights, limit, tensors, quantiser.kept, model)
    else:
        rewrite = FORMS[model.artifact.manifest.target].rewrite
        graph = rewrite(model.written, {c.weight.name: c for c in found.chosen})
        manifest = _write(model, graph, {}, before, folder)
        alone = found.divergences
        tensors = tuple(integer_tensor(c, alone.get(c.weight.name)) for c in found.chosen)
        kept = (*quantiser.kept, *found.left)
        record = record_of(weights, limit, tensors, kept, model, found.pareto)
        record = replace(record, checkpoint=found.checkpoint)
    return manifest, replace(record, model_bytes=model_bytes(manifest.files))


def _write(
    model: FloatModel,
    graph: onnx.ModelProto,
    values: Mapping[str, NDArray],
    manifest: Manifest,
    folder: Path,
) -> Manifest:
    """Write the model and copy what belongs to it; returns its manifest, nothing compared yet."""
    opened = model.artifact
    left = {t.name for t in graph.graph.initializer}
    nodes = count_nodes(graph.graph)
    same = {n: v for n, v in model.stored.items() if n in left}
    write.save_model(graph, folder, {**same, **values})
    written = {MODEL, DATA, MTP, MTP_DATA, *files_of(manifest)}
    write.copy_files([opened.path / name for name in manifest.files if name not in written], folder)
    if manifest.mtp is not None:
        write_apart(opened.path, folder)
    files = describe_files(folder)
    return replace(
        manifest,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        nodes=NodesRecord(manifest.nodes.exported, nodes),
        files=files,
        model_sha256=files[MODEL].sha256 or "",
        latency=None,
        decode=None,
        memory=None,
        measurement=None,
        engines=(),
        prepared=None,
    )


def _options(manifest: Manifest) -> ConvertOptions:
    """Return the options that an artifact was converted by.

    Raises:
        UsageError: they are not known.
    """
    if manifest.options is None:
        raise UsageError(
            "The artifact does not say by which options its engines were built. Convert the model "
            "again, with --weights."
        )
    return manifest.options


def _check(artifact: Artifact, weights: str) -> None:
    manifest = artifact.manifest
    if manifest.quantisation is not None:
        raise UsageError(
            f"{artifact.path} has {manifest.quantisation.weights} weights already; expected an "
            "artifact that is not quantised. Quantise the one it was made from."
        )
    check_choice(weights, manifest.target)
    if manifest.options is not None:
        check_gpus(manifest.target, weights, manifest.options.sms)
    if manifest.packed is not None:
        raise UsageError(
            f"{artifact.path} takes packed batches, for which weights in fewer bits are not "
            "written. Leave out --packed-batches or --weights."
        )
