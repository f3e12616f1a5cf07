"""Parity of a causal language model: logits with padding, prefill in pieces, greedy decoding.

Everything is compared with the original run once over the whole sequence, without a cache. So is
greedy decoding: that the original's likeliest token after each prefix of what the artifact wrote is
the token the artifact wrote next means, by induction, that it would have written the same.

Logits of padded tokens are nobody's business and are left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from linexport.dims import DimRange
from linexport.loaders.model import Language
from linexport.parity.cases import Case
from linexport.parity.check import Parity, Subject
from linexport.parity.compare import compare
from linexport.parity.tolerances import TOLERANCES

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


def check_language(subject: Subject, seed: int = 0) -> Parity:
    """Run every case on the artifact and on the original, a language model, in float32."""
    language = subject.loaded.language
    assert language is not None
    checked = _Check(subject, language, Parity(TOLERANCES["float32"]))
    limit = language.context
    for number, (length, batch, padding) in enumerate(plan(subject.dims, limit)):
        checked.prefill(Case(padding, {BATCH: batch, SEQUENCE: length}, seed + number), padding)
    steps = STEPS if limit is None else max(1, min(STEPS, limit // 2))
    whole = PREFILL + steps if limit is None else max(2, min(PREFILL + steps, limit))
    for batch, padding in ((1, NONE), (PADDED_BATCH, LEFT)):
        name = f"{PIECES} pieces, then {steps} tokens, {padding}"
        checked.continued(Case(name, {BATCH: batch, SEQUENCE: whole}, seed), padding, steps)
    checked.parity.greedy = checked.greedy(seed).json()
    return checked.parity


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


class _Check:
    def __init__(self, subject: Subject, language: Language, parity: Parity) -> None:
        self.subject, self.language, self.parity = subject, language, parity

    def prefill(self, case: Case, padding: str) -> None:
        """The whole sequence in one call."""
        self._compare(case, self._prompt(case, padding), [case.sizes[SEQUENCE]])

    def continued(self, case: Case, padding: str, steps: int) -> None:
        """The sequence in random pieces, the last ``steps`` tokens one by one."""
        first = case.sizes[SEQUENCE] - steps
        choose = random.Random(case.seed)
        cuts = sorted(choose.sample(range(1, first), min(PIECES - 1, first - 1)))
        pieces = [b - a for a, b in zip([0, *cuts], [*cuts, first], strict=True)]
        self._compare(case, self._prompt(case, padding), [*pieces, *[1] * steps])

    def greedy(self, seed: int) -> Greedy:
        """The likeliest token after another, from prompts of which one is padded."""
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
        expected = self._original(Prompt(tokens[:, :-1], mask[:, :-1]))[:, length - 1 :]
        written = tokens[:, length:]
        best = expected.max(-1)
        taken = np.take_along_axis(expected, written[..., None], -1)[..., 0]
        tolerance = self.parity.tolerance
        near = best - taken <= 2 * (tolerance.absolute + tolerance.relative * np.abs(best).max())
        different = expected.argmax(-1) != written
        return Greedy(steps, 2, int(different.sum()), int((different & near).sum()))

    def _prompt(self, case: Case, padding: str) -> Prompt:
        sizes = case.sizes
        return draw_prompt(
            self.language.vocabulary, sizes[BATCH], sizes[SEQUENCE], padding, case.seed
        )

    def _compare(self, case: Case, prompt: Prompt, pieces: list[int]) -> None:
        expected = self._original(prompt)
        real = prompt.mask.astype(bool)
        reason = None
        try:
            got = self._in_pieces(prompt, pieces)[real]
        except Exception as error:
            got = np.zeros((0,), np.float32)
            reason = f"the artifact fails at this size: {str(error).splitlines()[0]}"
        result = compare(expected[real], got, self.parity.tolerance)
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
        if self.parity.failed is None and not result.passed and len(pieces) == 1:
            self.parity.failed = case

    def _in_pieces(self, prompt: Prompt, pieces: list[int]) -> np.ndarray:
        state = self.subject.initial_state(prompt.tokens.shape[0])
        parts, start = [], 0
        for size in pieces:
            logits, state = self._call(prompt.part(start, start + size), state)
            parts.append(logits)
            start += size
        return np.concatenate(parts, 1)

    def _call(
        self, feeds: dict[str, np.ndarray], state: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        outputs = self.subject.session.run({**feeds, **state})
        after = {s.past: outputs[s.present] for s in self.subject.states}
        return outputs[self.subject.output_names[0]], after

    def _original(self, prompt: Prompt) -> np.ndarray:
        with torch.no_grad():
            logits = self.subject.loaded.module(
                torch.from_numpy(prompt.tokens), torch.from_numpy(prompt.mask)
            )
        found: np.ndarray = logits.numpy()
        return found
