"""What continuous integration reads: JUnit, annotations, baselines, and the steps of templates."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from linexport.ci import github, junit, outcome, regression
from linexport.ci.figures import Figures, Timing, read_figures, save_figures
from linexport.errors import UsageError
from tests.support import FACTORIES, ROOT

pytestmark = pytest.mark.usefixtures("one_thread")

AWKWARD = 'a | b\n"<&>%: \x00\x1b,'


def checks_of(manifest: Any, name: str = "logits") -> list[outcome.CheckResult]:
    """Checks of a manifest whose first parity case failed, with a name of an output to escape."""
    first, *rest = manifest.parity.cases
    cases = (replace(first, passed=False, output=name), *rest)
    return outcome.checks(replace(manifest, parity=replace(manifest.parity, cases=cases)))


def test_junit_has_a_case_for_every_check(sample_manifest: Any) -> None:
    found = checks_of(sample_manifest, AWKWARD)
    suite = ElementTree.fromstring(junit.junit(AWKWARD, found)).find("testsuite")
    cases = suite.findall("testcase")
    assert len(cases) == len(found) == int(suite.get("tests")) > len(sample_manifest.parity.cases)
    assert len(suite.findall("testcase/failure")) == int(suite.get("failures")) == 1
    assert "allowed: 5e-05" in suite.find("testcase/failure").get("message")
    assert {case.get("classname") for case in cases} >= {"parity", "streaming"}


def test_annotations_are_one_line_each_and_the_table_keeps_its_columns(
    sample_manifest: Any,
) -> None:
    found = checks_of(sample_manifest, AWKWARD)
    [line] = github.workflow_commands("artifact", found)
    assert line.startswith("::error title=linexport artifact")
    assert "\n" not in line and "%0A" in line and "%25" in line
    rows = github.summary("artifact", found).strip().splitlines()
    assert rows[0] == f"### linexport artifact: 1 of {len(found)} checks failed"
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows[2:]} == {6}
    passed = outcome.checks(sample_manifest)
    assert github.workflow_commands("artifact", passed)[0].startswith("::notice title=")


class Again:
    """A meter that answers what it is told when it measures again."""

    def __init__(self, timing: Timing | None = None) -> None:
        self.timings, self.asked = timing, 0

    def timing(self, name: str, calls: int) -> Timing:
        self.asked += 1
        assert self.timings is not None, "nothing was to be measured again"
        return self.timings


def figures(ratio: float = 1.0, error: float = 0.005, **more: Any) -> Figures:
    latency = {"decode": Timing(2.0 * ratio, ratio, error, 40)}
    made = Figures(1, "0", "", "cpu", 0, "ort", 1e-6, 5e-5, latency, 100.0)
    return replace(made, **more)


def verdicts(before: Figures, after: Figures, again: Any = None) -> dict[str, str]:
    changes = regression.compare_figures(before, after, again or Again(), 0.1)
    return {change.name: change.verdict for change in changes}


def test_only_what_noise_does_not_explain_is_a_regression() -> None:
    same = {"latency of decode": "same", "peak memory": "same", "error": "same"}
    assert verdicts(figures(), figures(1.09)) == same
    assert verdicts(figures(), figures(1.2))["latency of decode"] == "regressed"
    assert verdicts(figures(), figures(0.8))["latency of decode"] == "better"
    noisy = figures(1.2, 0.05)
    again = Again(Timing(2.0, 1.02, 0.01, 160))
    assert verdicts(figures(), noisy, again)["latency of decode"] == "same"
    assert again.asked == 1
    still = Again(Timing(2.0, 1.2, 0.05, 160))
    assert verdicts(figures(), noisy, still)["latency of decode"] == "unclear"
    worse = Again(Timing(2.0, 1.2, 0.01, 160))
    assert verdicts(figures(), noisy, worse)["latency of decode"] == "regressed"
    other = figures(9.0, cpu="another")
    assert verdicts(figures(), other)["latency of decode"] == "not compared"
    assert verdicts(figures(), figures(memory=120.0))["peak memory"] == "regressed"
    assert verdicts(figures(memory=1.0), figures(memory=2.5))["peak memory"] == "same"
    assert verdicts(figures(), replace(figures(), error=3e-6))["error"] == "regressed"
    assert verdicts(figures(), replace(figures(), error=1.9e-6))["error"] == "same"
    assert verdicts(figures(), replace(figures(), error=None))["error"] == "regressed"


@given(st.floats(0.5, 2), st.floats(0, 0.2), st.floats(0, 0.2))
def test_equal_figures_are_never_a_regression(ratio: float, one: float, other: float) -> None:
    found = verdicts(figures(ratio, one), figures(ratio, other))
    assert set(found.values()) == {"same"}


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    save_figures(figures(), path)
    assert read_figures(path) == figures()
    path.write_text(json.dumps({**json.loads(path.read_text()), "memory": "much"}))
    with pytest.raises(UsageError, match="not a baseline: memory"):
        read_figures(path)
    for text, message in (("{", "not a baseline"), ("{}", "format None"), ("[]", "not a baseline")):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_figures(path)
    with pytest.raises(UsageError, match="--write-baseline"):
        read_figures(tmp_path / "absent")
    assert regression.parse_percent("12.5%") == 0.125
    for text in ("x", "-1%", "nan", "inf"):
        with pytest.raises(UsageError, match="expected a percentage"):
            regression.parse_percent(text)


def test_validate_beside_a_baseline(
    artifact: Path,
    factories: SimpleNamespace,
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("linexport.ci.meter.peak_megabytes", lambda *a: (50.0, None))
    monkeypatch.setattr("linexport.ci.meter.CALLS", 5)
    monkeypatch.setattr("linexport.ci.regression.MORE", 5)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    source = ("--source", factories.source("small"), "--threads", 1)
    path = tmp_path / "parity.json"
    written = cli(
        "validate", artifact, *source, "--write-baseline", path, "--github", "--junit",
        tmp_path / "report.xml",
    )  # fmt: skip
    assert written.code == 0, written.err
    assert "::notice title=" in written.out
    assert (tmp_path / "summary.md").read_text().startswith(f"### linexport {artifact}: ")
    assert ElementTree.parse(tmp_path / "report.xml").find("testsuite").get("failures") == "0"
    found = json.loads(path.read_text())
    assert set(found["latency"]) == {"prefill 512", "decode"} and found["memory"] == 50.0
    monkeypatch.setattr("linexport.ci.meter.peak_megabytes", lambda *a: (80.0, None))
    worse = cli("validate", artifact, *source, "--baseline", path, "--fail-on-regression", "900%")
    assert worse.code == 0, worse.err
    worse = cli("validate", artifact, *source, "--baseline", path, "--fail-on-regression", "50%")
    assert worse.code == 3 and "peak memory 50 -> 80 MB (+60%" in worse.err


def script_environment(folder: Path) -> dict[str, str]:
    """A shell in which pip does nothing, as linexport is installed, and linexport is this one."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "pip").write_text("#!/bin/sh\n")
    (programs / "pip").chmod(0o755)
    (programs / "linexport").symlink_to(Path(sys.executable).parent / "linexport")
    path = f"{programs}:{os.environ['PATH']}"
    summary = str(folder / "summary.md")
    own = {"PATH": path, "PYTHONPATH": str(FACTORIES), "GITHUB_STEP_SUMMARY": summary}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


@pytest.mark.services
def test_the_steps_of_the_github_action(
    artifact: Path, factories: SimpleNamespace, tmp_path: Path
) -> None:
    action = yaml.safe_load((ROOT / "docs" / "ci" / "action.yml").read_text())
    given = {name: str(one.get("default", "")) for name, one in action["inputs"].items()}
    given |= {"artifact": str(artifact), "source": factories.source("small")}
    given |= {"requirement": "wheels/linexport.whl"}
    environment = script_environment(tmp_path)

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: given[m[1]], text)

    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        own = {name: filled(value) for name, value in step["env"].items()}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", step["run"]],
            cwd=tmp_path, env={**environment, **own}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "::notice title=linexport" in done.stdout
    assert "| ✓ passed |" in (tmp_path / "summary.md").read_text()
    assert ElementTree.parse(tmp_path / "linexport.xml").find("testsuite") is not None


@pytest.mark.services
def test_the_script_of_the_gitlab_template(
    artifact: Path, factories: SimpleNamespace, tmp_path: Path
) -> None:
    template = yaml.safe_load((ROOT / "docs" / "ci" / "gitlab.yml").read_text())
    [job] = template.values()
    variables = {name: str(value) for name, value in job["variables"].items()}
    variables |= {
        "LINEXPORT_ARTIFACT": str(artifact),
        "LINEXPORT_REQUIREMENT": "wheels/linexport.whl",
        "LINEXPORT_SOURCE": factories.source("small"),
    }
    script = "\n".join([*job["before_script"], *job["script"]])
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=tmp_path, env={**script_environment(tmp_path), **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = job["artifacts"]["reports"]["junit"]
    assert ElementTree.parse(tmp_path / report).find("testsuite").get("failures") == "0"
