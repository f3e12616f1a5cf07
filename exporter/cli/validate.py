"""``linexport validate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded_in_time
from linexport.cli.exit_status import finish
from linexport.cli.help import add_command
from linexport.cli.options import (
    ArtifactPath,
    Json,
    KeyOption,
    NewerThan,
    ProviderOption,
    Seed,
    SourceOption,
    Strict,
    Threads,
    TimeLimit,
    TrustRemoteCode,
    trust_of,
)
from linexport.cli.output import echo
from linexport.cli.progress import Spinner
from linexport.errors import RegressionError
from linexport.manifest.options import Panel
from linexport.system.time_limit import DEFAULT
from linexport.targets.runtime.providers import CPU, Execution

if TYPE_CHECKING:
    from linexport.ci.outcome import CheckResult


def validate(
    artifact: ArtifactPath,
    source: SourceOption = None,
    seed: Seed = 0,
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text that a quantised artifact is compared on: a UTF-8 file, or a folder of .txt "
            "files. Without it, the text of its conversion if that is unchanged, else the source "
            "of Python's standard library.",
            rich_help_panel=Panel.INPUT,
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(
            help="Write every check to a file of JUnit XML.", rich_help_panel=Panel.OUTPUT
        ),
    ] = None,
    github: Annotated[
        bool,
        typer.Option(
            "--github",
            help="In a GitHub workflow: annotate what failed, and append a table to the summary.",
            rich_help_panel=Panel.OUTPUT,
        ),
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="Compare latency, peak memory and error with a file of --write-baseline. "
            "Latencies of another processor are not compared.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = None,
    fail_on_regression: Annotated[
        str,
        typer.Option(
            help="With --baseline: how much worse a figure may be, beyond its noise. More is exit "
            "code 3.",
            rich_help_panel=Panel.CHECKS,
        ),
    ] = "10%",
    write_baseline: Annotated[
        Path | None,
        typer.Option(help="Measure, and write such a file.", rich_help_panel=Panel.CHECKS),
    ] = None,
    provider: ProviderOption = CPU,
    strict: Strict = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Write the outcome to the artifact's manifest and report. load refuses an "
            "artifact that is recorded to have failed.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = False,
    time_limit: TimeLimit = DEFAULT,
    key: KeyOption = None,
    newer_than: NewerThan = None,
    json: Json = False,
) -> None:
    """Check an artifact against its original again; exit 3 if they differ."""
    with guarded_in_time(json, time_limit):
        from linexport.ci import validation
        from linexport.ci.regression import parse_percent

        limit = parse_percent(fail_on_regression)
        summary = os.environ.get("GITHUB_STEP_SUMMARY") if github else None
        files = validation.Files(
            junit, baseline, write_baseline, Path(summary) if summary else None
        )
        manifest, changes, found = validation.validate_and_report(
            artifact,
            files,
            limit,
            source=source,
            seed=seed,
            threads=threads,
            trust_remote_code=trust_remote_code,
            data=data,
            progress=Spinner(quiet=json),
            execution=Execution(provider, strict),
            record=record,
            trust=trust_of(key, newer_than),
        )
        if github:
            _annotate(artifact, found, err=json)
        if not json:
            for change in changes:
                echo(f"{change.verdict:<12}  {change.name}: {change.described()}")
        if not record and not json:
            echo("The outcome is not written to the artifact; --record does that.")
        finish(manifest, artifact, json)
        worse = validation.regressions(changes, limit)
        if worse is not None:
            raise RegressionError(worse)


def _annotate(artifact: Path, found: list[CheckResult], err: bool) -> None:
    from linexport.ci import github

    for line in github.workflow_commands(str(artifact), found):
        echo(line, err=err)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        validate,
        "linexport validate model.artifact",
        "linexport validate model.artifact --source package.module:make_model --record",
        "linexport validate model.artifact --junit checks.xml --baseline baseline.json",
    )
