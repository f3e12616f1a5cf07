"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linexport.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Seed = Annotated[int, typer.Option(help="Seed of all random inputs; recorded.")]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of every baseline; 0 for each one's own choice.")
]
ArtifactPath = Annotated[Path, typer.Argument(help="Folder made by linexport convert.")]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="The original, where it is not at the place the manifest names: a file, or "
        "package.module:callable.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code that a Hugging Face model folder brings along: whatever its "
        "author wrote there can do what you can.",
    ),
]
Lengths = Annotated[
    str | None, typer.Option(help="Sequence lengths to measure at, such as 128,1024,4096.")
]


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """Comma-separated positive integers.

    Raises:
        UsageError: anything else.
    """
    return None if text is None else _integers("--lengths", text, "128,1024")


def parse_sms(text: str | None) -> tuple[int, ...]:
    """Comma-separated compute capabilities, ten times their number: 89 is 8.9.

    Raises:
        UsageError: anything else.
    """
    return () if text is None else _integers("--sm", text, "89,120")


def _integers(option: str, text: str, example: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text!r}: expected positive integers, such as {example}.")
    return tuple(int(part) for part in parts)
