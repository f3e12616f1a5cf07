"""``linexport build``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.help import add_command
from linexport.cli.options import ArtifactPath, Json, Seed, SourceOption, Threads, TrustRemoteCode
from linexport.cli.progress import Spinner
from linexport.manifest.options import Panel


def build(
    artifact: ArtifactPath,
    source: SourceOption = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(
            help="File of kernels' times that builds share; one in the folder by default.",
            rich_help_panel=Panel.TARGET,
        ),
    ] = None,
    include: Annotated[
        Path | None,
        typer.Option(
            help="Folder of TensorRT's NvInferRuntime.h, for the plugin library.",
            rich_help_panel=Panel.TARGET,
        ),
    ] = None,
    cuda_include: Annotated[
        Path | None, typer.Option(help="Folder of CUDA's cuda.h.", rich_help_panel=Panel.TARGET)
    ] = None,
    seed: Seed = 0,
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Build the engine of a prepared artifact, on the machine of its GPU; exit 3 if it differs.

    convert --target tensorrt --sm CAPABILITY prepares an artifact on any machine. The engine is
    compared with the original where that is to be had, else marked as not compared.
    """
    with guarded(json):
        from linexport.conversion.build import build as build_prepared

        manifest = build_prepared(
            artifact,
            source=source,
            timing_cache=timing_cache,
            include=include,
            cuda_include=cuda_include,
            seed=seed,
            threads=threads,
            trust_remote_code=trust_remote_code,
            progress=Spinner(quiet=json),
        )
        finish(manifest, artifact, json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        build,
        "linexport build model.artifact",
        "linexport build model.artifact --source package.module:make_model",
        "linexport build model.artifact --timing-cache kernels.cache",
    )
