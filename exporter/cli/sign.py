"""``linexport sign``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import ArtifactPath, Json
from linexport.cli.output import echo


def sign(
    artifact: ArtifactPath,
    key: Annotated[Path, typer.Option(help="File of an ed25519 private key, PEM.")],
    new_key: Annotated[
        bool,
        typer.Option("--new-key", help="Make the key first, and its public key in a .pub file."),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="Name that is signed; that of the folder if none is given.")
    ] = None,
    version: Annotated[str, typer.Option(help="Version of the artifact, which is signed.")] = "",
    json: Json = False,
) -> None:
    """Sign an artifact, so that others can tell that it is yours and unchanged, and how old it is.

    Its name, its version and the time are signed with its files.
    """
    with guarded(json):
        from linexport.artifact import signature

        public = signature.new_key(key) if new_key else None
        signed = signature.sign(artifact, key, name=name, version=version)
        if json:
            print_json(
                {
                    "status": "ok",
                    "artifact": str(artifact),
                    "signature": str(signed.file),
                    "public_key": None if public is None else str(public),
                    **signed.record(),
                }
            )
            return
        if public is not None:
            echo(f"private key  {key}  keep it secret\npublic key   {public}")
        echo(f"signature    {signed.file}  {len(signed.files)} files, {signed.key}")
        echo(f"signed as    {signed.described()}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        sign,
        "linexport sign model.artifact --key private.pem --new-key",
        "linexport sign model.artifact --key private.pem --version 1.2",
        "linexport sign model.artifact --key private.pem --name chat --json",
    )
