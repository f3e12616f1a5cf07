"""The stages of one conversion: source -> checked and measured files in a folder.

    load -> trace -> rewrite -> lower -> write -> streaming -> parity -> library -> engines
         -> timing

Each stage takes what the one before returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from linexport import parity, targets, trace
from linexport.artifact.temporary import open_written
from linexport.artifact.text.language_interface import logits_of
from linexport.conversion import axis_roles
from linexport.conversion.add_records import (
    Measuring,
    with_divergence,
    with_engines_checked,
    with_library_checked,
    with_measurements,
    with_parity,
    with_status,
    with_warnings,
)
from linexport.conversion.bisect_matches import blamed
from linexport.conversion.context import Job, TracedOriginal, load_original
from linexport.conversion.engines import with_built, with_prepared
from linexport.conversion.expected_time import say_comparison, say_measurement
from linexport.conversion.kernels_by_default import with_kernels_compared
from linexport.conversion.model_under_test import model_under_test
from linexport.conversion.predictor import with_predictor_checked, write_predictor
from linexport.conversion.shared_weights import share_weights
from linexport.conversion.slower import with_work_counted
from linexport.conversion.streaming import check_streams, mixing
from linexport.conversion.vision import write_tower
from linexport.conversion.write_model import written
from linexport.errors import UsageError
from linexport.graph import dims as dimensions
from linexport.graph import external_data
from linexport.manifest import Manifest
from linexport.manifest.file_names import MTP, MTP_DATA
from linexport.manifest.proof import StreamingRecord
from linexport.manifest.records import BUFFER, StageRecord
from linexport.parity.cases import Case
from linexport.parity.tolerances import coarsest_inside
from linexport.sources import LoadedModel
from linexport.targets.base import uses_library
from linexport.targets.lowering.choice import PORTABLE
from linexport.targets.lowering.packed_batches import refused
from linexport.timing.latency import EXTENTS

NOT_AS_A_WHOLE = "each layer was proven in turn, and the float32 model not run as a whole"


@dataclass(frozen=True)
class _Checked:
    """A model that was compared with its original.

    Attributes:
        manifest: with the records of parity and streaming.
        tested: what to check it by.
        matches: names of the values that matches compute.
        lengths: dynamic sizes of what its ops take for tokens.
        failed: first case in which it differs from the original.
        runs: sequences that its functions were given whole; None where they were not.
    """

    manifest: Manifest
    tested: parity.ModelUnderTest
    matches: Sequence[str]
    lengths: frozenset[str]
    failed: Case | None = None
    runs: parity.WholeRuns | None = None

    @property
    def passed(self) -> bool:
        """Equality with the original."""
        return _passed(self.manifest)


def run(job: Job) -> Manifest:
    """Write everything to the job's folder except its reports; return the manifest."""
    original = _trace(job, _load(job))
    tower, head = write_tower(job, original.loaded), write_predictor(job, original.loaded)
    original = replace(original, vision=tower, mtp=head)
    found = _proven(job, original)
    turned = axis_roles.corrected(original, found.manifest.states, found.lengths, job.ranges)
    if turned is not None:  # what was called the batch has the tokens: lengths were tried on rows
        original = replace(turned, dims=job.target.bound(turned.dims))
        found = _proven(job, original)
    manifest, tested = found.manifest, found.tested
    if found.failed is not None:
        with job.watch.stage("parity"):
            manifest = with_divergence(manifest, tested, original.traced, job.model, found.failed)
    if _passed(manifest) and not job.checks.by_layers:
        with job.watch.stage("library"):
            by_library, seed = _by_library(job, tested), job.options.seed
            manifest = with_library_checked(manifest, tested, by_library, seed, found.runs)
    if _passed(manifest) and _runs_here(job):
        manifest = with_kernels_compared(manifest, tested, job.model)
    if _passed(manifest) and _runs_here(job) and not job.options.measures:
        with job.watch.stage("work"):
            given = manifest, tested, original.traced, job.model, job.options.seed
            manifest = with_work_counted(*given)
    if manifest.mtp is not None:
        with job.watch.stage("mtp"):
            kept = {n: r for n, r in manifest.files.items() if n not in (MTP, MTP_DATA)}
            manifest = replace(manifest, files={**kept, **share_weights(job.folder)})
            manifest = _with_predictor_checked(job, manifest, tested)
    if job.target.assemble and job.checks.builds:
        with job.watch.stage("prepare"):
            model = _converted(job, original.dims, manifest)
            manifest = with_prepared(manifest, job.folder, job.target.assemble, model)
    if job.target.build and job.checks.builds:
        with job.watch.stage("build"):
            model = _converted(job, original.dims, manifest)
            manifest = with_built(manifest, job.folder, job.target.build, model)
            manifest = with_engines_checked(manifest, tested, job.folder, job.options.seed)
    if job.options.measures:
        plan = EXTENTS[job.options.extent].on(job.options.threads)
        named = len(job.options.lengths or ())
        say_measurement(job.watch.shown, tested, plan, named, job.watch.seconds("trace"))
        with job.watch.stage("measure"):
            program = original.traced.program
            how = Measuring(job.options.lengths, plan, job.options.seed, program)
            manifest = with_measurements(manifest, tested, job.folder, how)
    stages = tuple(StageRecord(**stage) for stage in job.watch.stages)
    return with_status(replace(manifest, stages=stages))


def _runs_here(job: Job) -> bool:
    """Return whether the artifact is one that the CPU runs, and was compared as a whole."""
    return job.target.name == targets.DEFAULT and not job.checks.by_layers


def _load(job: Job) -> LoadedModel:
    with job.watch.stage("load"):
        takes_images = job.target.build is None and not job.checks.by_layers
        takes_head = job.target.deploy is None and not job.checks.by_layers
        return load_original(job.source, job.options, takes_images, takes_head)


def _trace(job: Job, loaded: LoadedModel) -> TracedOriginal:
    with job.watch.stage("trace"):
        loaded, traced = trace.trace_or_whole(loaded)
        builds = job.target.build or job.target.assemble
        if dimensions.PAST in {*job.ranges} - {*traced.dims} and not builds:
            raise UsageError(
                f"--dim past is of targets that build engines: {job.target.name} takes any past. "
                "Leave it out."
            )
        if job.target.options.packed and any(s.op == BUFFER for s in traced.states):
            raise refused("its states are buffers, which are of a call and not of its sequences")
        ranges = {**loaded.ranges, **job.ranges}
        dims = job.target.bound(dimensions.merge(traced.dims, ranges))
        return TracedOriginal(loaded, traced, dims)


def _proven(job: Job, original: TracedOriginal) -> _Checked:
    """The model that equals its original: without the matches to blame, where it would not."""
    whole = _checked(job, original, {})
    if whole.passed or not whole.matches:
        return whole
    assert whole.manifest.parity is not None
    job = replace(job, dump=None)  # what follows are trials of the same passes
    error = whole.manifest.parity.max_relative_error

    def passes(left_out: frozenset[str]) -> bool:
        return _checked(job, original, dict.fromkeys(left_out, "")).passed

    reason = (
        f"withdrawn: with it the artifact differs from the original by {error:.1e}, and without it "
        "the two are equal"
    )
    found = blamed(whole.matches, passes)
    portable = _by_standard_operators(job, original, whole.manifest, found)
    if portable is not None:
        return portable
    rest = _checked(job, original, dict.fromkeys(found, reason))
    said = [f"{where} was {reason}." for where in sorted(found)]
    return replace(rest, manifest=with_warnings(rest.manifest, said))


def _by_standard_operators(
    job: Job, original: TracedOriginal, whole: Manifest, found: frozenset[str]
) -> _Checked | None:
    """The model with the portable lowerings of matches that are to blame, where that equals it.

    A kernel may add up in an order that loses more than the original: then the match is right.
    """
    assert whole.parity is not None
    error = whole.parity.max_relative_error
    chosen = {
        record.node: record.lowering
        for record in whole.lowerings
        if record.lowering != PORTABLE and record.node.rpartition("/")[0] in found
    }
    if not chosen:
        return None
    reasons = {
        node: f"lowered as {name} the artifact differs from the original by {error:.1e}, and by "
        "standard operators the two are equal"
        for node, name in chosen.items()
    }
    trial = _checked(replace(job, portable=reasons), original, {})
    if not trial.passed:
        return None
    said = [f"{node}: {reason}." for node, reason in sorted(reasons.items())]
    return replace(trial, manifest=with_warnings(trial.manifest, said))


def _passed(manifest: Manifest) -> bool:
    return manifest.parity is not None and manifest.parity.passed


def _checked(job: Job, original: TracedOriginal, withdrawn: Mapping[str, str]) -> _Checked:
    """The model without some matches, compared."""
    if job.checks.by_layers:
        return _by_layers(job, original, withdrawn)
    found = _stream(job, original, withdrawn)
    if not withdrawn and not job.portable:  # the others are trials
        say_comparison(job.watch.shown, found.tested)
    with job.watch.stage("parity"):
        manifest, failed = with_parity(found.manifest, found.tested, job.options.seed)
    return replace(found, manifest=manifest, failed=failed)


def _by_layers(job: Job, original: TracedOriginal, withdrawn: Mapping[str, str]) -> _Checked:
    """The model with each of its layers compared, and with streams of them."""
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
    streaming = mixing(model.manifest.token_flow) or streaming
    manifest = replace(model.manifest, parity=outcome.record(), streaming=streaming)
    manifest = replace(manifest, library=parity.not_run("functions", NOT_AS_A_WHOLE))
    manifest = with_warnings(manifest, outcome.notes)
    return _Checked(manifest, tested, model.matches, model.lengths)


def _stream(job: Job, original: TracedOriginal, withdrawn: Mapping[str, str]) -> _Checked:
    """The model with states where it streams, else without; its parity is not known yet."""
    model = written(job, original, with_state=True, withdrawn=withdrawn)
    tested, flow = _tested(job, model.manifest, original), model.manifest.token_flow
    runs = parity.WholeRuns()
    with job.watch.stage("streaming"):
        streaming = check_streams(tested, flow, job.options.seed, runs)
    if streaming.passed is False and job.target.options.packed:
        raise refused(f"it does not stream: {streaming.reason}")
    # A model's own states are inputs and outputs: they cannot be left out.
    if streaming.passed is False and not original.owns_states:
        streaming = StreamingRecord(None, f"exported without state: {streaming.reason}")
        model = written(job, original, with_state=False, withdrawn=withdrawn)
        tested = _tested(job, model.manifest, original)
    manifest = replace(model.manifest, streaming=streaming, token_flow=flow)
    return _Checked(manifest, tested, model.matches, model.lengths, runs=runs)


def _tested(job: Job, manifest: Manifest, original: TracedOriginal) -> parity.ModelUnderTest:
    inside = coarsest_inside(original.traced.graph.graph)
    tested = model_under_test(
        manifest, original.loaded, job.open, inside, job.open_tower, job.open_changed
    )
    return job.checks.applied(tested)


def _with_predictor_checked(
    job: Job, manifest: Manifest, tested: parity.ModelUnderTest
) -> Manifest:
    """Compare the head for multi-token prediction, run as it will be."""
    native = uses_library(manifest)
    opened = partial(job.open_predictor, native)
    changed = partial(job.open_changed_predictor, native=native)
    return with_predictor_checked(manifest, tested, opened, changed, job.options.seed)


def _by_library(job: Job, tested: parity.ModelUnderTest) -> parity.ModelUnderTest:
    opened, changed = partial(job.open, native=True), partial(job.open_changed, native=True)
    return replace(tested, open=opened, open_changed=changed)


def _converted(
    job: Job, dims: Mapping[str, dimensions.DimRange], manifest: Manifest
) -> targets.Converted:
    tensors = manifest.inputs, manifest.outputs, manifest.states
    past = None if dimensions.PAST in dims else job.ranges.get(dimensions.PAST)
    if past is not None and not any(state.grows is not None for state in manifest.states):
        held = ", ".join(state.past for state in manifest.states) or "none"
        raise UsageError(
            "--dim past is of keys and values, and no state of this model grows with the tokens; "
            f"found {held}. Leave it out."
        )
    return targets.Converted(job.model, dims, *tensors, past, logits_of(manifest))
