"""``linexport package``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import ArtifactPath, Json, KeyOption, NewerThan, completion, trust_of
from linexport.cli.output import echo
from linexport.errors import UsageError
from linexport.manifest.options import Panel

SYSTEMS = ("genai", "hub", "onnx", "ort-mobile", "ray", "transformers.js", "triton")
"""Names of ``linexport.package.destinations``, whose modules are imported by the command alone."""


def package(
    artifact: ArtifactPath,
    destination: Annotated[
        str,
        typer.Option(
            "--for",
            help=f"System that runs it: {', '.join(SYSTEMS)}.",
            autocompletion=completion(lambda: SYSTEMS),
            rich_help_panel=Panel.COMMON,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="A new folder, or one to replace.", rich_help_panel=Panel.COMMON
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            help="What the model is called there; without it, as the artifact's folder.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE for the destination, such as backend=python for triton.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace what was packaged there before.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = False,
    allow_failed: Annotated[
        bool,
        typer.Option(
            "--allow-failed",
            help="Package an artifact that failed a check, marked so.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = False,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Run it there, if that system is installed: each text of a batch must be the one "
            "that the artifact writes alone.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = False,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    json: Json = False,
) -> None:
    """Write an artifact as the folder that another system takes."""
    with guarded(json):
        from linexport.package import find_destination
        from linexport.package import package as write

        packaged = write(
            artifact,
            find_destination(destination),
            output,
            name=name,
            options=_options(option or []),
            overwrite=overwrite,
            allow_failed=allow_failed,
            prove=prove,
            trust=trust_of(key, newer_than),
        )
        if json:
            print_json(
                {
                    "status": "ok",
                    "artifact": str(artifact),
                    "output": str(output),
                    "renamed": dict(packaged.renamed),
                    "notes": list(packaged.notes),
                    "proof": packaged.proof,
                }
            )
            return
        for old, new in packaged.renamed.items():
            echo(f"renamed   {old} -> {new}")
        for note in packaged.notes:
            echo(f"note      {note}")
        if packaged.proof is not None:
            echo(f"proven    {packaged.proof}")
        echo(f"packaged  {output}")


def _options(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"--option {text!r}: expected NAME=VALUE.")
        found[name] = value
    return found


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        package,
        "linexport package model.artifact --for triton --output repository",
        "linexport package model.artifact --for genai --output genai --prove",
        "linexport package model.artifact --for triton -o out --option backend=python",
    )
