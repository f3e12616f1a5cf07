"""What an installed linexport has beside its modules."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.support import ROOT

FOR_READERS = {"plugins/kernels/README.md"}
"""Files that nothing reads when linexport is used."""


def test_every_file_that_is_no_module_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page, template or source that is not declared is missing from the wheel, silently."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    folders = given["package_dir"]
    declared = {
        path.as_posix()
        for package, patterns in given["package_data"].items()
        for pattern in patterns
        for path in (ROOT / folders[package]).glob(pattern)
    }
    listed = subprocess.run(
        ["git", "ls-files", *folders.values()], capture_output=True, text=True, check=True
    )
    present = {name for name in listed.stdout.splitlines() if not name.endswith(".py")}
    expected = {(ROOT / name).as_posix() for name in present - FOR_READERS}
    assert expected and expected <= declared


@pytest.mark.services
@pytest.mark.parametrize("compiler", [None, "false"])
def test_installs_where_the_library_cannot_be_compiled(
    compiler: str | None, tmp_path: Path
) -> None:
    """No compiler on the path, and one that fails: a pure wheel; doctor says what is missing."""
    source, wheels, place = (tmp_path / name for name in ("source", "wheels", "place"))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    if compiler:
        environment |= dict.fromkeys(("CC", "CXX"), str(shutil.which(compiler)))

    def run(*command: str, **more: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", *command],
            env=environment | more,
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        ).stdout

    pip = ("pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
    (wheel,) = wheels.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist())
    run(*pip, "install", "--no-deps", "--target", str(place), str(wheel))
    report = json.loads(run("linexport", "doctor", "--json", PYTHONPATH=str(place)))
    assert report["ok"]
    assert "was not built" in report["libraries"]["CPU library"]["error"]
    missing = {item["what"]: item["install"] for item in report["missing"]}
    assert "where g++ or clang++ is installed" in missing["CPU library"]
