"""A tree of links in which the package has its import names, for mkdocstrings to read.

The repository's folders exporter/, models/ and plugins/ are ``linexport``, ``linexport.models`` and
``linexport.plugins``, which a tool that reads files without importing them cannot know.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parent.parent.parent


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any, **_: Any) -> Any:
    """Make the tree and tell mkdocstrings; called by mkdocs."""
    tree = Path(tempfile.mkdtemp(prefix="linexport-docs-"))
    package = tree / "linexport"
    package.mkdir()
    for part in [*(ROOT / "exporter").iterdir(), ROOT / "models", ROOT / "plugins"]:
        (package / part.name).symlink_to(part)
    config["plugins"]["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(tree)]
    return config
