"""``linexport bench``."""

from __future__ import annotations

import typer

from linexport.cli.errors import guarded
from linexport.cli.exit_status import finish
from linexport.cli.options import (
    ArtifactPath,
    Json,
    Lengths,
    Seed,
    SourceOption,
    Threads,
    TrustRemoteCode,
    parse_lengths,
)
from linexport.cli.progress import Spinner


def bench(
    artifact: ArtifactPath,
    source: SourceOption = None,
    lengths: Lengths = None,
    threads: Threads = 0,
    seed: Seed = 0,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Measure an artifact beside a plain export and eager PyTorch."""
    with guarded(json):
        from linexport.conversion import revalidate

        manifest = revalidate.bench(
            artifact,
            source=source,
            lengths=parse_lengths(lengths),
            threads=threads,
            seed=seed,
            trust_remote_code=trust_remote_code,
            progress=Spinner(quiet=json),
        )
        finish(manifest, artifact, json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)
