"""Parity of a causal language model: logits with padding, prefill in pieces, greedy decoding.

Everything is compared with the original run once over the whole sequence, without a cache. So is
greedy decoding: that the original's likeliest token after each prefix of what the artifact wrote is
the token the artifact wrote next means, by induction, that it would have written the same.

Logits of padded tokens are nobody's business and are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from linexport import heap
from linexport.dims import DimRange
from linexport.loaders.model import Language, LoadedModel
from linexport.parity.cases import Case
from linexport.parity.check import Parity, Subject
from linexport.parity.compare import compare
from linexport.parity.reference import Reference
from linexport.parity.tolerances import TOLERANCES, Tolerance
from linexport.targets import Session

LENGTHS = (1, 7, 63, 64, 65, 100, 150, 1000)
PADDED_BATCH = 3
PIECES = 6
PREFILL, STEPS = 86, 64
PROMPT, GREEDY_STEPS = 16, 128

BATCH, SEQUENCE = "batch", "seq"
NONE, LEFT, RIGHT = "no padding", "left padding", "right padding"


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


@dataclass(frozen=True)
class Greedy:
    """Outcome of greedy decoding.

    Attributes:
        steps: tokens written per row.
        rows: sequences.
        different: how many of them the original would not have written.
        ties: how many of these it would nearly have: its two likeliest are within tolerance.
    """

    steps: int
    rows: int
    different: int
    ties: int

    @property
    def passed(self) -> bool:
        """All tokens are the original's, but for ties."""
        return self.different == self.ties

    def json(self) -> dict[str, Any]:
        """As written to the manifest."""
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class Trial:
    """A case, fed to the artifact in pieces of these lengths."""

    case: Case
    padding: str
    pieces: tuple[int, ...]


@heap.frugal()
def check_language(subject: Subject, seed: int = 0) -> Parity:
    """Run every case on the original, a language model, in float32, and then on the artifact."""
    language = subject.loaded.language
    assert language is not None
    trials = [*_whole(subject.dims, language.context, seed), *_continued(language.context, seed)]
    original = _Original(subject.loaded)
    expected = [original.answer(_prompt(language.vocabulary, trial)) for trial in trials]
    checked = _Check(subject, language, Parity(TOLERANCES["float32"]), subject.open())
    for trial, logits in zip(trials, expected, strict=True):
        checked.compare(trial, logits)
        heap.give_back()
    parity, (written, length) = checked.parity, checked.write(seed)
    del checked  # and with it the session
    heap.give_back()
    parity.greedy = _greedy(original, written, length, parity.tolerance).json()
    return parity


def plan(dims: Mapping[str, DimRange], context: int | None) -> Iterator[tuple[int, int, str]]:
    """Length, batch and padding of every case of a whole sequence."""
    lengths = [n for n in LENGTHS if dims[SEQUENCE].allows(n) and (context is None or n <= context)]
    for length in lengths or [dims[SEQUENCE].nearest(1)]:
        yield length, dims[BATCH].nearest(1), NONE
        for padding in (LEFT, RIGHT) if length > 1 else (NONE,):
            yield length, dims[BATCH].nearest(PADDED_BATCH), padding


def draw_prompt(vocabulary: int, batch: int, length: int, padding: str, seed: int) -> Prompt:
    """Random tokens. Padding leaves the first row whole and the last with a single token."""
    choose = np.random.default_rng(seed)
    tokens = choose.integers(vocabulary, size=(batch, length))
    mask = np.ones((batch, length), np.int64)
    for row in range(batch if padding != NONE else 0):
        padded = (length - 1) * row // max(batch - 1, 1)
        if padding == LEFT:
            mask[row, :padded] = 0
        else:
            mask[row, length - padded :] = 0
    return Prompt(tokens.astype(np.int64), mask)


def _whole(dims: Mapping[str, DimRange], context: int | None, seed: int) -> Iterator[Trial]:
    """Whole sequences in one call."""
    for number, (length, batch, padding) in enumerate(plan(dims, context)):
        case = Case(padding, {BATCH: batch, SEQUENCE: length}, seed + number)
        yield Trial(case, padding, (length,))


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


def _prompt(vocabulary: int, trial: Trial) -> Prompt:
    sizes = trial.case.sizes
    return draw_prompt(vocabulary, sizes[BATCH], sizes[SEQUENCE], trial.padding, trial.case.seed)


class _Original:
    def __init__(self, loaded: LoadedModel) -> None:
        self.reference = Reference(loaded, torch.float32)

    def logits(self, prompt: Prompt) -> np.ndarray:
        """(B, T, vocabulary)."""
        given = (torch.from_numpy(prompt.tokens), torch.from_numpy(prompt.mask))
        [logits] = self.reference((given, {}))
        return logits

    def answer(self, prompt: Prompt) -> np.ndarray:
        """(tokens, vocabulary), of those that are not padding."""
        [kept] = heap.paged([_real(self.logits(prompt), prompt)])
        heap.give_back()
        return kept


def _real(logits: np.ndarray, prompt: Prompt) -> np.ndarray:
    """Those of tokens that are not padding; where none is, without a copy."""
    if prompt.mask.all():
        return logits.reshape(-1, logits.shape[-1])
    real: np.ndarray = logits[prompt.mask.astype(bool)]
    return real


def _greedy(original: _Original, written: Prompt, length: int, tolerance: Tolerance) -> Greedy:
    """What the artifact wrote after prompts of that length, beside the original's likeliest."""
    before = Prompt(written.tokens[:, :-1], written.mask[:, :-1])
    expected = original.logits(before)[:, length - 1 :]
    tokens = written.tokens[:, length:]
    best = expected.max(-1)
    taken = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    near = best - taken <= 2 * (tolerance.absolute + tolerance.relative * np.abs(best).max())
    different = expected.argmax(-1) != tokens
    rows, steps = tokens.shape
    return Greedy(steps, rows, int(different.sum()), int((different & near).sum()))


class _Check:
    def __init__(
        self, subject: Subject, language: Language, parity: Parity, session: Session
    ) -> None:
        self.subject, self.language = subject, language
        self.parity, self.session = parity, session

    def write(self, seed: int) -> tuple[Prompt, int]:
        """The likeliest token after another, from prompts of which one is padded.

        Returns the prompts with what was written, and the length of the prompts.
        """
        limit = self.language.context or PROMPT + GREEDY_STEPS
        length = min(PROMPT, max(1, limit // 2))
        steps = min(GREEDY_STEPS, limit - length)
        prompt = draw_prompt(self.language.vocabulary, 2, length, LEFT, seed)
        state = self.subject.initial_state(2)
        tokens, mask = prompt.tokens, prompt.mask
        feeds = prompt.part(0, length)
        for _ in range(steps):
            logits, state = self._call(feeds, state)
            chosen = logits[:, -1:].argmax(-1)
            feeds = Prompt(chosen, np.ones_like(chosen)).part(0, 1)
            tokens = np.concatenate([tokens, chosen], 1)
            mask = np.concatenate([mask, np.ones_like(chosen)], 1)
        return Prompt(tokens, mask), length

    def compare(self, trial: Trial, expected: np.ndarray) -> None:
        """The artifact's logits of tokens that are not padding with those expected."""
        case, prompt = trial.case, _prompt(self.language.vocabulary, trial)
        reason = None
        try:
            got = _real(self._in_pieces(prompt, trial.pieces), prompt)
        except Exception as error:
            got = np.zeros((0,), np.float32)
            reason = f"the artifact fails at this size: {str(error).splitlines()[0]}"
        result = compare(expected, got, self.parity.tolerance)
        self.parity.counts += np.asarray(result.counts)
        record = {
            "name": case.name,
            "batch": case.sizes[BATCH],
            "length": case.sizes[SEQUENCE],
            "sizes": dict(case.sizes),
            "seed": case.seed,
            "magnitude": case.magnitude,
            "reference": "float32",
            "denominator": None,
            "output": "logits",
            **result.json(),
        }
        if reason is not None:
            record["reason"] = reason
        self.parity.cases.append(record)
        if self.parity.failed is None and not result.passed and len(trial.pieces) == 1:
            self.parity.failed = case

    def _in_pieces(self, prompt: Prompt, pieces: Sequence[int]) -> np.ndarray:
        state = self.subject.initial_state(prompt.tokens.shape[0])
        parts, start = [], 0
        for size in pieces:
            logits, state = self._call(prompt.part(start, start + size), state)
            parts.append(logits)
            start += size
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    def _call(
        self, feeds: dict[str, np.ndarray], state: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        outputs = self.session.run({**feeds, **state})
        after = {s.past: outputs[s.present] for s in self.subject.states}
        return outputs[self.subject.output_names[0]], after
