"""traced model -> ``model.onnx`` in a folder, and the manifest of it, nothing proven yet."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx

import linexport
from linexport import passes, targets, trace
from linexport.artifact import write
from linexport.conversion.context import Job, TracedOriginal
from linexport.conversion.streaming import states_of, token_flow_of
from linexport.errors import BuildError, StoppedAfterPass, UsageError
from linexport.graph import sequence_axis
from linexport.graph.dims import DimRange
from linexport.graph.external_data import externals_as_inputs, with_weights
from linexport.graph.interface import input_records, tensor_records
from linexport.graph.walk import count_nodes
from linexport.manifest import FORMAT, MODEL, Manifest, describe_files
from linexport.manifest.records import DimRecord, PackedRecord, SourceRecord
from linexport.manifest.rewriting import LoweringRecord, NodesRecord, RejectionRecord, TunedRecord
from linexport.match.proof.sampling import within
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.op import DOMAIN
from linexport.system import environment
from linexport.targets.lowering.choice import Choice, lower
from linexport.targets.lowering.cuda_norms import known_to_onnx
from linexport.targets.lowering.inlined import inlined
from linexport.targets.lowering.packed_batches import ENDS

TUNE_LENGTH = 1024


@dataclass(frozen=True)
class Written:
    """A model that was written.

    Attributes:
        manifest: of it.
        lengths: dynamic sizes of what its ops take for tokens.
        matches: names of the values that fused attentions compute.
    """

    manifest: Manifest
    lengths: frozenset[str]
    matches: Sequence[str]


def written(
    job: Job, original: TracedOriginal, with_state: bool, withdrawn: Mapping[str, str]
) -> Written:
    """Rewrite, lower and write a model.

    Args:
        job: says where to.
        original: what is rewritten.
        with_state: whether to expose the states of causal ops.
        withdrawn: attentions to leave as they are, with the reason.
    """
    target, traced, stage = job.target, original.traced, job.watch.stage
    with stage("rewrite"):
        own = original.owns_states  # they are in the graph as it is
        chosen = passes.STAGES if with_state and not own else passes.STATELESS
        rewritten = _rewritten(job, traced, chosen, withdrawn)
        lengths = sequence_axis.op_lengths(rewritten.model)
        model, weights = rewritten.model, rewritten.weights
        if target.prepare is not targets.unchanged:  # it may change the weights, too
            model, weights = target.prepare(with_weights(model, weights)), {}
    with stage("lower"):
        runner = _runner(target, job.options.threads) if job.options.tune else None
        sizes = _tune_sizes(original.dims)
        lowered, choices = lower(model, target.candidates, runner, sizes, job.portable)
    with stage("write"):
        flat = inlined(lowered) if job.options.inline else target.written(lowered)
        write.save_model(flat, job.folder, weights)
        _check(flat)
        write.copy_files(original.loaded.files, job.folder)
        manifest = _manifest(job, original, lowered, rewritten, choices)
        rows = lowered if target.options.packed else flat
        manifest = replace(
            manifest,
            token_flow=token_flow_of(original, rewritten.portable),
            nodes=replace(manifest.nodes, artifact=count_nodes(flat.graph)),
            outputs=tensor_records(rows.graph.output),
            packed=_packed(flat.graph) if target.options.packed else None,
        )
    matches = tuple(m.where for m in rewritten.findings.matches)
    return Written(manifest, lengths, matches)


def _rewritten(
    job: Job, traced: trace.Traced, stages: Sequence[str], withdrawn: Mapping[str, str]
) -> passes.Rewritten:
    """The graph after the passes; ends the conversion where the user wants no more.

    Raises:
        StoppedAfterPass: after the pass that ``stop_after`` names.
    """
    stop, dump = job.options.stop_after, job.dump
    if dump is not None and "state" not in stages and dump.used:
        dump = dump.below("without_state")  # the model did not stream with its states
    with within(traced.bounds):
        rewritten = passes.rewrite(
            traced.graph,
            stages,
            traced.weights,
            dump=dump,
            stop_after=stop,
            withdrawn=withdrawn,
            target=job.target.name,
        )
    if stop is not None and dump is not None:
        ran = [record.name for record in rewritten.records]
        if stop not in ran:
            raise UsageError(
                f"The pass {stop!r} does not run for this model, which carries states of its own. "
                f"Passes that ran: {', '.join(ran)}; their graphs are in {dump.folder}."
            )
        raise StoppedAfterPass(
            f"Stopped after the pass {stop}, as --stop-after asks; no artifact was made. The graph "
            f"is {dump.folder / passes.RESULT}, and the folder has the difference of each pass."
        )
    return rewritten


def _check(model: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(known_to_onnx(externals_as_inputs(model)))
    except onnx.checker.ValidationError as error:
        raise BuildError(f"The rewritten graph is not valid ONNX: {error}") from error


def _runner(target: targets.Target, threads: int) -> Callable[[onnx.ModelProto], Any]:
    return lambda model: (
        target.open(model.SerializeToString(), threads=threads, taking_turns=True).run
    )


def _tune_sizes(dims: Mapping[str, DimRange]) -> dict[str, int]:
    return {
        name: limits.nearest(1 if limits.batch else limits.opt or TUNE_LENGTH)
        for name, limits in dims.items()
    }


def _manifest(
    job: Job,
    original: TracedOriginal,
    model: onnx.ModelProto,
    rewritten: passes.Rewritten,
    choices: Sequence[Choice],
) -> Manifest:
    loaded, traced, findings = original.loaded, original.traced, rewritten.findings
    graph, files = model.graph, describe_files(job.folder)
    fused, inputs = _fused(graph), input_records(model.graph.input, loaded.defaults)
    dtypes = {i.name: i.dtype for i in inputs}  # a target may hold states in half precision
    states = (s.record() for s in states_of(original, model))
    return Manifest(
        format=FORMAT,
        linexport=linexport.__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        status="ok",
        artifact="",
        target=job.target.name,
        precision=job.target.options.precision,
        options=job.options,
        source=SourceRecord(**vars(loaded.source)),
        warnings=(
            *loaded.warnings,
            *_buffer_warnings(original),
            *_length_warnings(original),
            *_warnings(fused),
        ),
        kernels=loaded.kernels,
        inputs=inputs,
        outputs=tensor_records(graph.output),
        states=tuple(replace(s, dtype=dtypes[s.past]) for s in states),
        dims={
            name: DimRecord(**vars(limits), traced=traced.example_sizes[name])
            for name, limits in original.dims.items()
        },
        fused=fused,
        rejected=(
            *(
                RejectionRecord(r.where, r.reason, (), traced.line(r.where))
                for r in findings.rejected
            ),
            *(
                RejectionRecord(m.where, m.reason, m.nodes, traced.line(m.where, *m.nodes))
                for m in findings.unmatched
            ),
        ),
        lowerings=tuple(_lowering(choice) for choice in choices),
        engines=(),
        nodes=NodesRecord(count_nodes(traced.graph.graph), count_nodes(graph)),
        files=files,
        model_sha256=files[MODEL].sha256 or "",
        parity=None,
        streaming=None,
        latency=None,
        decode=None,
        memory=None,
        measurement=None,
        environment=environment.describe(),
        seed=job.options.seed,
        passes=rewritten.records,
        matches=findings.matches,
        head=loaded.language.head if loaded.language else None,
        vision=original.vision,
        mtp=original.mtp,
    )


def _packed(graph: onnx.GraphProto) -> PackedRecord:
    return PackedRecord(ENDS, tensor_records(graph.input), tensor_records(graph.output))


def _lowering(choice: Choice) -> LoweringRecord:
    tuned = None if choice.tuned is None else tuple(TunedRecord(**t) for t in choice.tuned)
    return LoweringRecord(choice.node, choice.op, choice.lowering, choice.reason, tuned)


def _buffer_warnings(original: TracedOriginal) -> list[str]:
    """Return what to say of buffers that the model writes."""
    carried = original.loaded.carried
    if carried is None:
        return []
    names = ", ".join(buffer.title for buffer in carried.buffers)
    if not original.traced.states:
        return [f"Forward writes {names}, which no output depends on: the artifact leaves it out."]
    shared = ", ".join(buffer.title for buffer in carried.buffers if not buffer.batched)
    together = f" All rows of a batch share {shared}." if shared else ""
    return [
        f"States are the buffers that forward writes: {names}. A stream is the calls of the model "
        "one after another, each with what the one before wrote; cut into other calls, a sequence "
        f"may give other outputs, as with the original.{together}"
    ]


def _length_warnings(original: TracedOriginal) -> list[str]:
    """Return warnings of sizes that the model's code limits, besides those the user chose."""
    loaded, traced = original.loaded, original.traced
    if loaded.program is not None or loaded.graph is not None or loaded.decode_module is not None:
        return []
    chosen = {name for name in traced.dims if original.dims[name] != traced.dims[name]}
    free = {name: limits for name, limits in traced.dims.items() if name not in chosen}
    return trace.length_warnings(loaded.dynamic_shapes, free, traced.example_sizes)


def _warnings(fused: Mapping[str, int]) -> list[str]:
    if fused:
        return []
    return [
        "No linear attention was fused. What was withdrawn, or nearly found, is listed as "
        "refused, with the reason."
    ]


def _fused(graph: onnx.GraphProto) -> dict[str, int]:
    """How often each op occurs; feature maps that an attention applies itself count, too."""
    count: Counter[str] = Counter()
    for node in graph.node:
        if node.domain == DOMAIN:
            count[node.op_type] += 1
            if any(a.name == "feature_map" and a.s for a in node.attribute):
                count[feature_map.OP.name] += len(feature_map.SIDES)
    return dict(count)
