"""Staged folder of a proven model -> its place, if ``load`` will open it there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from linexport import manifest as manifests
from linexport.artifact import write
from linexport.errors import BuildError, UnsupportedModelError, UsageError
from linexport.graph.interface import check_interface
from linexport.manifest import MANIFEST, MODEL, REPORT, Manifest, dumps, to_json
from linexport.report import render_html
from linexport.sources.onnx_file.skeleton import skeleton
from linexport.sources.onnx_file.structure import check_structure


def check_place(place: Path, overwrite: bool, source: str | Path) -> None:
    """Refuse an output that cannot be written, before work is spent on it.

    Raises:
        UsageError: it holds something else, an artifact that may not be replaced, or the source.
    """
    write.check_apart(place, source)
    write.check_output(place, overwrite)
    if manifests.is_artifact(place):
        write.check_output(_failed(place), overwrite=True)


def publish(folder: Path, place: Path, manifest: Manifest) -> Manifest:
    """Write both reports into a staged folder and move it to its place.

    A failed artifact does not replace an existing one, but goes next to it. Returns the manifest,
    which says where.

    Raises:
        BuildError: ``load`` would refuse the artifact.
    """
    _check_opens(folder, manifest)
    if manifest.status != "ok" and manifests.is_artifact(place):
        place = _failed(place)
    manifest = replace(manifest, artifact=str(place))
    write_reports(folder, manifest)
    write.publish(folder, place)
    return manifest


def _check_opens(folder: Path, manifest: Manifest) -> None:
    """Check the graph as ``load`` does: what is proven by a session of our own must open there."""
    try:
        graph = skeleton(folder / MODEL)
        check_structure(folder / MODEL, graph)
        check_interface(manifest, graph, MANIFEST)
    except (UnsupportedModelError, UsageError) as error:
        raise BuildError(
            f"The artifact was made, and linexport.load would not open it: {error}. This is a "
            "fault of linexport; nothing was written."
        ) from error


def _failed(place: Path) -> Path:
    return place.with_name(f"{place.name}.failed")


def write_reports(folder: Path, manifest: Manifest) -> None:
    """``manifest.json`` and ``report.html``, each replaced in one step."""
    write.replace_text(folder / REPORT, render_html(manifest))
    write.replace_text(folder / MANIFEST, dumps(to_json(manifest)))
