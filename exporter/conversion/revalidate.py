"""Check and measure an artifact again, against its original."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from linexport import manifest as manifests
from linexport import parity, targets
from linexport.artifact.checked import CheckedArtifact, checked_artifact
from linexport.artifact.signature import SIGNATURE, Trust
from linexport.conversion.add_records import (
    Measuring,
    placement_of,
    with_divergence,
    with_engines_checked,
    with_library_checked,
    with_library_proven,
    with_measurements,
    with_parity,
    with_status,
    with_throughput,
)
from linexport.conversion.expected_time import say_comparison
from linexport.conversion.model_under_test import model_under_test
from linexport.conversion.predictor import with_predictor_checked
from linexport.conversion.publish import write_reports
from linexport.conversion.quantised import with_quantisation_checked
from linexport.conversion.streaming import check_streams
from linexport.errors import UsageError
from linexport.manifest import MODEL, Manifest
from linexport.manifest.file_names import MTP, VISION
from linexport.parity.reference.extra_outputs import Change, open_changed
from linexport.sources import LoadedModel, is_factory, load_model
from linexport.sources.memory_map import memory_map_weights
from linexport.sources.onnx_file.module import AS_SPECIFIED
from linexport.system.progress import Progress, Silent, Stopwatch
from linexport.targets.base import uses_library
from linexport.targets.runtime import providers
from linexport.targets.runtime.providers import CPU_ONLY, Execution
from linexport.timing.latency import THOROUGH
from linexport.timing.throughput import Workload

log = logging.getLogger(__name__)


def validate(
    artifact: str | Path,
    *,
    source: object = None,
    seed: int = 0,
    threads: int = 0,
    trust_remote_code: bool = False,
    data: str | Path | None = None,
    progress: Progress | None = None,
    provider: str = providers.CPU,
    strict: bool = False,
    record: bool = False,
    trust: Trust | None = None,
) -> Manifest:
    """Check an artifact against its original again.

    The folder is not changed, unless the outcome is to be recorded.

    Args:
        artifact: the folder.
        source: the original, where it is not at the place the manifest names, or is a function or
            an object; as ``linexport.convert`` takes it, a module as (module, args).
        seed: of the random inputs.
        threads: 0 for the runtime's choice.
        trust_remote_code: run Python code that the source brings along.
        data: text that a quantised artifact is compared on; None for that of its conversion where
            it is still there and the same, else the source of Python's standard library.
        progress: shown the stages.
        provider: ONNX Runtime's execution provider that runs the artifact; see ``linexport.load``.
        strict: see there.
        record: write the outcome to the artifact's manifest and report. One that failed is then
            marked, and ``load`` refuses it.
        trust: whose artifacts are checked; None for anybody's.

    Returns:
        The manifest with the outcome, whose ``placement`` says what the provider ran.

    Raises:
        UsageError: not an artifact, or the source is missing, not the one it was made from, or has
            other weights; an unknown provider, or one that does not open artifacts of this target.
        NothingComparedError: the original gives nothing to compare with.
        SignatureError: it is not as one who is trusted signed it.
        EnvironmentProblemError: the provider cannot run it; see ``linexport.load``.
    """
    watch, execution = Stopwatch(progress or Silent()), Execution(provider, strict)
    checked = checked_artifact(Path(artifact), trust)
    tested = reopen(checked, source, threads, trust_remote_code, watch, execution)
    found = check_again(checked, tested, seed, threads, data, watch)
    if record:
        write_outcome(checked, found)
    return found


def check_again(
    checked: CheckedArtifact,
    tested: parity.ModelUnderTest,
    seed: int,
    threads: int,
    data: str | Path | None,
    watch: Stopwatch,
) -> Manifest:
    """Check an artifact that is open, and write nothing; see ``validate``."""
    manifest, folder = checked.manifest, checked.folder
    memory_map_weights(tested.loaded)
    # First of all: what a provider does not run need not be compared.
    manifest = replace(manifest, placement=placement_of(tested))
    if manifest.quantisation is not None:
        return _validate_quantised(checked, manifest, tested, data, threads, seed, watch)
    if data is not None:
        raise UsageError(
            "--data is text that a quantised artifact is compared on; this one is not."
        )
    say_comparison(watch.shown, tested)
    with watch.stage("parity"):
        manifest, failed = with_parity(manifest, tested, seed)
        if failed is not None:
            manifest = with_divergence(manifest, tested, None, folder / MODEL, failed)
        manifest = _with_library(manifest, tested, folder, threads, seed)
    with watch.stage("streaming"):
        # Without states nothing streams: the reason recorded at conversion stands.
        if tested.states:
            streaming = check_streams(tested, manifest.token_flow, seed)
            manifest = replace(manifest, streaming=streaming)
    if manifest.mtp is not None:
        with watch.stage("mtp"):
            manifest = _with_predictor_checked(manifest, tested, folder, threads, seed)
    if manifest.engines:
        with watch.stage("engines"):
            manifest = with_engines_checked(manifest, tested, folder, seed)
    return with_status(replace(manifest, seed=seed))


def _with_library(
    manifest: Manifest, tested: parity.ModelUnderTest, folder: Path, threads: int, seed: int
) -> Manifest:
    """Say whether parity was that of the CPU library, or compare one that was not trusted anew."""
    if manifest.trusts_library or tested.execution != CPU_ONLY:
        return with_library_proven(manifest, tested)
    opened = partial(
        targets.find_target(manifest.target).open,
        threads=threads,
        taking_turns=True,
        low_memory=True,
        native=True,
    )

    def changed(change: Change) -> targets.InferenceSession:
        return open_changed(folder / MODEL, change, opened)

    by_library = replace(tested, open=partial(opened, folder / MODEL), open_changed=changed)
    return with_library_checked(manifest, tested, by_library, seed)


def _with_predictor_checked(
    manifest: Manifest, tested: parity.ModelUnderTest, folder: Path, threads: int, seed: int
) -> Manifest:
    """Compare the head for multi-token prediction, opened as ``load`` does."""
    opened = partial(
        targets.find_target(manifest.target).open,
        threads=threads,
        taking_turns=True,
        low_memory=True,
        native=uses_library(manifest),
        execution=tested.execution,
    )

    def changed(change: Change) -> targets.InferenceSession:
        return open_changed(folder / MTP, change, opened)

    head = partial(opened, folder / MTP)
    return with_predictor_checked(manifest, tested, head, changed, seed)


def _validate_quantised(
    checked: CheckedArtifact,
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    data: str | Path | None,
    threads: int,
    seed: int,
    watch: Stopwatch,
) -> Manifest:
    """Compare with the original on text; parity and streaming stay those of the float32 graph.

    The head for multi-token prediction is in float32, and is compared as always.
    """
    folder = checked.folder
    with watch.stage("compare"):
        text = None if data is None else Path(data)
        manifest = with_quantisation_checked(manifest, tested, folder, text, threads, seed)
    if manifest.mtp is not None:
        with watch.stage("mtp"):
            manifest = _with_predictor_checked(manifest, tested, folder, threads, seed)
    return with_status(replace(manifest, seed=seed))


def bench(
    artifact: str | Path,
    *,
    source: object = None,
    lengths: Iterable[int] | None = None,
    workload: Workload | None = None,
    threads: int = 0,
    seed: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    provider: str = providers.CPU,
    strict: bool = False,
    trust: Trust | None = None,
) -> Manifest:
    """Measure an artifact and its baselines again, and write the outcome to its manifest.

    Arguments and errors are those of ``validate``; ``lengths`` are sequence lengths. With a
    ``workload`` its prefill and decode are measured, and nothing else. The baselines run on the
    CPU, whatever the provider of the artifact is.
    """
    watch, execution = Stopwatch(progress or Silent()), Execution(provider, strict)
    checked = checked_artifact(Path(artifact), trust)
    tested = reopen(checked, source, threads, trust_remote_code, watch, execution)
    chosen = None if lengths is None else tuple(lengths)
    how = Measuring(chosen, THOROUGH.on(threads), seed)
    return measure_again(checked, tested, how, watch, workload)


def measure_again(
    checked: CheckedArtifact,
    tested: parity.ModelUnderTest,
    how: Measuring,
    watch: Stopwatch,
    workload: Workload | None = None,
) -> Manifest:
    """Measure an artifact that is open, and write the outcome to its manifest; see ``bench``."""
    with watch.stage("measure"):
        if workload is None:
            manifest = with_measurements(checked.manifest, tested, checked.folder, how)
        else:
            manifest = with_throughput(checked.manifest, tested, checked.folder, workload, how)
    write_outcome(checked, manifest)
    return manifest


def write_outcome(checked: CheckedArtifact, manifest: Manifest) -> None:
    """Write the reports; a signature that was there does not hold for other ones."""
    folder = checked.folder
    checked.check_unchanged()
    before = _reports(folder)
    write_reports(folder, manifest)
    if (folder / SIGNATURE).exists() and _reports(folder) != before:
        log.warning(
            "%s no longer holds: manifest.json and report.html were written anew. Check them and "
            "sign the artifact again: linexport sign %s --key PRIVATE_KEY.",
            folder / SIGNATURE,
            folder,
        )


def _reports(folder: Path) -> list[bytes]:
    paths = (folder / manifests.MANIFEST, folder / manifests.REPORT)
    return [path.read_bytes() if path.exists() else b"" for path in paths]


def reopen(
    checked: CheckedArtifact,
    source: object,
    threads: int,
    trust_remote_code: bool,
    watch: Stopwatch,
    execution: Execution = CPU_ONLY,
) -> parity.ModelUnderTest:
    """Open an artifact, also one that failed a check, with its original.

    Arguments and errors are those of ``validate``; ``watch`` is shown the stage, and ``execution``
    is the provider.
    """
    manifest, folder = checked.manifest, checked.folder
    with watch.stage("load"):
        loaded = _original(manifest, source, trust_remote_code)
        target = targets.find_target(manifest.target)
        execution.check_target(target.name, target.deploy is not None)

    def open_session(model: Path = folder / MODEL) -> targets.InferenceSession:
        return target.open(
            model,
            threads=threads,
            taking_turns=True,
            low_memory=True,
            native=uses_library(manifest),
            execution=execution,
            # Weights in fewer bits were compared by the kernels that compute them.
            settings=AS_SPECIFIED if manifest.quantisation is None else None,
        )

    def open_tower() -> targets.InferenceSession:
        return target.open(folder / VISION, threads=threads, taking_turns=True, execution=execution)

    def changed(change: Change) -> targets.InferenceSession:
        return open_changed(folder / MODEL, change, open_session)

    tested = model_under_test(manifest, loaded, open_session, None, open_tower, changed)
    return replace(tested, execution=execution)


def _original(manifest: Manifest, source: object, trust_remote_code: bool) -> LoadedModel:
    recorded, options = manifest.source, manifest.options
    if source is None and recorded.kind == "object":
        raise UsageError(
            f"The original was an object in memory, a {recorded.location}. Give it: source=(module,"
            " args) in Python; on the command line --source package.module:callable, a function "
            "that returns (module, args)."
        )
    if source is None and (recorded.kind == "factory" or is_factory(recorded.location)):
        raise UsageError(
            f"The manifest names the function {recorded.location} as the original. An artifact is "
            "data: nothing it names is called. If you know the function and trust it, name it "
            f"yourself: --source {shlex.quote(recorded.location)}."
        )
    own = isinstance(source, str) and is_factory(source)
    loaded = load_model(
        recorded.location if source is None else source,
        seed=options.seed,
        trust_remote_code=trust_remote_code,
        **(
            options.loading
            if source in (None, recorded.location)
            else {"pooling": options.pooling, "stand_ins": options.stand_ins and own}
        ),
        vision=manifest.vision is not None,
        mtp=manifest.mtp is not None,
    )
    if source is None and loaded.source.kind != recorded.kind:
        raise UsageError(
            f"{recorded.location} is of the kind {loaded.source.kind}; the manifest says "
            f"{recorded.kind}. Pass --source."
        )
    weights = loaded.source.weights_sha256
    if None not in (weights, recorded.weights_sha256) and weights != recorded.weights_sha256:
        raise UsageError(
            f"{loaded.source.location} gives other weights than the artifact was made from: their "
            f"SHA-256 is {weights}; the manifest says {recorded.weights_sha256}. Give the original "
            "as --source, with the weights it had: a factory that draws them has to seed them."
        )
    if loaded.source.sha256 != recorded.sha256:
        raise UsageError(
            f"{loaded.source.location} is not the model the artifact was made from: its SHA-256 is "
            f"{loaded.source.sha256}; the manifest says {recorded.sha256}. Pass --source."
        )
    return loaded
