"""``linexport validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.options import ArtifactPath, Json, Seed, SourceOption, Threads, TrustRemoteCode
from linexport.cli.progress import Spinner


def validate(
    artifact: ArtifactPath,
    source: SourceOption = None,
    seed: Seed = 0,
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text that a quantised artifact is compared on: a UTF-8 file or a folder of .txt "
            "files. Without it, the source of Python's standard library."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check an artifact against its original again; exit 3 if they differ."""
    with guarded(json):
        from linexport.conversion import revalidate

        manifest = revalidate.validate(
            artifact,
            source=source,
            seed=seed,
            threads=threads,
            trust_remote_code=trust_remote_code,
            data=data,
            progress=Spinner(quiet=json),
        )
        finish(manifest, artifact, json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(validate)
