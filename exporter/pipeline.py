"""The whole way: source -> checked and measured artifact; and checking one again later.

    load -> trace -> passes -> lower -> write -> parity -> streaming -> timing -> report

Everything is written to a temporary folder that takes the place of the output at the very end.
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import linexport
from linexport import dims as dimensions
from linexport import environment, parity, passes, states, targets, trace
from linexport.artifact import manifest as manifests
from linexport.artifact import write
from linexport.errors import UsageError
from linexport.loaders import LoadedModel, load_model
from linexport.plugins.ops.op import DOMAIN
from linexport.progress import Progress, Silent, Stopwatch
from linexport.report import render_html
from linexport.subject import subject_of, tensors
from linexport.targets.lowering import lower
from linexport.timing.competitors import Bench
from linexport.timing.latency import Settings

Manifest = dict[str, Any]

TUNE_LENGTH = 1024
MEMORY_LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Request:
    """What ``convert`` was asked for; see there."""

    source: str | Path
    output: Path
    target: str = targets.DEFAULT
    dims: tuple[str, ...] = ()
    tune: bool = False
    bench: bool = True
    lengths: tuple[int, ...] | None = None
    threads: int = 0
    seed: int = 0
    overwrite: bool = False


def convert(
    source: str | Path,
    output: str | Path,
    *,
    target: str = targets.DEFAULT,
    dims: Iterable[str] = (),
    tune: bool = False,
    bench: bool = True,
    lengths: Iterable[int] | None = None,
    threads: int = 0,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Convert a model to an artifact folder and prove it equal to the original.

    Args:
        source: a linexport checkpoint, an exported program, or ``package.module:callable``.
        output: the folder to make.
        target: name of a target, see ``linexport.targets``.
        dims: ranges of dynamic dimensions, ``NAME=MIN:OPT:MAX``.
        tune: choose lowerings by measuring them here rather than by rule.
        bench: measure latency and memory.
        lengths: sequence lengths to measure at.
        threads: of every measured competitor, 0 for each one's own choice.
        seed: of all random inputs.
        overwrite: replace an artifact that is there, once the new one is complete.
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
        tuple(dims),
        tune,
        bench,
        None if lengths is None else tuple(lengths),
        threads,
        seed,
        overwrite,
    )
    targets.find(target)
    ranges = dimensions.parse(request.dims)
    write.check_output(request.output, overwrite)
    watch = Stopwatch(progress or Silent())
    with write.staged(request.output) as folder:
        manifest = _Conversion(request, ranges, folder, watch).run()
        place = request.output
        if manifest["status"] != "ok" and manifests.is_artifact(place):
            place = place.with_name(f"{place.name}.failed")
        manifest["artifact"] = str(place)
        _write_report(folder, manifest)
        write.publish(folder, place)
    return manifest


class _Conversion:
    """One run of ``convert`` in a staged folder."""

    def __init__(
        self,
        request: Request,
        ranges: Mapping[str, dimensions.DimRange],
        folder: Path,
        watch: Stopwatch,
    ) -> None:
        self.request, self.ranges, self.folder, self.watch = request, ranges, folder, watch
        self.target = targets.find(request.target)

    def run(self) -> Manifest:
        stage = self.watch.stage
        with stage("load"):
            self.loaded = load_model(self.request.source, seed=self.request.seed)
        with stage("trace"):
            self.traced = trace.trace(self.loaded)
            self.dims = dimensions.merge(self.traced.dims, self.ranges)
        manifest = self._lower_and_check(with_state=True)
        if manifest["streaming"]["passed"] is False:
            reason = manifest["streaming"]["reason"]
            manifest = self._lower_and_check(with_state=False)
            manifest["streaming"]["reason"] = f"exported without state: {reason}"
        if self.request.bench:
            with stage("measure"):
                _measure(manifest, self.subject, self.folder, self.request)
        manifest["stages"] = self.watch.stages
        return manifest

    def _lower_and_check(self, with_state: bool) -> Manifest:
        stage = self.watch.stage
        with stage("rewrite"):
            model = self.target.prepare(
                passes.run(self.traced.model, passes.STAGES if with_state else passes.STAGES[:-1])
            )
        with stage("lower"):
            lowered, choices = lower(
                model,
                self.target.candidates,
                self._runner() if self.request.tune else None,
                self._tune_sizes(),
            )
            onnx.checker.check_model(lowered)
        with stage("write"):
            path = write.save_model(lowered, self.folder)
            manifest = self._manifest(lowered, [c.json() for c in choices])
        with stage("parity"):
            session = self.target.open(path, threads=self.request.threads)
            self.subject = subject_of(manifest, self.loaded, session)
            _check_parity(manifest, self.subject, self.request.seed)
        with stage("streaming"):
            streaming = parity.check_streaming(self.subject, self.request.seed)
            manifest["streaming"] = streaming.json()
        return manifest

    def _runner(self) -> Any:
        return lambda model: (
            self.target.open(model.SerializeToString(), threads=self.request.threads).run
        )

    def _tune_sizes(self) -> dict[str, int]:
        sizes = {}
        for name, limits in self.dims.items():
            wanted = 1 if name.startswith("batch") else limits.opt or TUNE_LENGTH
            sizes[name] = wanted if limits.allows(wanted) else self.traced.example_sizes[name]
        return sizes

    def _manifest(self, model: onnx.ModelProto, lowerings: list[dict[str, Any]]) -> Manifest:
        found = states.find(model)
        fused: dict[str, int] = {}
        for node in model.graph.node:
            if node.domain == DOMAIN:
                fused[node.op_type] = fused.get(node.op_type, 0) + 1
        warnings = list(self.loaded.warnings)
        if not fused:
            warnings.append(
                "No linear attention was found: the artifact is the model as exported. Layers "
                "built from linexport.models are recognised."
            )
        graph = model.graph
        return {
            "format": manifests.FORMAT,
            "linexport": linexport.__version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "status": "ok",
            "artifact": str(self.request.output),
            "target": self.target.name,
            "source": vars(self.loaded.source),
            "warnings": warnings,
            "inputs": tensors(model, [i.name for i in graph.input], outputs=False),
            "outputs": tensors(model, [o.name for o in graph.output], outputs=True),
            "states": [s.json() for s in found],
            "dims": {
                name: {
                    "min": limits.min,
                    "opt": limits.opt,
                    "max": limits.max,
                    "traced": self.traced.example_sizes[name],
                }
                for name, limits in self.dims.items()
            },
            "fused": fused,
            "refused": [],
            "lowerings": lowerings,
            "nodes": {
                "exported": len(self.traced.model.graph.node),
                "artifact": len(graph.node),
            },
            "files": {p.name: p.stat().st_size for p in sorted(self.folder.glob("model.onnx*"))},
            "model_sha256": _digest(self.folder / manifests.MODEL),
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


def validate(
    artifact: str | Path,
    *,
    source: str | Path | None = None,
    seed: int = 0,
    threads: int = 0,
    progress: Progress | None = None,
) -> Manifest:
    """Check an artifact against its original again, and write the outcome to its manifest.

    Args:
        artifact: the folder.
        source: the original, where it is not at the place the manifest names.
        seed: of the random inputs.
        threads: 0 for the runtime's choice.
        progress: shown the stages.

    Returns:
        The updated manifest.

    Raises:
        UsageError: not an artifact, or the source is missing or not the one it was made from.
    """
    folder = Path(artifact)
    watch = Stopwatch(progress or Silent())
    manifest, subject = _reopen(folder, source, threads, watch)
    with watch.stage("parity"):
        _check_parity(manifest, subject, seed)
    with watch.stage("streaming"):
        before = manifest["streaming"]
        if subject.states:
            manifest["streaming"] = parity.check_streaming(subject, seed).json()
            if manifest["streaming"]["passed"] is False:
                manifest["status"] = "parity_failed"
        else:
            manifest["streaming"] = before
    manifest["seed"] = seed
    _rewrite(folder, manifest)
    return manifest


def bench(
    artifact: str | Path,
    *,
    source: str | Path | None = None,
    lengths: Iterable[int] | None = None,
    threads: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Manifest:
    """Measure an artifact beside its competitors again, and write the outcome to its manifest.

    Arguments and errors are those of ``validate``; ``lengths`` are sequence lengths.
    """
    folder = Path(artifact)
    watch = Stopwatch(progress or Silent())
    manifest, subject = _reopen(folder, source, threads, watch)
    chosen = None if lengths is None else tuple(lengths)
    with watch.stage("measure"):
        request = Request(
            manifest["source"]["location"],
            folder,
            manifest["target"],
            lengths=chosen,
            threads=threads,
            seed=seed,
        )
        _measure(manifest, subject, folder, request)
    _rewrite(folder, manifest)
    return manifest


def _reopen(
    folder: Path, source: str | Path | None, threads: int, watch: Stopwatch
) -> tuple[Manifest, parity.Subject]:
    manifest = manifests.read(folder)
    with watch.stage("load"):
        if _digest(folder / manifests.MODEL) != manifest["model_sha256"]:
            raise UsageError(
                f"{folder / manifests.MODEL} is not the file its manifest describes: it was "
                "changed or damaged. Convert the model again."
            )
        loaded = _original(manifest, source)
        session = targets.find(manifest["target"]).open(folder / manifests.MODEL, threads=threads)
    return manifest, subject_of(manifest, loaded, session)


def _original(manifest: Manifest, source: str | Path | None) -> LoadedModel:
    recorded = manifest["source"]
    loaded = load_model(source or recorded["location"])
    if loaded.source.sha256 != recorded["sha256"]:
        raise UsageError(
            f"{loaded.source.location} is not the model the artifact was made from: its SHA-256 is "
            f"{loaded.source.sha256}; the manifest says {recorded['sha256']}. Pass --source."
        )
    return loaded


def _check_parity(manifest: Manifest, subject: parity.Subject, seed: int) -> None:
    outcome = parity.check(subject, seed)
    manifest["parity"] = outcome.json()
    manifest["warnings"] = list(dict.fromkeys([*manifest["warnings"], *outcome.notes]))
    manifest["status"] = "ok" if outcome.passed else "parity_failed"


def _measure(manifest: Manifest, subject: parity.Subject, folder: Path, request: Request) -> None:
    settings = Settings(threads=request.threads)
    with tempfile.TemporaryDirectory() as work:
        runner = Bench(
            subject,
            folder / manifests.MODEL,
            request.target,
            Path(work),
            settings,
            request.seed,
        )
        runner.export_plainly()
        rows = runner.latency(request.lengths)
        manifest["latency"] = rows
        manifest["decode"] = runner.decode()
        measured = {row["length"] for row in rows}
        wanted = [n for n in MEMORY_LENGTHS if n in measured] or [max(measured)]
        manifest["memory"] = runner.memory(tuple(wanted))
        if runner.plain_nodes is not None:
            manifest["nodes"]["exported"] = runner.plain_nodes
        manifest["measurement"] = settings.json()


def _write_report(folder: Path, manifest: Manifest) -> None:
    text = manifests.dumps(manifest)
    (folder / manifests.MANIFEST).write_text(text, encoding="utf-8")
    (folder / manifests.REPORT).write_text(render_html(manifest), encoding="utf-8")


def _rewrite(folder: Path, manifest: Manifest) -> None:
    write.replace_text(folder / manifests.REPORT, render_html(manifest))
    write.replace_text(folder / manifests.MANIFEST, manifests.dumps(manifest))


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise UsageError(f"{path} is missing. Convert the model again.") from None
