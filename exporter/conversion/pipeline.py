"""The whole way: source -> checked and measured artifact.

    load -> trace -> rewrite -> lower -> write -> streaming -> parity -> engines -> timing -> report

Each stage takes what the one before returned. Everything is written to a temporary folder that
takes the place of the output at the very end.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from linexport import parity, passes, targets, trace
from linexport.artifact import write
from linexport.conversion import isolated
from linexport.conversion.add_records import (
    Measuring,
    check_place,
    publish,
    with_engines_checked,
    with_measurements,
    with_parity,
    with_status,
    with_warnings,
)
from linexport.conversion.model_under_test import model_under_test
from linexport.conversion.quantize import check_quantisation, quantize
from linexport.conversion.revalidate import bench
from linexport.conversion.stages import Checks, Job, TracedOriginal
from linexport.conversion.withdraw import blamed
from linexport.conversion.written import written
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import dims as dimensions
from linexport.loaders import LoadedModel, load_model
from linexport.loaders.memory_map import memory_map_weights
from linexport.manifest import ConvertOptions, Manifest
from linexport.manifest.options import FLOAT32, command, described
from linexport.manifest.proof import StreamingRecord
from linexport.manifest.records import FileRecord, StageRecord
from linexport.quantise.half import HALF
from linexport.system.progress import Progress, Silent, Stopwatch
from linexport.timing.latency import BRIEF

NAMED = 3
"""Operations that mix tokens, in the reason why a model does not stream."""

ROUNDED = (
    "ONNX Runtime has no bfloat16 kernels for CPUs: parity and streaming are those of "
    "the model with its rounded weights, computed in float32."
)


def convert(
    source: str | Path, output: str | Path, *, progress: Progress | None = None, **options: Any
) -> Manifest:
    """Convert a model to an artifact folder and prove it equal to the original.

    Args:
        source: a linexport checkpoint, an exported program, a Hugging Face model folder, or
            ``package.module:callable``.
        output: the folder to make.
        progress: shown the stages.
        **options: fields of ``ConvertOptions``:
            {options}

    Returns:
        The manifest. Its ``status`` is "ok" or "parity_failed"; a failed artifact is kept, at
        ``output`` or, if that would replace an earlier artifact, at ``output`` plus ".failed".
        ``artifact`` says where.

    Raises:
        StoppedAfterPass: it was asked for by ``stop_after``.
        LinexportError: see its subclasses; nothing is left behind.
    """
    return convert_checked(source, output, ConvertOptions(**options), Checks(), progress)


def convert_checked(
    source: str | Path | LoadedModel,
    output: str | Path,
    asked: ConvertOptions,
    checks: Checks,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a model, or one that is loaded, and check it as told; else like ``convert``."""
    place = Path(output)
    if asked.weights != FLOAT32:
        return _quantised(source, place, asked, progress)
    if asked.data is not None or asked.max_kld is not None:
        raise UsageError("--data and --max-kld are for quantised weights: pass --weights as well.")
    _configured(_named(source), place, asked)
    dimensions.parse(asked.dims)
    check_place(place, asked.overwrite)
    _dump(asked)
    shown = progress or Silent()
    with write.staged(place) as folder:
        if asked.isolated:
            manifest = isolated.run(_named(source), place, asked, folder, shown)
        else:
            job = job_of(source, place, asked, folder, shown)
            manifest = run(replace(job, checks=checks))
        return publish(folder, place, manifest)


def _quantised(
    source: str | Path | LoadedModel, place: Path, asked: ConvertOptions, progress: Progress | None
) -> Manifest:
    """Convert to float32 beside the output, prove that, and quantise it."""
    check_quantisation(asked.weights, asked.target, asked.max_kld)
    check_place(place, asked.overwrite)
    plain = {"weights": FLOAT32, "data": None, "max_kld": None, "bench": False}
    with write.staged(place) as folder:
        exact = folder / "float32"
        plainly = ConvertOptions(**{**vars(asked), **plain})
        manifest = convert_checked(source, exact, plainly, Checks(), progress)
        if manifest.status != "ok":
            return publish(exact, place, replace(manifest, options=asked))
        manifest = quantize(
            exact,
            place,
            weights=asked.weights,
            data=asked.data,
            max_kld=asked.max_kld,
            threads=asked.threads,
            seed=asked.seed,
            overwrite=asked.overwrite,
            progress=progress,
            options=asked,
            original=_in_half(source, asked),
        )
    if not asked.bench:
        return manifest
    return bench(
        manifest.artifact,
        source=source,
        lengths=asked.lengths,
        threads=asked.threads,
        seed=asked.seed,
        trust_remote_code=asked.trust_remote_code,
        progress=progress,
    )


def _in_half(source: str | Path | LoadedModel, asked: ConvertOptions) -> LoadedModel | None:
    """The original where its own half precision is what weights are judged by."""
    if asked.weights not in HALF:
        return None
    loaded = load_model(source, seed=asked.seed, trust_remote_code=asked.trust_remote_code)
    memory_map_weights(loaded)
    return loaded


def _signature() -> inspect.Signature:
    """The signature of ``convert`` with the fields of ``ConvertOptions`` in place of options."""
    own = inspect.signature(convert)
    kept = [p for p in own.parameters.values() if p.name != "options"]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(f.name, kind, default=f.default, annotation=f.type)
        for f in fields(ConvertOptions)
    ]
    *positional, progress = kept
    return own.replace(parameters=[*positional, *added, progress])


convert.__signature__ = _signature()  # type: ignore[attr-defined]
convert.__doc__ = (convert.__doc__ or "").format(options=described(12))


def _configured(source: str, output: Path, asked: ConvertOptions) -> targets.Target:
    """The target with its options; what it lacks here comes with the command for elsewhere."""
    target = targets.find_target(asked.target)
    if asked.inline and target.build is not None:
        raise UsageError(
            f"--inline is for ONNX models; target {target.name} builds engines, whose plugins take "
            "the place of the functions."
        )
    cache = None if asked.timing_cache is None else Path(asked.timing_cache)
    try:
        return target.configure(
            target,
            targets.Options(asked.precision, asked.sms, asked.plugins, asked.quick, cache),
        )
    except EnvironmentProblemError as error:
        raise EnvironmentProblemError(
            f"{error}\nOn a machine that has what is missing, this makes the artifact: "
            f"{command(source, str(output), asked)}"
        ) from None


def _dump(asked: ConvertOptions) -> passes.GraphDump | None:
    """The folder for dumps, made; the pass to stop after is known."""
    if asked.stop_after is not None:
        passes.find_pass(asked.stop_after, asked.target)
        if asked.dump_passes is None:
            raise UsageError(
                "--stop-after leaves its result in the folder of --dump-passes, and none was "
                "given. Add --dump-passes DIR."
            )
    return None if asked.dump_passes is None else passes.GraphDump(Path(asked.dump_passes))


def _named(source: str | Path | LoadedModel) -> str:
    return source.source.location if isinstance(source, LoadedModel) else str(source)


def job_of(
    source: str | Path | LoadedModel,
    output: Path,
    asked: ConvertOptions,
    folder: Path,
    shown: Progress,
) -> Job:
    """Return the conversion of ``source`` into ``folder``, which becomes ``output``."""
    target, ranges = _configured(_named(source), output, asked), dimensions.parse(asked.dims)
    return Job(source, asked, target, ranges, folder, Stopwatch(shown), _dump(asked))


def run(job: Job) -> Manifest:
    """Write everything to the job's folder except its reports; return the manifest."""
    original = _trace(job, _load(job))
    manifest, tested = _proven(job, original)
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
    manifest, tested, matches = _stream(job, original, withdrawn)
    with job.watch.stage("parity"):
        manifest = with_parity(manifest, tested, job.options.seed, original.traced, job.model)
    return manifest, tested, matches


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
