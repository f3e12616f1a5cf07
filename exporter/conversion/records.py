"""Filling a manifest with what is proven and measured of its model, and writing both reports."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch

from linexport import parity, targets, trace
from linexport.artifact import manifest as manifests
from linexport.artifact import write
from linexport.errors import EnvironmentProblemError
from linexport.graph import dims
from linexport.parity.cases import Case, draw
from linexport.parity.reference import feeds
from linexport.report import render_html
from linexport.timing.baselines import LENGTHS, Bench
from linexport.timing.latency import Settings

Manifest = dict[str, Any]

MEMORY_LENGTHS = (1024, 4096)


def check_parity(
    manifest: Manifest,
    subject: parity.Subject,
    seed: int,
    traced: trace.Traced | None,
    path: Path,
) -> None:
    """Fill in the manifest's parity; a failure is traced to the first value that differs."""
    language = subject.loaded.language
    outcome = parity.check_language(subject, seed) if language else parity.check(subject, seed)
    if outcome.failed:
        first = parity.first_layer if language else parity.first_divergence
        outcome.first_divergence = first(
            subject,
            traced or trace.trace(subject.loaded),
            path,
            targets.find(manifest["target"]).open,
            outcome.failed,
        )
    manifest["parity"] = outcome.json()
    manifest["warnings"] = list(dict.fromkeys([*manifest["warnings"], *outcome.notes]))
    manifest["status"] = "ok" if outcome.passed else "parity_failed"


def check_engines(manifest: Manifest, subject: parity.Subject, folder: Path, seed: int) -> None:
    """Fill in what is known of each engine: compared with the original where it can be run."""
    engines = manifest["engines"]
    session, problem = _deploy(manifest, folder)
    for engine in engines:
        engine["checked"], engine["reason"] = None, problem
        if session is None:
            continue
        if engine["file"] != session.record["file"]:
            engine["reason"] = "it is for another GPU"
            continue
        checked = dataclasses.replace(subject, open=lambda: session)
        outcome = parity.check(checked, seed)
        streaming = parity.check_streaming(checked, seed)
        aliased = parity.check_in_place(checked, session, seed) if subject.states else None
        problems = [
            *([] if outcome.passed else [_where(outcome)]),
            *([streaming.reason] if streaming.passed is False and streaming.reason else []),
            *([aliased] if aliased else []),
        ]
        engine["checked"], engine["reason"] = not problems, "; ".join(problems) or None
        engine["max_relative_error"] = outcome.json()["max_relative_error"]
    if any(engine["checked"] is False for engine in engines):
        manifest["status"] = "parity_failed"


def _where(outcome: parity.Parity) -> str:
    sizes = dict(outcome.failed.sizes) if outcome.failed else "any size"
    return f"its outputs differ from the original's at {sizes}"


def _deploy(manifest: Manifest, folder: Path) -> tuple[Any, str | None]:
    """The engine opened here, or None and the reason it cannot be."""
    deploy = targets.find(manifest["target"]).deploy
    assert deploy is not None
    try:
        return deploy(folder, manifest), None
    except EnvironmentProblemError as error:
        return None, str(error)


def time_engines(manifest: Manifest, subject: parity.Subject, folder: Path, seed: int) -> None:
    """Milliseconds of the engine that runs here, by length, one token included."""
    session, problem = _deploy(manifest, folder)
    if session is None:
        manifest["warnings"].append(
            "Latency and memory are those of the ONNX model in ONNX Runtime; no engine was timed. "
            f"{problem}"
        )
        return
    engine = next(e for e in manifest["engines"] if e["file"] == session.record["file"])
    length = dims.sequence(subject.dims)
    wanted = [n for n in (1, *LENGTHS) if length and subject.dims[length].allows(n)]
    engine["latency"] = []
    for size in wanted or [1]:
        sizes = {n: limits.nearest(1) for n, limits in subject.dims.items()}
        if length:
            sizes[length] = size
        inputs = draw(subject.loaded, subject.input_shapes, Case("timing", sizes, seed))
        state = subject.initial_state(subject.batch(sizes))
        fed = {**feeds(inputs, subject.input_names), **state}
        engine["latency"].append({"length": size, **session.time(fed)})


def measure(
    manifest: Manifest,
    subject: parity.Subject,
    folder: Path,
    lengths: tuple[int, ...] | None,
    settings: Settings,
    seed: int,
    program: torch.export.ExportedProgram | None = None,
) -> None:
    """Fill in the manifest's latency, decode step and peak memory.

    ``program`` is the original as it was exported, where that was done already.
    """
    with tempfile.TemporaryDirectory() as work:
        runner = Bench(
            subject,
            folder / manifests.MODEL,
            manifest["target"],
            Path(work),
            settings,
            seed,
        )
        runner.export_plainly(program)
        rows = runner.latency(lengths)
        manifest["latency"] = rows
        manifest["warnings"] = list(dict.fromkeys([*manifest["warnings"], *runner.notes]))
        manifest["decode"] = runner.decode()
        measured = {row["length"] for row in rows}
        wanted = [n for n in MEMORY_LENGTHS if n in measured] or [max(measured)]
        manifest["memory"] = runner.memory(tuple(wanted))
        if runner.plain_nodes is not None:
            manifest["nodes"]["exported"] = runner.plain_nodes
        manifest["measurement"] = settings.json()
    if manifest.get("engines"):
        time_engines(manifest, subject, folder, seed)


def write_reports(folder: Path, manifest: Manifest) -> None:
    """``manifest.json`` and ``report.html``, each replaced in one step."""
    write.replace_text(folder / manifests.REPORT, render_html(manifest))
    write.replace_text(folder / manifests.MANIFEST, manifests.dumps(manifest))
