"""``linexport verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import KEYS, ArtifactPath, Json, NewerThan
from linexport.cli.output import echo


def verify(
    artifact: ArtifactPath,
    key: Annotated[
        Path,
        typer.Option(
            envvar=KEYS,
            help="File of the signer's ed25519 public key, PEM, or a folder of the public keys "
            "(.pub) of several, one of whom must have signed it.",
        ),
    ],
    newer_than: NewerThan = None,
    json: Json = False,
) -> None:
    """Check that an artifact is unchanged since the owner of a key signed it; exit 3 if not.

    Everything that is shown is signed, and the key is the one whose signature holds.
    """
    with guarded(json):
        from linexport.artifact import signature

        signed = signature.verify(artifact, key, newer_than)
        if json:
            print_json(
                {
                    "status": "ok",
                    "artifact": str(artifact),
                    "key_file": str(signed.key_file),
                    **signed.record(),
                }
            )
        else:
            echo(f"{artifact} is as {signed.key} signed it: {len(signed.files)} files")
            echo(f"signed as  {signed.described()}")
            echo(f"key        {signed.key_file}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        verify,
        "linexport verify model.artifact --key private.pem.pub",
        "linexport verify model.artifact --key trusted/",
        "linexport verify model.artifact --key trusted/ --newer-than 2026-11-28",
    )
