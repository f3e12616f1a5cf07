"""Manifest -> manifest with one more record: what is proven and what is measured of its model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from linexport import parity, targets, trace
from linexport.conversion.slower import with_slowness_measured
from linexport.errors import EnvironmentProblemError
from linexport.graph import dims
from linexport.manifest import MODEL, Manifest
from linexport.manifest.engines import EngineLatencyRow, EngineRecord
from linexport.manifest.measured import LatencyRow
from linexport.manifest.placement import PlacementRecord
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.reference.module import feeds
from linexport.targets.base import fits_library, uses_library
from linexport.targets.runtime.providers import CPU_ONLY
from linexport.timing.baselines import Bench
from linexport.timing.latency import FULL, BenchPlan
from linexport.timing.throughput import Workload, throughput

MEMORY_LENGTHS = (1024, 4096)

NOT_USED = "The CPU library is not used for this artifact, whose functions are right and slower:"
"""Beginning of the warning of a library that differs."""


@dataclass(frozen=True)
class Measuring:
    """How and where ``with_measurements`` measures.

    Attributes:
        lengths: sequence lengths; None for the usual ones.
        extent: of the measurement.
        seed: of the inputs.
        program: the original as it was exported, where that was done already.
    """

    lengths: tuple[int, ...] | None
    extent: BenchPlan
    seed: int
    program: torch.export.ExportedProgram | None = None


def with_warnings(manifest: Manifest, added: Iterable[str]) -> Manifest:
    """The manifest with further warnings, each said once."""
    return replace(manifest, warnings=tuple(dict.fromkeys([*manifest.warnings, *added])))


def with_status(manifest: Manifest) -> Manifest:
    """The manifest with the status that its parity, streaming, engines and weights give it."""
    differs = (
        (manifest.parity is not None and not manifest.parity.passed)
        or (manifest.streaming is not None and manifest.streaming.passed is False)
        or any(engine.checked is False for engine in manifest.engines)
        or (manifest.mtp is not None and not manifest.mtp.passed)
    )
    if differs:
        return replace(manifest, status="parity_failed")
    lost = manifest.quantisation is not None and not manifest.quantisation.passed
    return replace(manifest, status="quantisation_failed" if lost else "ok")


def with_parity(
    manifest: Manifest, tested: parity.ModelUnderTest, seed: int
) -> tuple[Manifest, Case | None]:
    """Compare with the original; also returns the first case of a whole sequence that failed."""
    language = tested.loaded.language
    outcome = parity.check_language(tested, seed) if language else parity.check(tested, seed)
    manifest = replace(manifest, parity=outcome.record())
    return with_warnings(manifest, outcome.notes), outcome.failed


def with_divergence(
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    traced: trace.Traced | None,
    path: Path,
    failed: Case,
) -> Manifest:
    """Trace the failure of a case to the first value that differs."""
    assert manifest.parity is not None
    first = parity.first_layer if tested.loaded.language else parity.first_divergence
    opened = partial(targets.find_target(manifest.target).open, execution=tested.execution)
    found = first(tested, traced or trace.trace(tested.loaded), path, opened, failed)
    return replace(manifest, parity=replace(manifest.parity, first_divergence=found))


def placement_of(tested: parity.ModelUnderTest) -> PlacementRecord | None:
    """Open the model and return what its provider runs; None for the CPU, which needs no look.

    Called before what takes long: a provider that cannot run the model is an error at once.

    Raises:
        EnvironmentProblemError: the provider cannot run it; see ``targets.runtime.providers``.
    """
    if tested.execution == CPU_ONLY:
        return None
    session: Any = tested.open()
    found: PlacementRecord = session.placement
    return found


def with_library_checked(
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    with_library: parity.ModelUnderTest,
    seed: int,
    runs: parity.WholeRuns | None = None,
) -> Manifest:
    """Compare the CPU library with the functions that parity was of, where there is an op to run.

    A library that differs fails nothing: the artifact runs by its functions then. What sequences
    give whole by functions is not computed again where streaming kept it.
    """
    if not fits_library(manifest):
        return manifest
    found = parity.check_library(tested, with_library, manifest.parity, seed, runs)
    before = tuple(w for w in manifest.warnings if not w.startswith(NOT_USED))
    manifest = replace(manifest, library=found, warnings=before)
    if found.passed is not False:
        return manifest
    return with_warnings(manifest, [f"{NOT_USED} {found.reason}."])


def with_library_proven(manifest: Manifest, tested: parity.ModelUnderTest) -> Manifest:
    """Say whether parity is that of the library, which may have opened what was tested.

    The recorded result is kept where the library is not built, or switched off.
    """
    computed = fits_library(manifest) and tested.execution == CPU_ONLY
    if not computed or manifest.parity is None:
        return manifest
    found = parity.proven(manifest.parity, tested.open())
    known = found.passed is None and manifest.library is not None and manifest.library.passed
    return manifest if known else replace(manifest, library=found)


def with_engines_checked(
    manifest: Manifest, tested: parity.ModelUnderTest, folder: Path, seed: int
) -> Manifest:
    """Compare each engine with the original where it can be run, else say why it was not."""
    if not manifest.engines:
        return manifest
    session, problem = _deploy(manifest, folder)
    checked = []
    for engine in manifest.engines:
        if session is None:
            checked.append(replace(engine, checked=None, reason=problem))
        elif engine.file != session.record.file:
            checked.append(replace(engine, checked=None, reason="it is for another GPU"))
        else:
            checked.append(_checked(engine, session, tested, seed))
    return replace(manifest, engines=tuple(checked))


def _checked(
    engine: EngineRecord, session: Any, tested: parity.ModelUnderTest, seed: int
) -> EngineRecord:
    deployed = replace(tested, open=lambda: session, open_changed=None)
    outcome = parity.check(deployed, seed)
    streaming = parity.check_streaming(deployed, seed)
    aliased = parity.check_in_place(deployed, session, seed) if tested.states else None
    problems = [
        *([] if outcome.passed else [_where(outcome)]),
        *([streaming.reason] if streaming.passed is False and streaming.reason else []),
        *([aliased] if aliased else []),
    ]
    return replace(
        engine,
        checked=not problems,
        reason="; ".join(problems) or None,
        max_relative_error=outcome.record().max_relative_error,
    )


def _where(outcome: parity.Parity) -> str:
    sizes = outcome.failed.at if outcome.failed else "any size"
    return f"its outputs differ from the original's at {sizes}"


def _deploy(manifest: Manifest, folder: Path) -> tuple[Any, str | None]:
    """The engine opened here, or None and the reason it cannot be."""
    deploy = targets.find_target(manifest.target).deploy
    assert deploy is not None
    try:
        return deploy(folder, manifest), None
    except EnvironmentProblemError as error:
        return None, str(error)


def with_engines_timed(
    manifest: Manifest, tested: parity.ModelUnderTest, folder: Path, seed: int
) -> Manifest:
    """Time the engine that runs here at several lengths, one token included."""
    session, problem = _deploy(manifest, folder)
    if session is None:
        return with_warnings(
            manifest,
            [
                "Latency and memory are those of the ONNX model in ONNX Runtime; no engine was "
                f"timed. {problem}"
            ],
        )
    rows = _engine_latency(session, tested, seed)
    engines = (
        replace(e, latency=rows) if e.file == session.record.file else e for e in manifest.engines
    )
    return replace(manifest, engines=tuple(engines))


def _engine_latency(
    session: Any, tested: parity.ModelUnderTest, seed: int
) -> tuple[EngineLatencyRow, ...]:
    length = dims.sequence(tested.dims)
    allowed = [n for n in (1, *FULL.lengths) if length and tested.dims[length].allows(n)]
    rows = []
    for size in allowed or [1]:
        sizes = {n: limits.nearest(1) for n, limits in tested.dims.items()}
        if length:
            sizes[length] = size
        inputs = draw_inputs(tested.loaded, tested.input_shapes, Case("timing", sizes, seed))
        state = tested.initial_state(tested.batch(sizes))
        fed = {**feeds(inputs, tested.input_names), **state}
        rows.append(EngineLatencyRow(length=size, **session.time(fed)))
    return tuple(rows)


def with_measurements(
    manifest: Manifest, tested: parity.ModelUnderTest, folder: Path, how: Measuring
) -> Manifest:
    """Measure latency, the decode step and peak memory, and the engine that runs here."""
    placement = placement_of(tested)
    with tempfile.TemporaryDirectory() as work:
        runner = _bench(manifest, tested, folder, Path(work), how)
        runner.export_plainly(how.program)
        rows = runner.latency(how.lengths)
        decode = runner.decode()
        memory = runner.memory(_memory_lengths(rows)) if how.extent.memory else None
    nodes = manifest.nodes
    if runner.plain_nodes is not None:
        nodes = replace(nodes, exported=runner.plain_nodes)
    manifest = replace(
        manifest,
        latency=tuple(rows),
        decode=decode,
        memory=None if memory is None else tuple(memory),
        nodes=nodes,
        measurement=replace(how.extent.record(), placement=placement),
    )
    manifest = with_slowness_measured(with_warnings(manifest, runner.notes))
    return with_engines_timed(manifest, tested, folder, how.seed) if manifest.engines else manifest


def _memory_lengths(rows: Iterable[LatencyRow]) -> tuple[int, ...]:
    """Return lengths to measure memory at: the usual ones that were timed, else the longest."""
    measured = {row.length for row in rows}
    return tuple(n for n in MEMORY_LENGTHS if n in measured) or (max(measured),)


def with_throughput(
    manifest: Manifest, tested: parity.ModelUnderTest, folder: Path, work: Workload, how: Measuring
) -> Manifest:
    """Measure prefill and decode of the artifact and its baselines."""
    placement_of(tested)
    with tempfile.TemporaryDirectory() as scratch:
        runner = _bench(manifest, tested, folder, Path(scratch), how)
        runner.export_plainly()
        rows = tuple(throughput(runner, work))
    return replace(manifest, throughput=rows)


def _bench(
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    folder: Path,
    scratch: Path,
    how: Measuring,
) -> Bench:
    native = uses_library(manifest)
    return Bench(
        *(tested, folder / MODEL, manifest.target, native, scratch, how.extent, how.seed),
        loading=manifest.options.loading,
    )
