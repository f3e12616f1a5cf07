"""``linexport genai``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import ArtifactPath, Json
from linexport.cli.output import echo


def genai(
    artifact: ArtifactPath,
    output: Annotated[Path, typer.Option("-o", "--output", help="A new or empty folder.")],
    json: Json = False,
) -> None:
    """Write a language model for onnxruntime-genai: package --for genai by its earlier name."""
    with guarded(json):
        from linexport.artifact.genai import write_genai

        written = write_genai(artifact, output)
        if json:
            said = {"output": str(written.path), "notes": [written.note]}
            print_json({"status": "ok", "artifact": str(artifact), **said})
        else:
            echo(f"note      {written.note}")
            echo(f"onnxruntime_genai.Model({str(written.path)!r})")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        genai,
        "linexport genai model.artifact --output genai",
        "linexport genai model.artifact -o genai --json",
        "linexport genai model.artifact -o genai --verbose",
    )
