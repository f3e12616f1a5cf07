"""Checks -> annotations and the step summary of a GitHub workflow.

::error title=...::...      a line of output that GitHub shows beside the change
$GITHUB_STEP_SUMMARY        a file of Markdown that it shows with the run
"""

from __future__ import annotations

from collections.abc import Sequence

from linexport.ci.outcome import CheckResult

SUMMARY = "GITHUB_STEP_SUMMARY"
MARKS = {True: "✓ passed", False: "✗ failed", None: "– not checked"}


def workflow_commands(artifact: str, found: Sequence[CheckResult]) -> list[str]:
    """Return a command line for each check that failed, and a notice where none did."""
    failed = [c for c in found if c.passed is False]
    if not failed:
        passed = sum(c.passed is True for c in found)
        return [f"::notice title=linexport {_value(artifact)}::{passed} checks passed"]
    return [
        f"::error title=linexport {_value(artifact)} {_value(c.group)}::"
        f"{_message(c.name)}: {_message(c.found)}"
        + (f" (allowed: {_message(c.allowed)})" if c.allowed else "")
        for c in failed
    ]


def summary(artifact: str, found: Sequence[CheckResult]) -> str:
    """Return Markdown: a heading, and a row for each check."""
    failed = sum(c.passed is False for c in found)
    word = f"{failed} of {len(found)} checks failed" if failed else f"{len(found)} checks"
    lines = [f"### linexport {_cell(artifact)}: {word}", ""]
    lines += ["| check | of | found | allowed | |", "| --- | --- | ---: | ---: | --- |"]
    lines += [
        f"| {c.group} | {_cell(c.name)} | {_cell(c.found)} | {_cell(c.allowed)} | "
        f"{MARKS[c.passed]} |"
        for c in found
    ]
    return "\n".join(lines) + "\n\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _message(text: str) -> str:
    """Escape the text of a command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    """Escape a property of a command."""
    return _message(text).replace(":", "%3A").replace(",", "%2C")
