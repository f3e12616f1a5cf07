"""``linexport debug``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import (
    ArtifactPath,
    Json,
    KeyOption,
    NewerThan,
    SourceOption,
    Threads,
    TrustRemoteCode,
    trust_of,
)
from linexport.cli.output import echo
from linexport.cli.progress import Spinner
from linexport.errors import ParityError
from linexport.manifest.options import Panel


def debug(
    artifact: ArtifactPath,
    source: SourceOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="A new folder for what repeats the first wrong value: its node, its inputs, and "
            "a script that needs NumPy and ONNX Runtime only.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    overlay: Annotated[
        Path | None,
        typer.Option(
            help="A new folder for the time and the error of every node: node data that Model "
            "Explorer shows over the graph.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens; without it, those of the smallest case that failed.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the inputs; without it, that of the case that failed.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = None,
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    json: Json = False,
) -> None:
    """Find the first layer, token and state at which an artifact differs from its original.

    Exit 3 if something differs. The graph is run a few times, with a few more of its values as
    outputs each time, and the node that is found is run alone on the original's inputs: that tells
    an error of its own from one it inherits.
    """
    with guarded(json):
        from linexport.debugging import debug as search

        found = search(
            artifact,
            source=source,
            output=output,
            overlay=overlay,
            length=length,
            seed=seed,
            threads=threads,
            trust_remote_code=trust_remote_code,
            progress=Spinner(quiet=json),
            trust=trust_of(key, newer_than),
        )
        if json:
            print_json(found.json())
        else:
            for topic, text in found.lines():
                echo(f"{topic:<12}  {text}")
        if found.differs:
            raise typer.Exit(ParityError.exit_code)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        debug,
        "linexport debug model.artifact",
        "linexport debug model.artifact --output repeat",
        "linexport debug model.artifact --source package.module:make_model --length 64",
    )
