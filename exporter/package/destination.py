"""Interface of a destination, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
        even: prompts of a batch need one length.
        proof: what the package does in its own runtime; None where it was not run.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    even: bool = False
    proof: str | None = None


@dataclass(frozen=True)
class BatchPrompts:
    """Prompts of a batch that is to be continued, the token of the largest logit at each step.

    Attributes:
        rows: token ids of each.
        tokens: to write.
        ends: tokens that end a text.
        padding: the token that stands for none.
    """

    rows: tuple[np.ndarray, ...]
    tokens: int
    ends: frozenset[int]
    padding: int


@dataclass(frozen=True)
class WrittenTexts:
    """Texts that a runtime wrote.

    Attributes:
        runtime: name and version.
        rows: tokens of each; what follows one that ends a text means nothing.
    """

    runtime: str
    rows: Sequence[list[int]]


@dataclass(frozen=True)
class Destination:
    """A system that artifacts are delivered to.

    Attributes:
        name: as users choose it.
        help: one line for people.
        write: writes the folder; raises UsageError for a model that the system cannot hold.
        options: names of its options, with a line of help each.
        by_linexport: linexport itself runs the artifact there, with the models of the artifact.
        write_texts: continues prompts with a package in its own runtime; raises
            EnvironmentProblemError where that is not installed. None where it cannot run here.
        by_prompt: it continues each prompt by itself, so that nothing is padded.
    """

    name: str
    help: str
    write: Callable[[Packaging], Packaged]
    options: Mapping[str, str] = field(default_factory=dict)
    by_linexport: bool = False
    write_texts: Callable[[Packaging, BatchPrompts], WrittenTexts] | None = None
    by_prompt: bool = False
