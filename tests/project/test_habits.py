"""Files by which the hosting of the project works: what they name exists."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT

GITHUB = ROOT / ".github"


def test_every_part_of_the_project_has_owners_by_role() -> None:
    lines = (GITHUB / "CODEOWNERS").read_text().splitlines()
    rules = [line.split() for line in lines if line and line[0] != "#"]
    assert rules[0][0] == "*"
    for path, *owners in rules:
        assert path == "*" or (ROOT / path.strip("/")).exists(), path
        assert all(re.fullmatch(r"@linexport/[a-z]+", owner) for owner in owners), owners
    assert sum(path.startswith("/exporter/") for path, *_ in rules) >= 6


def test_the_hosted_workflow_runs_what_developers_run() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert workflow["permissions"] == {"contents": "read"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_hooks_run_the_checks_of_the_smoke_tests() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert all(repository["repo"] == "local" for repository in config["repos"])
    entries = {hook["entry"].split(" --")[0] for hook in hooks}
    assert entries == {".venv/bin/ruff format", ".venv/bin/ruff check", "tools/test"}


@pytest.mark.parametrize("path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*_*.yml")), ids=str)
def test_issue_templates_ask_for_what_finds_the_cause(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    labels = [part["attributes"]["label"] for part in form["body"]]
    assert "linexport doctor" in labels and len(labels) == len(set(labels))


@pytest.mark.parametrize(
    "name",
    ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "docs/stability.md"],
)
def test_pages_that_people_look_for_are_there(name: str) -> None:
    assert len((ROOT / name).read_text().split()) > 60
