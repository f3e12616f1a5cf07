"""The library in older releases of ONNX Runtime, each installed for the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from linexport.plugins.cpu import library
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from tests.support.layouts import Layout
from tests.support.native import run_operator_tests
from tests.support.sessions import RemoteSession

pytestmark = pytest.mark.slow


def python_with(version: str, folder: Path) -> str:
    """A Python that has this ONNX Runtime, and a NumPy of its time."""
    place = folder / "packages"
    given = ["--no-deps", "--target", str(place), f"onnxruntime=={version}", "numpy==1.26.4"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *given])
    if done.returncode:
        pytest.skip(f"onnxruntime {version} cannot be installed here")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{place}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_the_oldest_that_is_accepted(tmp_path: Path) -> None:
    assert "passed" in run_operator_tests(
        {"LINEXPORT_TEST_PYTHON": python_with("1.18.1", tmp_path)}
    )


def test_an_older_one_says_what_it_needs(tmp_path: Path) -> None:
    model = Layout(LinearAttentionSpec(2, 2), 2).model().SerializeToString()
    with pytest.raises(RuntimeError, match=r"needs ONNX Runtime 1\.18 or newer; this is 1\.17"):
        RemoteSession(python_with("1.17.3", tmp_path), str(library.path()), model, 1)
