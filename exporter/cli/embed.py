"""``linexport embed``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from linexport.cli.errors import guarded_in_time, print_json
from linexport.cli.help import add_command
from linexport.cli.options import (
    ArtifactPath,
    Json,
    KeyOption,
    NewerThan,
    ProviderOption,
    Strict,
    Threads,
    TimeLimit,
    opener,
)
from linexport.cli.output import echo
from linexport.errors import UsageError
from linexport.manifest.options import Panel
from linexport.system.time_limit import DEFAULT
from linexport.targets.runtime.providers import CPU


def embed(
    artifact: ArtifactPath,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text to embed; may be repeated.", rich_help_panel=Panel.COMMON),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="File of texts in UTF-8, one a line; - for the standard input.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write: .npy, or .npz of a model that gives a vector for each token.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Name of a prompt of the model to put in front of each text, such as query. "
            "Default: the model's own; '' for none.",
            rich_help_panel=Panel.INPUT,
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep so many of a vector's first numbers, of a model trained for that.",
            rich_help_panel=Panel.OUTPUT,
        ),
    ] = None,
    time_limit: TimeLimit = DEFAULT,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    provider: ProviderOption = CPU,
    strict: Strict = False,
    threads: Threads = 0,
    json: Json = False,
) -> None:
    """Turn texts into vectors with an embedding model, and compare the first with the others."""
    with guarded_in_time(json, time_limit):
        import numpy as np

        from linexport.artifact.text.vectors import (
            check_vectors_path,
            similarities,
            write_vectors,
        )

        opened = opener(threads, provider, strict, key, newer_than)
        texts = [*(text or ()), *(_lines(file) if file is not None else ())]
        if not texts:
            raise UsageError("Found no text. Give --text, or --file with one text a line.")
        model = opened(artifact)
        if output is not None:
            check_vectors_path(output, model.vectors.by_token)
        vectors = model.embed(texts, prompt=prompt, size=size)
        if output is not None:
            write_vectors(output, vectors)
        if json:
            print_json({"vectors": [np.asarray(v).tolist() for v in vectors]})
            return
        kind = "vectors" if isinstance(vectors, np.ndarray) else "texts, one vector a token"
        echo(f"{len(texts)} {kind} of {vectors[0].shape[-1]} numbers")
        for value, other in zip(similarities(vectors), texts[1:], strict=True):
            echo(f"{value:6.3f}  {other}")
        if output is not None:
            echo(f"vectors   {output}")


def _lines(file: Path) -> list[str]:
    try:
        whole = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8. Save it so.") from None
    return [line for line in whole.splitlines() if line.strip()]


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        embed,
        "linexport embed embedder --text 'a cat' --text 'a dog' --text 'a bond'",
        "linexport embed embedder --file documents.txt --prompt document -o vectors.npy",
        "linexport embed embedder --file queries.txt --size 256 --json",
    )
