"""``OpenedFolder``: the folder of an artifact, whose files were verified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from linexport.manifest import Manifest
from linexport.manifest.records import FileRecord


class OpenedFolder(Protocol):
    """An artifact's folder, opened to run or not.

    Attributes:
        path: the folder.
        manifest: of it.
        verified: files whose digests held, by name.
    """

    @property
    def path(self) -> Path: ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def verified(self) -> Mapping[str, FileRecord]: ...
