"""``linexport convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.options import (
    Json,
    Lengths,
    Seed,
    Threads,
    TrustRemoteCode,
    parse_lengths,
    parse_sms,
)
from linexport.cli.progress import Spinner


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A linexport checkpoint (.pt), an exported program (.pt2), an ONNX file, a "
            "Hugging Face model folder, or package.module:callable, a factory returning "
            "(module, args[, dynamic_shapes])."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write the artifact to.")
    ],
    target: Annotated[
        str,
        typer.Option(
            help="Where it will run: ort, onnx (portable), onnx27, tensorrt-rtx or tensorrt."
        ),
    ] = "ort",
    precision: Annotated[
        str, typer.Option(help="For engines: fp32, fp16 or bf16. States stay in float32.")
    ] = "fp32",
    sm: Annotated[
        str | None,
        typer.Option(help="For engines: compute capabilities of the GPUs, such as 89,120."),
    ] = None,
    plugins: Annotated[
        bool, typer.Option(help="For engines: run linear attention by linexport's kernels.")
    ] = True,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="For tensorrt: where one kernel suffices, put it into the engine, which then runs "
            "without a plugin library.",
        ),
    ] = False,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="For tensorrt: file of kernels' times that builds share; made if new."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(help="Range of a dynamic dimension, NAME=MIN:OPT:MAX; may be repeated."),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose lowerings by measuring them on this machine.")
    ] = False,
    bench: Annotated[bool, typer.Option(help="Measure latency and memory.")] = True,
    lengths: Lengths = None,
    threads: Threads = 0,
    seed: Seed = 0,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier artifact once this one is complete."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Convert a model to a checked, measured artifact folder."""
    with guarded(json):
        from linexport.conversion import pipeline

        manifest = pipeline.convert(
            source,
            output,
            target=target,
            precision=precision,
            sms=parse_sms(sm),
            plugins=plugins,
            quick=quick,
            timing_cache=timing_cache,
            dims=dim or (),
            tune=tune,
            bench=bench,
            lengths=parse_lengths(lengths),
            threads=threads,
            seed=seed,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            progress=Spinner(quiet=json),
        )
        finish(manifest, Path(manifest.artifact), json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(convert)
