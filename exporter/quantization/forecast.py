"""Memory and disk that weights in fewer bits take to make, said and checked before.

    memory    BASE + part of the float32 weights + logits of the longest prompt, or of many words
              those that are computed at once
    disk      weights in files without a name and models that are opened meanwhile, in TMPDIR;
              the float32 artifact and the new one, in the output's folder

Parts of disk are those of the files that are written. Weights are in mapped files, which leave
memory when others need it; a part of them is in use. ``tools/bench_memory.py`` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linexport.parity.language import split
from linexport.system import room
from linexport.system.progress import Progress

WHOLE, LAYERS, QUANTISE = "whole", "layers", "quantise"
"""Kinds of work: a conversion, proven as a whole or by layers, and quantising an artifact."""

BASE = 3 * room.GIB // 4
"""Bytes of libraries, and of what does not depend on the model."""

IN_MEMORY = {WHOLE: 0.5, LAYERS: 0.3, QUANTISE: 0.4}
IN_TEMPORARY = {WHOLE: 2.3, LAYERS: 2.3, QUANTISE: 1.3}
AT_OUTPUT = {WHOLE: 1.4, LAYERS: 1.4, QUANTISE: 0.4}
"""Parts of the float32 weights, by what is done."""

LOGITS = {WHOLE: 3 * 1000, LAYERS: 3 * 300, QUANTISE: 2 * 256}
"""Tokens whose logits are in memory at once."""

COPIES = 1.25
"""Times that those are there: some are copied, a row at a time."""

PART = 3 * split.AT_ONCE
"""Logits in memory where a head is compared in parts: the original's, the artifact's, a copy."""

SMALL = 2**28
"""Bytes of float32 weights below which nothing is said."""


@dataclass(frozen=True)
class ModelSize:
    """Size of a model.

    Attributes:
        weights: bytes in float32; None: not known.
        vocabulary: logits of a token, 0 where there are none.
    """

    weights: int | None
    vocabulary: int = 0


def memory(what: str, size: ModelSize) -> int:
    """Return the bytes of memory that work on a model takes."""
    logits = 4 * LOGITS[what] * size.vocabulary
    if what == WHOLE and size.vocabulary >= split.MIN_VOCABULARY:
        logits = min(logits, 4 * max(PART, LOGITS[QUANTISE] * size.vocabulary))
    return BASE + int(IN_MEMORY[what] * (size.weights or 0) + COPIES * logits)


def fits(what: str, size: ModelSize) -> bool:
    """Return whether there is the memory for it, as far as anything says so."""
    return size.weights is None or size.weights < SMALL or room.fits(memory(what, size))


def announce(what: str, size: ModelSize, output: Path, shown: Progress) -> None:
    """Say what work on a model takes, and refuse it where that is not there.

    Args:
        what: WHOLE or LAYERS, which begin at a source, or QUANTISE, at a float32 artifact.
        size: of the model.
        output: the artifact to be made.
        shown: gets the sentence.

    Raises:
        EnvironmentProblemError: there is not enough memory or disk.
    """
    if size.weights is None or size.weights < SMALL:
        return
    disk = {
        room.temporary(): int(IN_TEMPORARY[what] * size.weights),
        output.absolute().parent: int(AT_OUTPUT[what] * size.weights),
    }
    needs = room.Needs(memory(what, size), disk)
    shown.note(needs.described())
    room.check(needs)
