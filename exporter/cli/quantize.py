"""``linexport quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.options import (
    ArtifactPath,
    Evaluate,
    Json,
    KeyOption,
    LowerIsBetter,
    MaxDrop,
    NewerThan,
    Seed,
    Threads,
    trust_of,
)
from linexport.cli.progress import Spinner


def quantize(
    artifact: ArtifactPath,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write the new artifact to.")
    ],
    weights: Annotated[
        str,
        typer.Option(
            help="fp16 or bf16, stored so and computed with in float32; int8 or int4; or auto, 4 "
            "or 8 bits for each weight, 8 where they buy most, until --max-kld holds."
        ),
    ] = "int4",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text to choose values by and to compare on: a UTF-8 file or a folder of .txt "
            "files. Without it, the source of Python's standard library."
        ),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(
            help="Largest mean KL divergence from the float32 model, in nats; more is exit code 3."
        ),
    ] = None,
    evaluate: Evaluate = None,
    lower_is_better: LowerIsBetter = False,
    max_drop: MaxDrop = None,
    threads: Threads = 0,
    seed: Seed = 0,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an earlier artifact once this one is complete."),
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
    app.command()(quantize)
