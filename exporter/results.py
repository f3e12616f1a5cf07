"""Filling a manifest with what is proven and measured of its model, and writing both reports."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import onnx

from linexport import parity, targets, trace
from linexport.artifact import manifest as manifests
from linexport.artifact import write
from linexport.report import render_html
from linexport.timing.competitors import Bench
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
            onnx.load_model(str(path)),
            targets.find(manifest["target"]).open,
            outcome.failed,
        )
    manifest["parity"] = outcome.json()
    manifest["warnings"] = list(dict.fromkeys([*manifest["warnings"], *outcome.notes]))
    manifest["status"] = "ok" if outcome.passed else "parity_failed"


def measure(
    manifest: Manifest,
    subject: parity.Subject,
    folder: Path,
    lengths: tuple[int, ...] | None,
    threads: int,
    seed: int,
) -> None:
    """Fill in the manifest's latency, decode step and peak memory."""
    settings = Settings(threads=threads)
    with tempfile.TemporaryDirectory() as work:
        runner = Bench(
            subject,
            folder / manifests.MODEL,
            manifest["target"],
            Path(work),
            settings,
            seed,
        )
        runner.export_plainly()
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


def write_reports(folder: Path, manifest: Manifest) -> None:
    """``manifest.json`` and ``report.html``, each replaced in one step."""
    write.replace_text(folder / manifests.REPORT, render_html(manifest))
    write.replace_text(folder / manifests.MANIFEST, manifests.dumps(manifest))
