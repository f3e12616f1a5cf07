"""tools/wheels: one wheel a platform, which installs and converts in an environment of its own."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT


def test_every_supported_python_has_a_wheel_elsewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {line.split()[-1] for line in project["project"]["classifiers"] if "3." in line}
    built = project["tool"]["cibuildwheel"]["build"].split()
    assert found == {f"3.{name.removeprefix('cp3').removesuffix('-*')}" for name in built}


@pytest.mark.slow
def test_a_wheel_converts_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Other packages are those of this environment; linexport is the wheel's."""
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("needs a C++ compiler: install g++")
    environment = {**os.environ, "LINEXPORT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(c) for c in command],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run(ROOT / "tools" / "wheels", tmp_path / "dist")
    (wheel,), (source,) = ((tmp_path / "dist").glob(name) for name in ("*.whl", "*.tar.gz"))
    assert str(wheel) in said and f"{sys.version_info[0]}.{sys.version_info[1]}" in said
    tag = wheel.stem.split("-")[-3:]
    assert tag[:2] == ["py3", "none"] and tag[2].endswith(platform.machine())
    names = zipfile.ZipFile(wheel).namelist()
    assert {Path(name).name for name in names if name.endswith(".so")} == {
        "liblinexport_cpu.so",
        "liblinexport_cuda.so",
    }
    assert not any(name.startswith(("tests/", "tools/", "exporter/")) for name in names)
    with tarfile.open(source) as archive:
        assert any(name.endswith("plugins/cpu/cpp/library.h") for name in archive.getnames())

    run(sys.executable, "-m", "venv", "new")
    python = tmp_path / "new" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (own / "others.pth").write_text("\n".join(others))
    assert run(python, "-c", "import linexport; print(linexport.__file__)").startswith(str(own))
    linexport = tmp_path / "new" / "bin" / "linexport"
    assert run(linexport, "plugins", "path", "cpu").startswith(str(own))
    example = ROOT / "examples" / "own_layer"
    environment["PYTHONPATH"] = str(example)
    printed = run(linexport, "convert", "gated:build", "--output", "out", "--no-bench")
    assert "1 LinearAttention" in printed and "✓ passed" in printed
    assert "CPU library against the functions" in " ".join(printed.split())
