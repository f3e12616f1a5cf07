"""Interface of a destination, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from linexport.manifest import Manifest


@dataclass(frozen=True)
class Packaging:
    """Input of a destination.

    Attributes:
        source: folder of the artifact, whose files were checked.
        manifest: of it.
        folder: an empty folder to write to.
        name: what the model is called there.
        options: of the destination, by name.
    """

    source: Path
    manifest: Manifest
    folder: Path
    name: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Packaged:
    """Outcome of a destination.

    Attributes:
        renamed: names of inputs and outputs that were changed, old to new.
        notes: what users should know.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Destination:
    """A system that artifacts are delivered to.

    Attributes:
        name: as users choose it.
        help: one line for people.
        write: writes the folder; raises UsageError for a model that the system cannot hold.
        options: names of its options, with a line of help each.
        by_linexport: linexport itself runs the artifact there, with the models beside it.
    """

    name: str
    help: str
    write: Callable[[Packaging], Packaged]
    options: Mapping[str, str] = field(default_factory=dict)
    by_linexport: bool = False
