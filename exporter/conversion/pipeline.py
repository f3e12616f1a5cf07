"""The whole way: source -> checked and measured artifact.

    load -> trace -> passes -> lower -> write -> parity -> streaming -> timing -> report

Everything is written to a temporary folder that takes the place of the output at the very end.
"""

from __future__ import annotations

import datetime
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

import linexport
from linexport import parity, passes, targets, trace
from linexport.artifact import manifest as manifests
from linexport.artifact import write
from linexport.conversion.model_under_test import subject_of, tensors
from linexport.conversion.records import (
    Manifest,
    check_engines,
    check_parity,
    measure,
    write_reports,
)
from linexport.errors import BuildError, EnvironmentProblemError
from linexport.graph import dims as dimensions
from linexport.graph import sequence_axis, states
from linexport.graph.external_data import attached, outline
from linexport.loaders import load_model
from linexport.loaders.memory_map import page
from linexport.plugins.ops.feature_map import SIDES
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import all_ops
from linexport.system import environment
from linexport.system.progress import Progress, Silent, Stopwatch
from linexport.targets.lowering import lower
from linexport.timing.latency import BRIEF

TUNE_LENGTH = 1024
NAMED = 3
"""Operations that mix tokens, in the reason why a model does not stream."""


@dataclass(frozen=True)
class Request:
    """What ``convert`` was asked for; see there."""

    source: str | Path
    output: Path
    target: str = targets.DEFAULT
    options: targets.Options = field(default_factory=targets.Options)
    dims: tuple[str, ...] = ()
    tune: bool = False
    bench: bool = True
    lengths: tuple[int, ...] | None = None
    threads: int = 0
    seed: int = 0
    overwrite: bool = False
    trust_remote_code: bool = False


def convert(
    source: str | Path,
    output: str | Path,
    *,
    target: str = targets.DEFAULT,
    precision: str = "fp32",
    sms: Iterable[int] = (),
    plugins: bool = True,
    quick: bool = False,
    timing_cache: str | Path | None = None,
    dims: Iterable[str] = (),
    tune: bool = False,
    bench: bool = True,
    lengths: Iterable[int] | None = None,
    threads: int = 0,
    seed: int = 0,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a model to an artifact folder and prove it equal to the original.

    Args:
        source: a linexport checkpoint, an exported program, a Hugging Face model folder, or
            ``package.module:callable``.
        output: the folder to make.
        target: name of a target, see ``linexport.targets``.
        precision: of weights and activations, for targets that build engines.
        sms: compute capabilities these build for, such as 89; empty: the target's choice.
        plugins: let these run linexport ops by plugins.
        quick: of these, let target ``tensorrt`` prefer plugins it runs without a library.
        timing_cache: file of kernels' times that builds of target ``tensorrt`` share.
        dims: ranges of dynamic dimensions, ``NAME=MIN:OPT:MAX``.
        tune: choose lowerings by measuring them here rather than by rule.
        bench: measure latency and memory.
        lengths: sequence lengths to measure at.
        threads: of every measured competitor, 0 for each one's own choice.
        seed: of all random inputs.
        overwrite: replace an artifact that is there, once the new one is complete.
        trust_remote_code: run Python code that a model folder brings along.
        progress: shown the stages.

    Returns:
        The manifest. Its ``status`` is "ok" or "parity_failed"; a failed artifact is kept, at
        ``output`` or, if that would replace an earlier artifact, at ``output`` plus ".failed".
        ``artifact`` says where.

    Raises:
        LinexportError: see its subclasses; nothing is left behind.
    """
    request = Request(
        source,
        Path(output),
        target,
        targets.Options(
            precision,
            tuple(sms),
            plugins,
            quick,
            None if timing_cache is None else Path(timing_cache),
        ),
        tuple(dims),
        tune,
        bench,
        None if lengths is None else tuple(lengths),
        threads,
        seed,
        overwrite,
        trust_remote_code,
    )
    chosen = _configured(request)
    ranges = dimensions.parse(request.dims)
    write.check_output(request.output, overwrite)
    failed = request.output.with_name(f"{request.output.name}.failed")
    if manifests.is_artifact(request.output):
        write.check_output(failed, overwrite=True)
    watch = Stopwatch(progress or Silent())
    with write.staged(request.output) as folder:
        manifest = _Conversion(request, chosen, ranges, folder, watch).run()
        place = request.output
        if manifest["status"] != "ok" and manifests.is_artifact(place):
            place = failed
        manifest["artifact"] = str(place)
        write_reports(folder, manifest)
        write.publish(folder, place)
    return manifest


def _configured(request: Request) -> targets.Target:
    """The target with its options; what it lacks here comes with the command for elsewhere."""
    target = targets.find(request.target)
    try:
        return target.configure(target, request.options)
    except EnvironmentProblemError as error:
        raise EnvironmentProblemError(
            f"{error}\nOn a machine that has what is missing, this makes the artifact: "
            f"{command(request)}"
        ) from None


def command(request: Request) -> str:
    """The command line of a request."""
    options, words = request.options, ["linexport", "convert", str(request.source)]
    words += ["--output", str(request.output), "--target", request.target]
    words += ["--precision", options.precision] if options.precision != "fp32" else []
    words += ["--sm", ",".join(map(str, options.sms))] if options.sms else []
    words += [] if options.plugins else ["--no-plugins"]
    words += ["--quick"] if options.quick else []
    words += ["--timing-cache", str(options.timing_cache)] if options.timing_cache else []
    words += [word for dim in request.dims for word in ("--dim", dim)]
    words += ["--seed", str(request.seed)] if request.seed else []
    words += ["--overwrite"] if request.overwrite else []
    return shlex.join(words)


class _Conversion:
    """One run of ``convert`` in a staged folder."""

    def __init__(
        self,
        request: Request,
        target: targets.Target,
        ranges: Mapping[str, dimensions.DimRange],
        folder: Path,
        watch: Stopwatch,
    ) -> None:
        self.request, self.target, self.ranges = request, target, ranges
        self.folder, self.watch = folder, watch

    def run(self) -> Manifest:
        stage = self.watch.stage
        with stage("load"):
            self.loaded = load_model(
                self.request.source,
                seed=self.request.seed,
                trust_remote_code=self.request.trust_remote_code,
            )
            page(self.loaded)
        with stage("trace"):
            self.traced = trace.trace(self.loaded)
            self.dims = self.target.bound(dimensions.merge(self.traced.dims, self.ranges))
        manifest = self._lower_and_check(with_state=True)
        if manifest["streaming"]["passed"] is False and self.loaded.stepwise is not None:
            # The model's own states are inputs and outputs: they cannot be left out.
            manifest["status"] = "parity_failed"
        elif manifest["streaming"]["passed"] is False:
            reason = f"exported without state: {manifest['streaming']['reason']}"
            if self.mixing:
                reason += f". What mixes tokens: {', '.join(self.mixing[:NAMED])}"
            manifest = self._lower_and_check(with_state=False)
            manifest["streaming"]["reason"] = reason
        if self.target.build:
            with stage("build"):
                self._build(self.target.build, manifest)
        if self.request.bench:
            with stage("measure"):
                request = self.request
                measure(
                    manifest,
                    self.subject,
                    self.folder,
                    request.lengths,
                    replace(BRIEF, threads=request.threads),
                    request.seed,
                    self.traced.program,
                )
        manifest["stages"] = self.watch.stages
        return manifest

    def _lower_and_check(self, with_state: bool) -> Manifest:
        stage = self.watch.stage
        path, manifest = self._lower(with_state)
        with stage("parity"):
            self.subject = subject_of(manifest, self.loaded, self._opener(path))
            check_parity(manifest, self.subject, self.request.seed, self.traced, path)
        with stage("streaming"):
            streaming = parity.check_streaming(self.subject, self.request.seed)
            manifest["streaming"] = streaming.json()
        return manifest

    def _opener(self, path: Path) -> Callable[[], targets.Session]:
        threads = self.request.threads
        return lambda: self.target.open(path, threads=threads, taking_turns=True, frugal=True)

    def _lower(self, with_state: bool) -> tuple[Path, Manifest]:
        """The model file and its manifest."""
        stage = self.watch.stage
        with stage("rewrite"):
            own = self.loaded.stepwise is not None  # its states are in the graph as it is
            stages = passes.STAGES if with_state and not own else passes.STATELESS
            rewritten = passes.rewrite(self.traced.graph, stages, self.traced.weights)
            self.findings, self.mixing = rewritten.findings, sequence_axis.mixing(rewritten.model)
            model, apart = rewritten.model, rewritten.weights
            if self.target.prepare is not targets.unchanged:  # it may change the weights, too
                model, apart = self.target.prepare(attached(model, apart)), {}
        with stage("lower"):
            lowered, choices = lower(
                model,
                self.target.candidates,
                self._runner() if self.request.tune else None,
                self._tune_sizes(),
            )
        with stage("write"):
            path = write.save_model(lowered, self.folder, apart)
            self._check(lowered)
            write.copy_files(self.loaded.files, self.folder)
            return path, self._manifest(lowered, [c.json() for c in choices])

    @staticmethod
    def _check(model: onnx.ModelProto) -> None:
        try:
            onnx.checker.check_model(outline(model))
        except onnx.checker.ValidationError as error:
            raise BuildError(f"The rewritten graph is not valid ONNX: {error}") from error

    def _build(self, build: targets.Build, manifest: Manifest) -> None:
        """Engines beside the model, and their records in the manifest."""
        states = tuple(s["past"] for s in manifest["states"])
        model = self.folder / manifests.MODEL
        manifest["engines"] = build(targets.Converted(model, self.dims, states))
        for engine in manifest["engines"]:
            manifest["files"][engine["file"]] = (self.folder / engine["file"]).stat().st_size
        if self.target.options.precision == "bf16":
            manifest["warnings"].append(
                "ONNX Runtime has no bfloat16 kernels for CPUs: parity and streaming are those of "
                "the model with its rounded weights, computed in float32."
            )
        check_engines(manifest, self.subject, self.folder, self.request.seed)

    def _runner(self) -> Any:
        return lambda model: (
            self.target.open(
                model.SerializeToString(), threads=self.request.threads, taking_turns=True
            ).run
        )

    def _tune_sizes(self) -> dict[str, int]:
        sizes = {}
        for name, limits in self.dims.items():
            sizes[name] = limits.nearest(1 if limits.batch else limits.opt or TUNE_LENGTH)
        return sizes

    def _manifest(self, model: onnx.ModelProto, lowerings: list[dict[str, Any]]) -> Manifest:
        given = [i.name for i in self.traced.graph.graph.input]
        own = self.loaded.stepwise.states if self.loaded.stepwise else ()
        found = [*own, *states.find(model, given)]
        fused = _fused(model.graph)
        warnings = list(self.loaded.warnings)
        warnings += [
            f"{name} was found: {op.slow}."
            for name, op in all_ops().items()
            if op.slow and name in fused
        ]
        if not fused:
            warnings.append(
                "No linear attention was found: the artifact is the model as exported. What nearly "
                "was is named under refused, with the reason."
            )
        graph = model.graph
        return {
            "format": manifests.FORMAT,
            "linexport": linexport.__version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "status": "ok",
            "artifact": str(self.request.output),
            "target": self.target.name,
            "precision": self.target.options.precision,
            "source": vars(self.loaded.source),
            "warnings": warnings,
            "inputs": [
                {**i, "default": self.loaded.defaults.get(i["name"])} for i in tensors(graph.input)
            ],
            "outputs": tensors(graph.output),
            "states": [s.json() for s in found],
            "dims": {
                name: {
                    "min": limits.min,
                    "opt": limits.opt,
                    "max": limits.max,
                    "batch": limits.batch,
                    "traced": self.traced.example_sizes[name],
                }
                for name, limits in self.dims.items()
            },
            "fused": fused,
            "refused": [
                *(refusal.json() for refusal in self.findings.refused),
                *(miss.json() for miss in self.findings.near_misses),
            ],
            "lowerings": lowerings,
            "engines": [],
            "nodes": {
                "exported": len(self.traced.graph.graph.node),
                "artifact": len(graph.node),
            },
            "files": {p.name: p.stat().st_size for p in sorted(self.folder.iterdir())},
            "model_sha256": manifests.digest(self.folder / manifests.MODEL),
            "parity": None,
            "streaming": None,
            "latency": None,
            "decode": None,
            "memory": None,
            "measurement": None,
            "environment": environment.describe(),
            "seed": self.request.seed,
            "stages": [],
        }


def _fused(graph: onnx.GraphProto) -> dict[str, int]:
    """How often each op occurs; feature maps that an attention applies itself count, too."""
    count: Counter[str] = Counter()
    for node in graph.node:
        if node.domain == DOMAIN:
            count[node.op_type] += 1
            if any(a.name == "feature_map" and a.s for a in node.attribute):
                count["FeatureMap"] += len(SIDES)
    return dict(count)
