"""A comparison on disk: a page, a picture, or a folder with both and the numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest import dumps
from linexport.manifest.map_records import MapComparison
from linexport.report import map_comparison as report
from linexport.system.replace_file import replacing

NAME = "maps"
KINDS = (".html", ".png", ".json")


def check_report_paths(output: Path | None) -> None:
    """Before minutes are spent on what cannot be written.

    Raises:
        UsageError: an ending that is none of ours, no such folder above it, or a file in its place.
    """
    if output is None:
        return
    if output.suffix and output.suffix not in KINDS and not output.is_dir():
        raise UsageError(
            f"{output} ends in {output.suffix}; expected one of {', '.join(KINDS)}, or a folder."
        )
    if not output.absolute().parent.is_dir():
        raise UsageError(f"The folder {output.absolute().parent} does not exist. Make it first.")
    if output.suffix in KINDS and output.is_dir():
        raise UsageError(f"{output} is a folder. Give it another name, or remove it.")
    if output.suffix not in KINDS and output.is_file():
        raise UsageError(f"{output} is a file. Name a folder, or a file ending in .html or .png.")


def write_comparison(result: MapComparison, output: Path | None) -> list[Path]:
    """Write what ``output`` names; each file whole or not at all."""
    if output is None:
        return []
    if output.suffix in KINDS:
        paths = [output]
    else:
        output.mkdir(exist_ok=True)
        paths = [output / f"{NAME}{kind}" for kind in KINDS]
    for path in paths:
        _write(path, _content(result, path.suffix))
    return paths


def _content(result: MapComparison, kind: str) -> bytes:
    if kind == ".png":
        return report.picture(result)
    text = report.comparison_page(result) if kind == ".html" else dumps(asdict(result))
    return text.encode("utf-8")


def _write(path: Path, content: bytes) -> None:
    try:
        with replacing(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
