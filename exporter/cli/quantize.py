"""``linexport quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.help import add_command
from linexport.cli.options import (
    WEIGHTS,
    ArtifactPath,
    Evaluate,
    Json,
    KeyOption,
    LowerIsBetter,
    MaxDrop,
    NewerThan,
    Seed,
    Threads,
    completion,
    trust_of,
)
from linexport.cli.progress import Spinner
from linexport.manifest.options import Panel, declared


def quantize(
    artifact: ArtifactPath,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Folder to write the new artifact to.",
            rich_help_panel=Panel.COMMON,
        ),
    ],
    weights: Annotated[
        str,
        typer.Option(
            help="fp16 or bf16, computed with in float32; int8, int4 or fp8; or auto, 4 or 8 "
            "bits for each weight until --max-kld holds. Targets have some of these.",
            autocompletion=completion(lambda: WEIGHTS),
            rich_help_panel=Panel.COMMON,
        ),
    ] = "int4",
    data: Annotated[
        Path | None,
        typer.Option(
            help=declared()["data"].help,
            rich_help_panel=Panel.WEIGHTS,
        ),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(
            help=declared()["max_kld"].help,
            rich_help_panel=Panel.WEIGHTS,
        ),
    ] = None,
    evaluate: Evaluate = None,
    lower_is_better: LowerIsBetter = False,
    max_drop: MaxDrop = None,
    threads: Threads = 0,
    seed: Seed = 0,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an earlier artifact once this one is complete.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = False,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    json: Json = False,
) -> None:
    """Store an artifact's weights in 16, 8 or 4 bits, and prove what that changes.

    The float32 artifact was compared with its original; the new one is compared with the float32
    one on text: KL divergence of next-token distributions, by position, same top token, perplexity,
    drift of states, and splits of sequences.
    """
    with guarded(json):
        from linexport.conversion.quantize import quantize as run

        manifest = run(
            artifact,
            output,
            weights=weights,
            data=data,
            max_kld=max_kld,
            evaluate=evaluate,
            lower_is_better=lower_is_better,
            max_drop=max_drop,
            threads=threads,
            seed=seed,
            overwrite=overwrite,
            progress=Spinner(quiet=json),
            trust=trust_of(key, newer_than),
        )
        finish(manifest, Path(manifest.artifact), json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        quantize,
        "linexport quantize model.artifact --output small.artifact",
        "linexport quantize model.artifact -o small --weights int8 --data texts",
        "linexport quantize model.artifact -o small --weights auto --max-kld 0.1",
    )
