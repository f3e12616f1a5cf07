"""Options that several commands share, and those of ``convert``, from their one declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from linexport.errors import LinexportError, UsageError
from linexport.manifest.options import (
    FLOAT32,
    KEEP,
    CommandLineOption,
    ConvertOptions,
    Panel,
    declared,
    defaults,
)
from linexport.targets.runtime import providers

if TYPE_CHECKING:
    from linexport.artifact import Artifact
    from linexport.artifact.signature import Trust

DEFAULT_TOKENS = 128
"""Most tokens of a text where neither the caller nor the model says."""


def option(name: str) -> Any:
    """The command line's declaration of a field of ``ConvertOptions``."""
    one = declared()[name]
    text = one.help
    if name == "target":
        text = f"{text} One of {', '.join(target_names())}."
    words = target_names if name == "target" else lambda: one.words
    both = defaults()[name] is True  # typer makes --no-... of it
    return typer.Option(
        *([] if both else [one.flag]),
        help=text,
        min=one.min,
        rich_help_panel=one.panel,
        autocompletion=completion(words),
    )


def completion(words: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what completes an option of these words in a shell, which are read only then."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def target_names() -> list[str]:
    """Every target by name; linexport's own alone, where one of another package is unusable."""
    from linexport.targets import listings

    try:
        return sorted(listings())
    except LinexportError:  # said again, and then not in passing, once a target is looked for
        return sorted(listings(others=False))


Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on standard output.", rich_help_panel=Panel.OUTPUT
    ),
]
Seed = Annotated[int, option("seed")]
Threads = Annotated[int, option("threads")]
TrustRemoteCode = Annotated[bool, option("trust_remote_code")]
StateDict = Annotated[str | None, option("state_dict")]
Inputs = Annotated[list[str] | None, option("inputs")]
StandIns = Annotated[bool, option("stand_ins")]
Lengths = Annotated[str | None, option("lengths")]
Evaluate = Annotated[str | None, option("evaluate")]
LowerIsBetter = Annotated[bool, option("lower_is_better")]
MaxDrop = Annotated[float | None, option("max_drop")]
WEIGHTS = tuple(word for word in declared()["weights"].words if word not in (FLOAT32, KEEP))
"""Weights in fewer bits than the artifact has."""

ArtifactPath = Annotated[Path, typer.Argument(help="Folder made by linexport convert.")]
ProviderOption = Annotated[
    str,
    typer.Option(
        "--provider",
        help=f"Execution provider of ONNX Runtime: {', '.join(providers.NAMES)}. An error where it "
        "does not start. What it leaves to the CPU is reported.",
        rich_help_panel=Panel.TARGET,
        autocompletion=completion(lambda: providers.NAMES),
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="With --provider: an error where a part of a linexport op, or a state, is left to the "
        "CPU.",
        rich_help_panel=Panel.TARGET,
    ),
]
KEYS = "LINEXPORT_TRUSTED_KEYS"
"""Environment variable that is --key where that is not given."""

KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key",
        envvar=KEYS,
        help="File of an ed25519 public key, or a folder of such files (.pub). Exit 3 unless the "
        "artifact is as the owner of one of them signed it.",
        rich_help_panel=Panel.SIGNATURES,
    ),
]
NewerThan = Annotated[
    str | None,
    typer.Option(
        help="With --key: refuse an artifact that was not signed after this time, such as "
        "2026-11-28 or 2026-11-28T12:00:00+00:00.",
        rich_help_panel=Panel.SIGNATURES,
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="The original, where it is not at the place the manifest names: a file, or "
        "package.module:callable.",
        rich_help_panel=Panel.INPUT,
    ),
]


TimeLimit = Annotated[
    int,
    typer.Option(
        "--time-limit",
        min=0,
        help="Most seconds of opening the model, and of each call: its graph may have an endless "
        "loop. 0 for no limit.",
        rich_help_panel=Panel.ISOLATION,
    ),
]


def opener(
    threads: int, provider: str, strict: bool, key: Path | None, newer_than: str | None
) -> Callable[[str | Path], Artifact]:
    """Return what opens artifacts as the options say.

    Raises:
        UsageError: a time without a key.
    """
    from linexport.artifact import load

    trust_of(key, newer_than)
    return partial(
        load,
        threads=threads,
        provider=provider,
        strict=strict,
        key=key,
        newer_than=newer_than,
    )


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
        if one.off:
            typed = str
        default = defaults()[name] if one.form == "single" else None
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[typed, option(name)],
            )
        )
        if one.off:
            found.append(_switched_off(name, one))
    return found


def _switched_off(name: str, one: CommandLineOption) -> inspect.Parameter:
    """The parameter ``--no-NAME`` of an option that takes a value."""
    flag = f"--no-{one.flag.removeprefix('--')}"
    chosen = typer.Option(flag, help=f"As {one.flag} {one.off}.", rich_help_panel=one.panel)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(f"no_{name}", kind, default=False, annotation=Annotated[bool, chosen])


def convert_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert command-line values of ``convert``'s parameters to those ``ConvertOptions`` takes.

    Raises:
        UsageError: a list that is not of positive integers, or a GPU that is not known.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in declared():  # that which switches another one off
            continue
        form = declared()[name].form
        if form == "single":
            found[name] = value
        elif value is not None:
            found[name] = _listed(name, value) if form == "commas" else tuple(value)
    for name, one in declared().items():
        if one.off and given.get(f"no_{name}"):
            found[name] = one.off
    return _with_weights_of_file(found)


def _with_weights_of_file(found: dict[str, Any]) -> dict[str, Any]:
    """Take a file that --weights names for that of --state-dict: no file is a number of bits.

    Raises:
        UsageError: both name a file, or there is none.
    """
    named = found["weights"]
    if named in declared()["weights"].words or not Path(named).suffix:
        return found
    if not Path(named).is_file():
        raise UsageError(
            f"--weights {named}: the file does not exist. Expected one of "
            f"{', '.join(declared()['weights'].words)}, or the file of a module's weights."
        )
    if found["state_dict"] is not None:
        raise UsageError(
            f"--weights {named} and --state-dict {found['state_dict']} both name a file of "
            "weights. Give one with --state-dict; --weights then says in how many bits to store."
        )
    return {**found, "weights": FLOAT32, "state_dict": named}


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
