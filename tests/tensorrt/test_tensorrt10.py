"""TensorRT 10, which Jetson has: the library is found by the version of the Python module."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from linexport.plugins.tensorrt.stub_library import MACHINES, image
from tests.support import ROOT, SCRIPTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libraries are found by name")

LOAD = """
import ctypes
from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.flavour import TENSORRT
try:
    print("loaded", TENSORRT.load().__version__)
    ctypes.CDLL("libnvinfer.so")
except EnvironmentProblemError as error:
    print(error)
"""


QUICK = """
from linexport.errors import EnvironmentProblemError
from linexport.plugins.tensorrt.flavour import TENSORRT
from linexport.plugins.tensorrt.quick_plugin import register
try:
    register(TENSORRT)
except EnvironmentProblemError as error:
    print(error)
"""


def library(folder: Path, name: str) -> None:
    """Write a library of this name, without code, for this machine."""
    (folder / name).write_bytes(image(name, ["libc.so.6"], MACHINES[platform.machine()]))


def said(folder: Path, version: str, program: str = LOAD) -> str:
    """What loading says where Python has a module of this version, in a process of its own."""
    (folder / "tensorrt.py").write_text(f"__version__ = {version!r}\n")
    found = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **found}, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("version", ["10.3.0", "10.13.3.9", "11.5.0.1"])
def test_the_library_has_the_number_of_the_module(tmp_path: Path, version: str) -> None:
    library(tmp_path, f"libnvinfer.so.{version.partition('.')[0]}")
    assert said(tmp_path, version) == f"loaded {version}"


def test_a_missing_library_is_the_one_of_the_version(tmp_path: Path) -> None:
    library(tmp_path, "libnvinfer.so.11")
    text = said(tmp_path, "10.3.0")
    assert "TensorRT 10.3.0 is installed for Python" in text and "libnvinfer.so.10" in text
    assert "libnvinfer.so.11" not in text and "LD_LIBRARY_PATH" in text


@pytest.mark.parametrize("version", ["8.5.2.2", "", "unknown"])
def test_a_version_without_these_plugins_is_refused(tmp_path: Path, version: str) -> None:
    library(tmp_path, "libnvinfer.so.8")
    text = said(tmp_path, version)
    assert "expected 10 or newer" in text and "JetPack" in text
    assert (version or "without a version") in text


def test_quick_plugins_are_of_later_versions(tmp_path: Path) -> None:
    """TensorRT 10.3 has no such package."""
    library(tmp_path, "libnvinfer.so.10")
    text = said(tmp_path, "10.3.0", QUICK)
    assert "TensorRT 10.3.0 has no quickly deployable plugins" in text and "--quick" in text


@pytest.mark.services
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the package of PyPI is for x86_64")
def test_plugins_are_those_of_the_real_module(tmp_path: Path) -> None:
    """The Python module of TensorRT 10.16 over its lean runtime, which has no builder."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler")
    packages = ROOT / ".tensorrt10"
    tool = [str(ROOT / "tools/tensorrt10_environment"), str(packages)]
    subprocess.run(tool, check=True, env={**os.environ, "PYTHON": sys.executable})
    parser = "libnvonnxparser.so.10"
    source = ROOT / "tests/support/cpp/tensorrt10_builder.cpp"
    built = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{parser}", str(source)]
    subprocess.run([*built, "-o", str(tmp_path / parser)], check=True)
    for name in ("libnvinfer.so.10", "libnvinfer_plugin.so.10"):
        needed = ["libnvinfer_lean.so.10", parser]
        (tmp_path / name).write_bytes(image(name, needed, MACHINES["x86_64"]))
    folders = f"{tmp_path}:{packages / 'tensorrt_lean_libs'}"
    paths = {"LD_LIBRARY_PATH": folders, "PYTHONPATH": f"{packages}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "tensorrt10.py")],
        capture_output=True,
        text=True,
        env={**os.environ, **paths},
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["loaded 10.16.1.11", "registered 5 plugins"]
