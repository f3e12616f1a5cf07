"""``linexport verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.options import ArtifactPath, Json
from linexport.cli.output import echo


def verify(
    artifact: ArtifactPath,
    key: Annotated[Path, typer.Option(help="File of the signer's ed25519 public key, PEM.")],
    json: Json = False,
) -> None:
    """Check that an artifact is unchanged since the owner of a key signed it; exit 3 if not."""
    with guarded(json):
        from linexport.artifact import signature

        signed = signature.verify(artifact, key)
        if json:
            print_json(
                {
                    "status": "ok",
                    "artifact": str(artifact),
                    "key": signed.key,
                    "files": dict(signed.files),
                }
            )
        else:
            echo(f"{artifact} is as {signed.key} signed it: {len(signed.files)} files")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(verify)
