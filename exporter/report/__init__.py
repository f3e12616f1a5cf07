"""manifest -> report.html (one self-contained page) or a terminal summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from linexport.manifest import Manifest
    from linexport.manifest.inspected import SourceInspection

__all__ = ["render_findings", "render_html", "render_summary"]


def render_html(manifest: Manifest) -> str:
    """The whole report as one HTML document that loads nothing from outside itself."""
    # Imported here because the command line imports this package to print its help.
    from linexport.report.page import artifact_page

    return artifact_page(manifest)


def render_findings(found: SourceInspection) -> str:
    """Render what ``inspect`` found, with drawings, as one self-contained HTML document."""
    from linexport.report.findings import findings_page

    return findings_page(found)


def render_summary(manifest: Manifest, console: Console) -> None:
    """Print the verdict, what was fused, the checks and a latency table to the console."""
    from linexport.report.summary import print_summary

    print_summary(manifest, console)
