"""``validate`` with its outcome in the forms that continuous integration reads."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from linexport.artifact import write
from linexport.artifact.checked import checked_artifact
from linexport.artifact.signature import Trust
from linexport.ci import github, junit, outcome, regression
from linexport.ci.figures import Figures, read_figures, save_figures
from linexport.ci.meter import Meter
from linexport.ci.regression import Change
from linexport.conversion.revalidate import check_again, reopen, write_outcome
from linexport.errors import UsageError
from linexport.manifest import Manifest
from linexport.parity import ModelUnderTest
from linexport.system.progress import Progress, Stopwatch
from linexport.targets.runtime.providers import CPU_ONLY, Execution


@dataclass(frozen=True)
class Files:
    """Files that a validation reads and writes; None for those not requested.

    Attributes:
        junit: XML to write.
        baseline: figures to compare with.
        new_baseline: figures to write.
        summary: Markdown to append to.
    """

    junit: Path | None = None
    baseline: Path | None = None
    new_baseline: Path | None = None
    summary: Path | None = None


def validate_and_report(
    artifact: Path,
    files: Files,
    limit: float,
    *,
    source: str | None,
    seed: int,
    threads: int,
    trust_remote_code: bool,
    data: Path | None,
    progress: Progress,
    execution: Execution = CPU_ONLY,
    record: bool = False,
    trust: Trust | None = None,
) -> tuple[Manifest, list[Change], list[outcome.CheckResult]]:
    """Check an artifact again, and compare it with a baseline if one is given.

    Args:
        artifact: the folder.
        files: read and written.
        limit: part of the baseline by which a figure may be worse.
        source: see ``linexport.validate``, as are all that follow.
        seed: see there.
        threads: see there.
        trust_remote_code: see there.
        data: see there.
        progress: see there.
        execution: the execution provider.
        record: see ``linexport.validate``.
        trust: whose artifacts are checked; None for anybody's.

    Returns:
        The manifest, the changes from the baseline, and all checks.

    Raises:
        UsageError: see ``linexport.validate``; or a baseline that cannot be read or written, or is
            requested with another provider than the CPU.
    """
    if execution != CPU_ONLY and (files.baseline or files.new_baseline):
        raise UsageError(
            "--baseline and --write-baseline are of figures on the CPU: leave out --provider, or "
            "compare without a baseline."
        )
    before = read_figures(files.baseline) if files.baseline else None
    watch = Stopwatch(progress)
    checked = checked_artifact(artifact, trust)
    tested = reopen(checked, source, threads, trust_remote_code, watch, execution)
    manifest = check_again(checked, tested, seed, threads, data, watch)
    if record:
        write_outcome(checked, manifest)
    changes: list[Change] = []
    if before is not None or files.new_baseline is not None:
        with watch.stage("measure"):
            meter = _meter(artifact, manifest, tested, threads)
            changes = _beside(before, files.new_baseline, limit, meter)
    found = outcome.checks(manifest, changes)
    if files.junit is not None:
        _write(files.junit, junit.junit(str(artifact), found))
    if files.summary is not None:
        with files.summary.open("a", encoding="utf-8") as summary:
            summary.write(github.summary(str(artifact), found))
    return manifest, changes, found


def _meter(artifact: Path, manifest: Manifest, tested: ModelUnderTest, threads: int) -> Meter:
    if manifest.parity is None:
        raise UsageError(f"{artifact} has no parity record. Convert the model again.")
    return Meter(artifact, manifest, tested, threads)


def _beside(before: Figures | None, place: Path | None, limit: float, meter: Meter) -> list[Change]:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    after = meter.figures(created)
    changes = [] if before is None else regression.compare_figures(before, after, meter, limit)
    if place is not None:
        save_figures(after, place)
    return changes


def _write(path: Path, text: str) -> None:
    try:
        write.replace_text(path, text)
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}. Name another file.") from None


def regressions(changes: Sequence[Change], limit: float) -> str | None:
    """Return a sentence on the figures that are worse than allowed; None where none is."""
    worse = [c for c in changes if c.verdict == "regressed"]
    if not worse:
        return None
    figures = "; ".join(f"{c.name} {c.described()}" for c in worse)
    return f"Worse than the baseline by more than {limit:.0%}: {figures}."
