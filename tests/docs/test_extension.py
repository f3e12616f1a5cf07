"""``examples/extension``, installed as a package: each addition through the public command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from tests.support import ROOT
from tests.support.families import TINY, save_model

pytestmark = pytest.mark.services

SOURCE = ROOT / "examples" / "extension"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def linexport(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``linexport(*arguments)``: the program, in an environment that has the package."""
    work = tmp_path_factory.mktemp("extension")
    shutil.copytree(SOURCE, work / "source")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    pip = (sys.executable, "-m", "pip", "install", *offline, "--target", work / "site")
    subprocess.run([*pip, work / "source"], check=True, capture_output=True)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "linexport", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(work / "site"), "COLUMNS": "200"}
        done = subprocess.run(
            command, cwd=work / "source", env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def test_its_map_is_listed(linexport: Run) -> None:
    maps = {m["map"]: m for m in json.loads(linexport("maps", "--json").stdout)["maps"]}
    assert maps["squareplus"]["kernel"] == "squareplus(q) . squareplus(k)"


def test_its_target_is_in_the_help(linexport: Run) -> None:
    text = " ".join(linexport("convert", "--help").stdout.replace("│", " ").split())
    assert "ort, ort-cuda, plain-ort, tensorrt" in text


def test_map_op_pass_and_target_in_one_conversion(linexport: Run, tmp_path: Path) -> None:
    options = ("--target", "plain-ort", "--dump-passes", tmp_path / "graphs", "--no-bench")
    done = linexport("convert", "model:build", "-o", tmp_path / "artifact", *options, "--json")
    manifest = json.loads(done.stdout)
    assert manifest["status"] == "ok"
    assert manifest["target"] == "plain-ort"
    assert manifest["fused"] == {"TokenShift": 1, "LinearAttention": 1, "FeatureMap": 2}
    assert manifest["streaming"]["passed"] is True
    assert "past_token_0" in {s["past"] for s in manifest["states"]}
    [record] = [p for p in manifest["passes"] if p["name"] == "drop_double_negation"]
    assert record["changed"] and record["nodes_before"] - record["nodes_after"] == 2
    [diff] = (tmp_path / "graphs").glob("*_drop_double_negation.diff")
    assert diff.read_text().count("- Neg ") == 2
    model = onnx.load(tmp_path / "artifact" / "model.onnx")
    assert "Neg" not in {node.op_type for node in model.graph.node}
    attention = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    assert b"squareplus" in {a.s for a in attention.attribute}


def test_its_patch_applies_while_tracing(linexport: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_model(TINY["lfm2"], "lfm2", tmp_path / "model")
    done = linexport(
        "convert", tmp_path / "model", "-o", tmp_path / "artifact", "--no-bench", "-v", "--json"
    )
    assert "modeling_lfm2.rotate_half is swapped while the model is traced" in done.stderr
    assert json.loads(done.stdout)["status"] == "ok"
