"""Checks -> annotations and the step summary of a GitHub workflow.

::error title=...::...      a line of output that GitHub shows next to the change
$GITHUB_STEP_SUMMARY        a file of Markdown that it shows with the run
"""

from __future__ import annotations

from collections.abc import Sequence

from linexport.ci.outcome import CheckResult
from linexport.system.escape import markdown, workflow_message, workflow_property

SUMMARY = "GITHUB_STEP_SUMMARY"
MARKS = {True: "✓ passed", False: "✗ failed", None: "– not checked"}


def workflow_commands(artifact: str, found: Sequence[CheckResult]) -> list[str]:
    """Return a command line for each check that failed, and a notice where none did."""
    failed = [c for c in found if c.passed is False]
    if not failed:
        passed = sum(c.passed is True for c in found)
        return [f"::notice title=linexport {workflow_property(artifact)}::{passed} checks passed"]
    return [
        f"::error title=linexport {workflow_property(artifact)} {workflow_property(c.group)}::"
        f"{workflow_message(c.name)}: {workflow_message(c.found)}"
        + (f" (allowed: {workflow_message(c.allowed)})" if c.allowed else "")
        for c in failed
    ]


def summary(artifact: str, found: Sequence[CheckResult]) -> str:
    """Return Markdown: a heading, and a row for each check."""
    failed = sum(c.passed is False for c in found)
    word = f"{failed} of {len(found)} checks failed" if failed else f"{len(found)} checks"
    lines = [f"### linexport {markdown(artifact)}: {word}", ""]
    lines += ["| check | of | found | allowed | |", "| --- | --- | ---: | ---: | --- |"]
    lines += [
        f"| {c.group} | {markdown(c.name)} | {markdown(c.found)} | {markdown(c.allowed)} | "
        f"{MARKS[c.passed]} |"
        for c in found
    ]
    return "\n".join(lines) + "\n\n"
