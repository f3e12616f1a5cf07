"""The pytest plugin, used by another project's tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
import pytest, torch
from dataclasses import replace
from torch import nn
from linexport import targets
from linexport.models.functional import linear_attention

class Attend(nn.Module):
    def forward(self, x):
        return linear_attention(x.relu(), x.relu(), x, q_num_heads=2, kv_num_heads=2)[0]

class Averaging(Attend):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))

ARGS = (torch.randn(2, 16, 8),)

def test_equal(linexport_parity):
    manifest = linexport_parity(Attend(), ARGS, lengths=(1, 5), batch=2, streaming=True)
    assert manifest.fused == {"LinearAttention": 1}
    assert manifest.parity.lengths == (1, 5)
    assert {case.batch for case in manifest.parity.cases} == {2}

@pytest.mark.linexport_parity(lengths=(5,), batch=1, target="onnx")
def test_wrong(linexport_parity, monkeypatch):
    right = targets.find_target("onnx")

    def wrongly(write):
        return lambda n: write(replace(n, attributes={**n.attributes, "scale": 0.3}))

    def candidates(op, node):
        found = right.candidates(op, node)
        if op.name != "LinearAttention":
            return found
        return [replace(c, write=wrongly(c.write)) for c in found]

    monkeypatch.setitem(targets.loaded, "onnx", replace(right, candidates=candidates))
    linexport_parity(Attend(), ARGS)

def test_not_streaming(linexport_parity):
    linexport_parity(Averaging(), ARGS, lengths=(5,), streaming=True)

def test_bad_batch(linexport_parity):
    linexport_parity(Attend(), ARGS, batch=0)

@pytest.mark.linexport_parity(length=3)
def test_misspelt(linexport_parity):
    linexport_parity(Attend(), ARGS)
"""


MARKED = """
def test_parity(linexport_parity):
    pass

def test_other():
    pass
"""


def run(folder: Path, *arguments: str, project: str = PROJECT) -> subprocess.CompletedProcess[str]:
    (folder / "test_export.py").write_text(project)
    command = [sys.executable, "-m", "pytest", "-p", "linexport.testing", "--show-capture=no"]
    return subprocess.run(
        [*command, *arguments, "test_export.py"], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.services
def test_failures_name_the_first_layer_token_and_state(tmp_path: Path) -> None:
    outcome = run(tmp_path, "-v").stdout
    assert "test_equal PASSED" in outcome
    assert "1 passed" in outcome and "4 failed" in outcome
    wrong = outcome.partition("__ test_wrong __")[2].partition("__ test_not_streaming __")[0]
    for text in (
        "The ONNX model of Attend differs from it.",
        "random inputs, batch 1, seq 5: relative error ",
        "the model itself (Attend)",
        "0 of row 0",
        "computed by LinearAttention",
        "(own error)",
        "test_export.py",
    ):
        assert text in wrong, outcome
    for text in (
        "The ONNX model of Averaging does not stream: exported without state",
        "batch are positive integers, not 0",
        "no keyword 'length'; expected one of lengths, batch, tolerance",
    ):
        assert text in outcome
    assert "torch.__trace" not in outcome


def test_tests_with_the_fixture_can_be_left_out(tmp_path: Path) -> None:
    chosen = ("--collect-only", "-q", "-m", "not linexport_parity")
    found = run(tmp_path, *chosen, project=MARKED).stdout
    assert "test_other" in found and "1 deselected" in found


@pytest.mark.smoke
def test_the_plugin_imports_nothing_heavy() -> None:
    script = (
        "import sys, pytest\n"
        "import linexport.testing\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'numpy', 'linexport.conversion'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
