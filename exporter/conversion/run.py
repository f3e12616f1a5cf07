"""The stages of one conversion: source -> checked and measured files in a folder.

    load -> trace -> rewrite -> lower -> write -> streaming -> parity -> library -> engines
         -> timing

Each stage takes what the one before returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from linexport import parity, targets, trace
from linexport.artifact.temporary import open_written
from linexport.conversion.add_records import (
    Measuring,
    with_engines_checked,
    with_library_checked,
    with_measurements,
    with_parity,
    with_status,
    with_warnings,
)
from linexport.conversion.model_under_test import model_under_test
from linexport.conversion.stages import Job, TracedOriginal
from linexport.conversion.withdraw import blamed
from linexport.conversion.written import written
from linexport.graph import dims as dimensions
from linexport.graph import external_data
from linexport.loaders import LoadedModel, load_model
from linexport.loaders.memory_map import memory_map_weights
from linexport.manifest import Manifest
from linexport.manifest.proof import StreamingRecord
from linexport.manifest.records import FileRecord, StageRecord
from linexport.timing.latency import BRIEF

NAMED = 3
"""Operations that mix tokens, in the reason why a model does not stream."""

NOT_AS_A_WHOLE = "each layer was proven in turn, and the float32 model not run as a whole"

ROUNDED = (
    "ONNX Runtime has no bfloat16 kernels for CPUs: parity and streaming are those of "
    "the model with its rounded weights, computed in float32."
)


def run(job: Job) -> Manifest:
    """Write everything to the job's folder except its reports; return the manifest."""
    original = _trace(job, _load(job))
    manifest, tested = _proven(job, original)
    if _passed(manifest) and not job.checks.by_layers:
        with job.watch.stage("library"):
            manifest = with_library_checked(
                manifest, tested, partial(job.open, native=True), job.options.seed
            )
    if job.target.build:
        with job.watch.stage("build"):
            manifest = _build(job, job.target.build, original.dims, manifest)
            manifest = with_engines_checked(manifest, tested, job.folder, job.options.seed)
    if job.options.bench:
        with job.watch.stage("measure"):
            settings = replace(BRIEF, threads=job.options.threads)
            program = original.traced.program
            how = Measuring(job.options.lengths, settings, job.options.seed, program)
            manifest = with_measurements(manifest, tested, job.folder, how)
    stages = tuple(StageRecord(**stage) for stage in job.watch.stages)
    return with_status(replace(manifest, stages=stages))


def _load(job: Job) -> LoadedModel:
    with job.watch.stage("load"):
        trusted = job.options.trust_remote_code
        loaded = load_model(job.source, seed=job.options.seed, trust_remote_code=trusted)
        memory_map_weights(loaded)
        return loaded


def _trace(job: Job, loaded: LoadedModel) -> TracedOriginal:
    with job.watch.stage("trace"):
        traced = trace.trace(loaded)
        dims = job.target.bound(dimensions.merge(traced.dims, job.ranges))
        return TracedOriginal(loaded, traced, dims)


def _proven(job: Job, original: TracedOriginal) -> tuple[Manifest, parity.ModelUnderTest]:
    """The model that equals its original: without the matches to blame, where it would not."""
    manifest, tested, matches = _checked(job, original, {})
    if _passed(manifest) or not matches:
        return manifest, tested
    assert manifest.parity is not None
    job = replace(job, dump=None)  # what follows are trials of the same passes
    error = manifest.parity.max_relative_error

    def passes(left_out: frozenset[str]) -> bool:
        return _passed(_checked(job, original, dict.fromkeys(left_out, ""))[0])

    reason = (
        f"withdrawn: with it the artifact differs from the original by {error:.1e}, and without it "
        "the two are equal"
    )
    found = blamed(matches, passes)
    manifest, tested, _ = _checked(job, original, dict.fromkeys(found, reason))
    return with_warnings(manifest, [f"{where} was {reason}." for where in sorted(found)]), tested


def _passed(manifest: Manifest) -> bool:
    return manifest.parity is not None and manifest.parity.passed


def _checked(
    job: Job, original: TracedOriginal, withdrawn: Mapping[str, str]
) -> tuple[Manifest, parity.ModelUnderTest, Sequence[str]]:
    """The model without some matches, what to check it by, and its matches."""
    if job.checks.by_layers:
        return _by_layers(job, original, withdrawn)
    manifest, tested, matches = _stream(job, original, withdrawn)
    with job.watch.stage("parity"):
        manifest = with_parity(manifest, tested, job.options.seed, original.traced, job.model)
    return manifest, tested, matches


def _by_layers(
    job: Job, original: TracedOriginal, withdrawn: Mapping[str, str]
) -> tuple[Manifest, parity.ModelUnderTest, Sequence[str]]:
    """The model with each of its layers compared, and with streams of them; see ``_checked``."""
    model = written(job, original, with_state=True, withdrawn=withdrawn)
    tested = _tested(job, model.manifest, original)
    values = parity.layer_values(tested, original.traced)
    graph, weights = external_data.read_mapped(job.model)
    steps = job.watch.shown.steps("layers", len(values) + 1)
    with job.watch.stage("layers"), steps as advance:
        outcome, streaming = parity.check_layers(
            tested,
            values,
            graph,
            lambda part: open_written(part, weights, job.options.threads),
            job.options.seed,
            advance,
        )
    manifest = replace(model.manifest, parity=outcome.record(), streaming=streaming)
    manifest = replace(manifest, library=parity.not_run("functions", NOT_AS_A_WHOLE))
    return with_warnings(manifest, outcome.notes), tested, model.matches


def _stream(
    job: Job, original: TracedOriginal, withdrawn: Mapping[str, str]
) -> tuple[Manifest, parity.ModelUnderTest, Sequence[str]]:
    """The model with states where it streams, else without; see ``_checked``."""
    model = written(job, original, with_state=True, withdrawn=withdrawn)
    tested = _tested(job, model.manifest, original)
    with job.watch.stage("streaming"):
        streaming = parity.check_streaming(tested, job.options.seed)
    # A model's own states are inputs and outputs: they cannot be left out.
    if streaming.passed is False and original.loaded.decode_module is None:
        reason = f"exported without state: {streaming.reason}"
        if model.mixing:
            reason += f". What mixes tokens: {', '.join(model.mixing[:NAMED])}"
        streaming = StreamingRecord(None, reason)
        model = written(job, original, with_state=False, withdrawn=withdrawn)
        tested = _tested(job, model.manifest, original)
    return replace(model.manifest, streaming=streaming), tested, model.matches


def _tested(job: Job, manifest: Manifest, original: TracedOriginal) -> parity.ModelUnderTest:
    return job.checks.applied(model_under_test(manifest, original.loaded, job.open))


def _build(
    job: Job,
    build: targets.Build,
    dims: Mapping[str, dimensions.DimRange],
    manifest: Manifest,
) -> Manifest:
    """Engines beside the model."""
    states = tuple(s.past for s in manifest.states)
    engines = build(targets.Converted(job.model, dims, states))
    sizes = {e.file: (job.folder / e.file).stat().st_size for e in engines}
    files = {e.file: FileRecord(sizes[e.file], e.sha256) for e in engines}
    manifest = replace(manifest, engines=tuple(engines), files={**manifest.files, **files})
    return with_warnings(manifest, [ROUNDED] if job.options.precision == "bf16" else [])
