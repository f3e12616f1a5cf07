"""``linexport serve``."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from linexport.cli.errors import guarded_in_time
from linexport.cli.help import add_command
from linexport.cli.options import (
    ArtifactPath,
    KeyOption,
    NewerThan,
    ProviderOption,
    Strict,
    Threads,
    opener,
)
from linexport.cli.output import echo
from linexport.errors import EnvironmentProblemError
from linexport.manifest.options import Panel
from linexport.serving.limits import HELP, LEAST, PANEL, Limits
from linexport.serving.token import TOKEN, read_token
from linexport.system.install import pip_install_here
from linexport.system.time_limit import limited
from linexport.targets.runtime.providers import CPU


def serve(
    artifact: ArtifactPath,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=Panel.COMMON)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=Panel.COMMON),
    ] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the model; that of the folder if none is given.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File of the bearer token that clients must send; or {TOKEN}.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    park: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which sequences are kept: those that a request asks to park, and those "
            "that are not finished when the server stops.",
            rich_help_panel=Panel.SEQUENCES,
        ),
    ] = None,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    provider: ProviderOption = CPU,
    strict: Strict = False,
    threads: Threads = 0,
    **limits: Any,
) -> None:
    """Serve a model to many clients: by the protocols of OpenAI and Open Inference, and a page."""
    most = Limits(**limits)
    with guarded_in_time(False, most.time_limit):
        try:
            from linexport.serving.http.server import Address, serve
        except ImportError as error:
            raise EnvironmentProblemError(
                f"Serving needs {error.name}: {pip_install_here('serve')}."
            ) from None
        from linexport.serving.computing import LocalComputing
        from linexport.serving.service import Service

        address = Address(host, port, read_token(token_file))
        model = opener(threads, provider, strict, key, newer_than)(artifact)
        called = name or artifact.resolve().name
        service = Service(model, LocalComputing(model, most), called, most, park)
        if service.vectors is not None:
            echo("Vectors of texts: /v1/embeddings, and /v2.", err=True)
        elif service.language is None:
            echo(f"No texts, /v2 alone: {service.why_no_text}", err=True)
        elif model.manifest.vision is not None and service.images is None:
            echo(f"No images: {service.why_no_images}", fg="yellow", err=True)
        if not address.local and address.token is None:
            echo(
                f"Warning: whoever reaches {host} may use this server; give it a --token-file.",
                fg="yellow",
                err=True,
            )
        # A call that cannot be ended within a node is waited for: no request ends the server.
        with limited(most.time_limit):
            serve(service, address, lambda url: echo(f"{service.name} at {url}", err=True))


def register(app: typer.Typer) -> None:
    """Add the command, with an option for every limit."""
    signature = inspect.signature(serve, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[
                int,
                typer.Option(
                    min=field.metadata[LEAST],
                    help=field.metadata[HELP],
                    rich_help_panel=field.metadata[PANEL],
                ),
            ],
        )
        for field in fields(Limits)
    ]
    serve.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    add_command(
        app,
        serve,
        "linexport serve model.artifact",
        "linexport serve model.artifact --port 8080 --slots 32 --token-file token.txt",
        "linexport serve model.artifact --host 0.0.0.0 --key trusted/ --park parked",
    )
