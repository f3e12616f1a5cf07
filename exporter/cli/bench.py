"""``linexport bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded_in_time, print_json
from linexport.cli.exit_status import finish
from linexport.cli.help import add_command
from linexport.cli.options import (
    ArtifactPath,
    Json,
    KeyOption,
    Lengths,
    NewerThan,
    ProviderOption,
    Seed,
    SourceOption,
    Strict,
    Threads,
    TimeLimit,
    TrustRemoteCode,
    completion,
    parse_lengths,
    trust_of,
)
from linexport.cli.output import echo
from linexport.cli.progress import Spinner
from linexport.errors import UsageError
from linexport.manifest.options import Panel
from linexport.system.time_limit import DEFAULT
from linexport.targets.runtime.providers import CPU

if TYPE_CHECKING:
    from linexport.manifest import Manifest
    from linexport.timing.throughput import Workload

FORMS = ("md", "json", "csv")
"""Formats that --format prints."""


def bench(
    artifact: ArtifactPath,
    source: SourceOption = None,
    lengths: Lengths = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prefill",
            help="pp: tokens of a prompt in one call, such as 512.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--decode",
            help="tg: tokens written one by one, such as 128.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            "-d",
            "--depth",
            help="Tokens before either, such as 0,8192.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            "-r",
            "--repeats",
            min=1,
            help="Of every pp and tg measurement.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = 5,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Print pp and tg as md, json or csv.",
            autocompletion=completion(lambda: FORMS),
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw tokens a second over depth to a file, such as .png or .svg.",
            rich_help_panel=Panel.OUTPUT,
        ),
    ] = None,
    provider: ProviderOption = CPU,
    strict: Strict = False,
    threads: Threads = 0,
    seed: Seed = 0,
    trust_remote_code: TrustRemoteCode = False,
    time_limit: TimeLimit = DEFAULT,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    json: Json = False,
) -> None:
    """Measure an artifact against a plain export and eager PyTorch.

    Without --prefill, --decode, --depth, --format and --plot: whole sequences, one decode step and
    peak memory. With any of them: prefill and decode in tokens a second, from a state that has
    seen so many tokens; by default pp512 and tg128 at depth 0.
    """
    with guarded_in_time(json, time_limit):
        from linexport.conversion import revalidate

        work = _workload(prefill, decode, depth, repeats, form, plot)
        manifest = revalidate.bench(
            artifact,
            source=source,
            lengths=parse_lengths(lengths),
            workload=work,
            threads=threads,
            seed=seed,
            trust_remote_code=trust_remote_code,
            progress=Spinner(quiet=json or form is not None),
            provider=provider,
            strict=strict,
            trust=trust_of(key, newer_than),
        )
        if work is None or json:
            finish(manifest, artifact, json)
        else:
            _print(manifest, form or "md")
        if plot is not None:
            _plot(manifest, plot)


def _workload(
    prefill: str | None,
    decode: str | None,
    depth: str | None,
    repeats: int,
    form: str | None,
    plot: Path | None,
) -> Workload | None:
    """Return what is to be measured; None for whole sequences."""
    if not any((prefill, decode, depth, form, plot)):
        return None
    if form not in (None, *FORMS):
        raise UsageError(f"--format {form}: expected md, json or csv.")
    from linexport.timing.throughput import Workload

    usual = Workload()
    return Workload(
        _counts("--prefill", prefill, 1, usual.prefill),
        _counts("--decode", decode, 1, usual.decode),
        _counts("--depth", depth, 0, usual.depths),
        repeats,
    )


def _counts(flag: str, text: str | None, least: int, usual: tuple[int, ...]) -> tuple[int, ...]:
    if text is None:
        return usual
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise UsageError(f"{flag} {text!r}: expected integers of at least {least}, with commas.")
    return tuple(dict.fromkeys(map(int, parts)))


def _print(manifest: Manifest, form: str) -> None:
    from linexport.timing import throughput_table

    rows = manifest.throughput or ()
    if form == "json":
        print_json({"rows": throughput_table.records(rows), "measured": manifest.environment})
    else:
        write = throughput_table.csv if form == "csv" else throughput_table.markdown
        echo(write(rows), nl=False)


def _plot(manifest: Manifest, place: Path) -> None:
    from linexport.timing import throughput_table

    try:
        throughput_table.plot(manifest.throughput or (), place)
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot draw {place}: {error}. Name a .png, .svg or .pdf file.") from None


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        bench,
        "linexport bench model.artifact",
        "linexport bench model.artifact --lengths 128,1024 --threads 4",
        "linexport bench model.artifact -p 512 -n 128 -d 0,8192 --format md",
    )
