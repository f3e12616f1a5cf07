"""What an installed linexport has beside its modules."""

from __future__ import annotations

import runpy
import subprocess
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
