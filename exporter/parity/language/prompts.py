"""Prompts that a language model is checked on, and how each is cut into pieces.

Rows of a padded prompt have lengths of their own, the first one all of it and the last a single
token, which is shorter than any convolution. On whichever side the padding is, the rows are the
same: each is compared with the original's outputs for that row alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from linexport.graph.dims import DimRange
from linexport.parity.cases import DEFAULT_SIZES, SIDE_BY_SIDE, Case, ChosenSizes
from linexport.system import memory

PROMPT_LENGTHS = (1, 7, 63, 64, 65, 100, 150, 1000)
LONG = 16
"""Tokens from which on a prompt of a large model is not padded on each side alone."""

PADDED_BATCH = 3
PIECES = 6
PREFILL, STEPS = 86, 64

BATCH, SEQUENCE = "batch", "seq"
NONE, LEFT, RIGHT = "no padding", "left padding", "right padding"
BOTH = "padding on both sides"

PADDINGS = {LEFT: 0.0, RIGHT: 1.0, BOTH: 0.5}
"""Share of a row's padding that is on its right."""


@dataclass(frozen=True)
class Prompt:
    """Tokens (B, T) and their mask, 1 for a token and 0 for padding, both int64."""

    tokens: np.ndarray
    mask: np.ndarray

    def part(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Inputs for the tokens from ``start`` to before ``stop``."""
        return {
            "input_ids": self.tokens[:, start:stop],
            "attention_mask": self.mask[:, start:stop],
        }

    @property
    def key(self) -> tuple[bytes, ...]:
        """Key that is equal for prompts of the same rows, wherever their padding is."""
        return tuple(tokens.tobytes() for row in self.rows() for tokens in row.tokens)

    def rows(self) -> list[Prompt]:
        """Return each row without its padding, (1, n); a prompt without padding as it is."""
        if self.mask.all():
            return [self]
        kept = self.mask.astype(bool)
        pairs = zip(self.tokens, kept, strict=True)
        return [Prompt(row[real][None], np.ones((1, real.sum()), np.int64)) for row, real in pairs]

    def real(self, logits: np.ndarray) -> np.ndarray:
        """Return logits (tokens, vocabulary) of what is not padding; without padding no copy.

        A large copy is memory-mapped: with it, the logits would be in memory twice. Values of
        whole sequences, (B, width), are returned as they are.
        """
        if self.mask.all() or logits.ndim == self.mask.ndim:
            return logits.reshape(-1, logits.shape[-1])
        shape = int(self.mask.sum()), logits.shape[-1]
        size = max(1, shape[0] * shape[1] * logits.itemsize)
        kept = np.empty(shape, logits.dtype)
        if size >= memory.MIN_MMAP_BYTES:
            kept = memory.blocks([size])[0].view(logits.dtype).reshape(shape)
        start = 0
        for row, real in zip(logits, self.mask.astype(bool), strict=True):
            stop = start + int(real.sum())
            kept[start:stop] = row[real]
            start = stop
        return kept


@dataclass(frozen=True)
class Trial:
    """A case, fed to the artifact in pieces of these lengths."""

    case: Case
    padding: str
    pieces: tuple[int, ...]

    def prompt(self, vocabulary: int) -> Prompt:
        """Draw the prompt, the same at every call."""
        sizes = self.case.sizes
        return draw_prompt(vocabulary, sizes[BATCH], sizes[SEQUENCE], self.padding, self.case.seed)


def plan_prompts(
    dims: Mapping[str, DimRange],
    context: int | None,
    seed: int,
    chosen: ChosenSizes = DEFAULT_SIZES,
    continued: bool = True,
    behind: int = 0,
    packed: bool = False,
    sides: bool = True,
) -> list[Trial]:
    """Return every case.

    Args:
        dims: the dynamic dimensions.
        context: how many tokens the model was made for, None if unlimited.
        seed: of the tokens.
        chosen: lengths and batches of the whole sequences, in place of the usual ones.
        continued: whether sequences can be fed in pieces.
        behind: a length at which constants that reach back have done so, 0 without any.
        packed: whether rows can be fed side by side.
        sides: have padding on each side alone in every prompt, and not in short ones alone.
    """
    pieces = _continued(context, seed) if continued else ()
    whole = list(_whole(dims, context, seed, chosen, packed, sides))
    fits = dims[SEQUENCE].allows(behind) and behind <= (behind if context is None else context)
    if fits and not chosen.lengths and behind > max(t.case.sizes[SEQUENCE] for t in whole):
        sizes = {BATCH: dims[BATCH].nearest(1), SEQUENCE: behind}
        whole.append(Trial(Case(NONE, sizes, seed + len(whole)), NONE, (behind,)))
    return [*whole, *pieces]


def draw_prompt(vocabulary: int, batch: int, length: int, padding: str, seed: int) -> Prompt:
    """Random tokens. Padding leaves the first row whole and the last with a single token.

    A single row keeps half of its tokens. What is padding is random tokens as well.
    """
    choose = np.random.default_rng(seed)
    tokens = choose.integers(vocabulary, size=(batch, length))
    mask = np.ones((batch, length), np.int64)
    for row in range(batch if padding != NONE else 0):
        padded = (length - 1) * row // (batch - 1) if batch > 1 else length // 2
        mask[row, :padded] = 0
        right = round(padded * PADDINGS.get(padding, 0.0))
        tokens[row], mask[row] = np.roll(tokens[row], -right), np.roll(mask[row], -right)
    return Prompt(tokens.astype(np.int64), mask)


def _whole(
    dims: Mapping[str, DimRange],
    context: int | None,
    seed: int,
    chosen: ChosenSizes,
    packed: bool,
    sides: bool,
) -> Iterator[Trial]:
    """Whole sequences in one call: without padding, and in a batch with padding on each side.

    The first row of such a batch is the sequence without padding, for which the original is run
    once. Its rows are also fed side by side, where they can be.
    """
    more = [SIDE_BY_SIDE] if packed else []
    wanted = chosen.lengths or PROMPT_LENGTHS
    lengths = [n for n in wanted if dims[SEQUENCE].allows(n) and (context is None or n <= context)]
    first, *_, last = chosen.batches * 2 or (1, PADDED_BATCH)
    for number, length in enumerate(lengths or [dims[SEQUENCE].nearest(1)]):
        paddings = PADDINGS if sides or length < LONG else (BOTH,)
        batches = [(padding, last) for padding in ((*paddings, *more) if length > 1 else (NONE,))]
        for padding, batch in [(NONE, first), *batches]:
            found = {BATCH: dims[BATCH].nearest(batch), SEQUENCE: length}
            yield Trial(Case(padding, found, seed + 2 * number + 1), padding, (length,))


def _continued(context: int | None, seed: int) -> Iterator[Trial]:
    """A sequence in random pieces, its last tokens one by one."""
    steps = STEPS if context is None else max(1, min(STEPS, context // 2))
    whole = PREFILL + steps if context is None else max(2, min(PREFILL + steps, context))
    first = whole - steps
    for batch, padding in ((1, NONE), (PADDED_BATCH, LEFT)):
        name = f"{PIECES} pieces, then {steps} tokens, {padding}"
        choose = random.Random(seed)
        cuts = sorted(choose.sample(range(1, first), min(PIECES - 1, first - 1)))
        pieces = [b - a for a, b in zip([0, *cuts], [*cuts, first], strict=True)]
        case = Case(name, {BATCH: batch, SEQUENCE: whole}, seed)
        yield Trial(case, padding, (*pieces, *[1] * steps))
