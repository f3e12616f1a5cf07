"""The package as editors and type checkers find it.

    python tools/package_layout.py

An editable install maps folders to packages by an import hook, which static tools do not follow:
the three folders are laid out as ``linexport`` by links, in ``build/layout``. ``pyproject.toml``
points mypy and pyright there; a new file is seen at once, a new entry of ``exporter/`` after this
has run, as ``tools/environment`` and ``tools/typecheck`` do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "layout"


def lay_out() -> Path:
    """Make the folder anew; returns the one to search for packages."""
    shutil.rmtree(PLACE, ignore_errors=True)
    package = PLACE / "linexport"
    package.mkdir(parents=True)
    for entry in (ROOT / "exporter").iterdir():
        (package / entry.name).symlink_to(entry)
    for folder in ("models", "plugins"):
        (package / folder).symlink_to(ROOT / folder)
    return PLACE


if __name__ == "__main__":
    lay_out()
