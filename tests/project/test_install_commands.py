"""Commands that install linexport work: what they name is in one place, which a release changes."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from pages import install_commands

from linexport.inspection import doctor
from linexport.system import install
from tests.support import ROOT

pytestmark = pytest.mark.smoke

OWN = {"exporter/system/install.py", "tools/pages/install_commands.py"}
"""Where the command is made, and where pages get it from."""

NAMED = re.compile(r"linexport\[[\w,-]+\]|pip install[^\n`]*?[ '\"](linexport)(?![\w/.-]|\[)")
"""An extra by the name of an index, or linexport itself as what pip installs."""


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    suffixes = {".py", ".md", ".yml", ".yaml", ".cff", ".html", ".txt", ""}
    paths = (Path(name) for name in listed.stdout.splitlines())
    return [p for p in paths if p.suffix in suffixes and (ROOT / p).is_file()]


def test_no_text_names_an_index_that_does_not_have_linexport() -> None:
    found = [
        f"{path}: {match[0]}"
        for path in tracked()
        if path.as_posix() not in OWN | {"tests/project/test_install_commands.py"}
        for match in NAMED.finditer((ROOT / path).read_text("utf-8", "replace"))
    ]
    assert install.SOURCE != "linexport"
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "wrong",
    ["pip install linexport", "pip install -U 'linexport[hf]'", "needs the extra linexport[serve]"],
)
def test_the_search_finds(wrong: str) -> None:
    assert NAMED.search(wrong)


def test_no_module_types_the_command_itself() -> None:
    found = [
        path.as_posix()
        for path in tracked()
        if path.parts[0] in ("exporter", "models", "plugins") and path.suffix == ".py"
        if path.as_posix() not in OWN
        if re.search(r"pip install[^\n]*[ '\"]\.(\[|['\" ])", (ROOT / path).read_text("utf-8"))
    ]
    assert not found


def test_extras_of_messages_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra
        for folder in ("exporter", "models", "plugins")
        for path in (ROOT / folder).rglob("*.py")
        for extra in re.findall(r"pip_install(?:_here)?\(['\"]([\w-]+)['\"]", path.read_text())
    }
    assert len(named) >= 8
    assert named | {e.extra for e in doctor.EXTRAS.values()} <= set(extras["optional-dependencies"])


def test_a_release_changes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (
        "Run `pip install .`, or\n\npip install '.[hf]'\npip install --no-deps .\npip install ./x\n"
    )
    monkeypatch.setattr(install_commands, "SOURCE", "linexport")
    released = install_commands.current(page)
    assert released == (
        "Run `pip install linexport`, or\n\npip install 'linexport[hf]'\n"
        "pip install --no-deps linexport\npip install ./x\n"
    )
    monkeypatch.setattr(install_commands, "SOURCE", ".")
    assert install_commands.current(released) == page


def test_messages_say_where_the_command_works() -> None:
    assert install.pip_install_here("hf") == (
        "pip install '.[hf]' in a clone of linexport, or its wheel's path for the dot"
    )
