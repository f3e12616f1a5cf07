"""Options that several commands share, and those of ``convert``, from their one declaration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from linexport.errors import LinexportError, UsageError
from linexport.manifest.options import ConvertOptions, declared, defaults
from linexport.targets.runtime import providers

if TYPE_CHECKING:
    from linexport.artifact.signature import Trust

DEFAULT_TOKENS = 128
"""Most tokens of a text where neither the caller nor the model says."""


def option(name: str) -> Any:
    """The command line's declaration of a field of ``ConvertOptions``."""
    one = declared()[name]
    text = one.help
    if name == "target":
        text = f"{text} One of {', '.join(target_names())}."
    both = defaults()[name] is True  # typer makes --no-... of it
    return typer.Option(*([] if both else [one.flag]), help=text, min=one.min)


def target_names() -> list[str]:
    """Every target by name; linexport's own alone, where one of another package is unusable."""
    from linexport.targets import listings

    try:
        return sorted(listings())
    except LinexportError:  # said again, and then not in passing, once a target is looked for
        return sorted(listings(others=False))


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Seed = Annotated[int, option("seed")]
Threads = Annotated[int, option("threads")]
TrustRemoteCode = Annotated[bool, option("trust_remote_code")]
Lengths = Annotated[str | None, option("lengths")]
Evaluate = Annotated[str | None, option("evaluate")]
LowerIsBetter = Annotated[bool, option("lower_is_better")]
MaxDrop = Annotated[float | None, option("max_drop")]
ArtifactPath = Annotated[Path, typer.Argument(help="Folder made by linexport convert.")]
ProviderOption = Annotated[
    str,
    typer.Option(
        "--provider",
        help="Execution provider of ONNX Runtime that runs the artifact: "
        f"{', '.join(providers.NAMES)}. An error where it is not installed or does not start; what "
        "it leaves to the CPU is told.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="With --provider: an error where any part of a linexport op or a state is left to the "
        "CPU.",
    ),
]
KEYS = "LINEXPORT_TRUSTED_KEYS"
"""Environment variable that is --key where that is not given."""

KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        envvar=KEYS,
        help="File of an ed25519 public key, or a folder of such files (.pub): the artifact must "
        "be as the owner of one of them signed it. Exit 3 if not.",
    ),
]
NewerThan = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="With --key: refuse an artifact that was not signed after that time, such as "
        "2026-11-28 or 2026-11-28T12:00:00+00:00.",
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="The original, where it is not at the place the manifest names: a file, or "
        "package.module:callable.",
    ),
]


TimeLimit = Annotated[
    int,
    typer.Option(
        "--time-limit",
        min=0,
        metavar="SECONDS",
        help="Most seconds of opening the model, and of each call: its graph may have a loop "
        "without an end, or constants that take long. 0 for no limit.",
    ),
]


def trust_of(key: Path | None, newer_than: str | None) -> Trust | None:
    """Return whose artifacts are used; None for anybody's.

    Raises:
        UsageError: a time without a key.
    """
    from linexport.artifact.signature import Trust

    if key is None and newer_than is not None:
        raise UsageError("--newer-than is of signatures: give --key too.")
    return None if key is None else Trust(key, newer_than)


def convert_parameters() -> list[inspect.Parameter]:
    """A parameter for every field of ``ConvertOptions``, as typer takes them."""
    hints, found = get_type_hints(ConvertOptions), []
    for name, one in declared().items():
        typed: Any = {"commas": str | None, "repeated": list[str] | None}.get(one.form, hints[name])
        default = defaults()[name] if one.form == "single" else None
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[typed, option(name)],
            )
        )
    return found


def convert_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert command-line values of ``convert``'s parameters to those ``ConvertOptions`` takes.

    Raises:
        UsageError: a list that is not of positive integers, or a GPU that is not known.
    """
    found = {}
    for name, value in given.items():
        form = declared()[name].form
        if form == "single":
            found[name] = value
        elif value is not None:
            found[name] = _listed(name, value) if form == "commas" else tuple(value)
    return found


def _listed(name: str, text: str) -> tuple[int, ...]:
    """Integers of a field of ``ConvertOptions``; for ``sms``, GPUs by name as well."""
    if name != "sms":
        return parse_integers(name, text)
    from linexport.plugins.kernels.architectures import capability_of

    found = [str(capability_of(part.strip())) for part in text.split(",")]
    return parse_integers(name, ",".join(found))


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """Comma-separated positive integers.

    Raises:
        UsageError: anything else.
    """
    return None if text is None else parse_integers("lengths", text)


def parse_integers(name: str, text: str) -> tuple[int, ...]:
    """Comma-separated positive integers for a field of ``ConvertOptions``.

    Raises:
        UsageError: anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        one = declared()[name]
        raise UsageError(f"{one.flag} {text!r}: expected positive integers, such as {one.example}.")
    return tuple(int(part) for part in parts)
