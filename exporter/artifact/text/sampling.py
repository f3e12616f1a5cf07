"""The next token of a text, chosen from its logits.

repetition_penalty r    logits x of tokens in prompt and text become x / r, or x r where x < 0
temperature = 0         argmax; of equals, the first
temperature > 0         sampled from p = softmax(logits / temperature), restricted to tokens that
                        are all of:  among the top_k largest logits
                                     in the nucleus: the fewest likeliest tokens, sum(p) >= top_p
                                     p >= min_p max(p)

Sources: repetition_penalty of Keskar et al., CTRL, 2019; top_p of Holtzman et al., The Curious Case
of Neural Text Degeneration, 2020; min_p of Nguyen et al., Turning Up the Heat, 2024. The order is
that of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from linexport.artifact.text import draws
from linexport.errors import ParityError, UsageError

Chooser = Callable[[np.ndarray], int]
"""Logits, (vocabulary,), to a token."""

EXACT = 4096
"""Most tokens whose probabilities are computed in float64: more take longer than a step may."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits.

    Attributes:
        temperature: of the softmax; 0 takes the argmax.
        top_k: number of tokens of the largest logits to sample from; 0 is all of them.
        seed: of the samples.
        top_p: probability of the nucleus to sample from; 1 is all tokens.
        min_p: least probability of a token, as a share of the largest; 0 is any.
        repetition_penalty: factor against tokens that the text has already; 1 is none.

    Raises:
        UsageError: a value without meaning.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}; expected 0 (argmax) or more.")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 0 or more.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}; expected more than 0, and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p is {self.min_p}; expected 0 to 1.")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UsageError(
                f"repetition_penalty is {self.repetition_penalty}; expected more than 0, and 1 for "
                "none."
            )

    def chooser(self, text: Collection[int] = (), skip: int = 0) -> Chooser:
        """Return a function from logits to a token, with random numbers of its own.

        Args:
            text: tokens before the first one chosen, in any order; what is chosen joins them.
            skip: tokens chosen before, whose random numbers are passed over.
        """
        random = np.random.default_rng(self.seed)
        random.random(skip)
        seen = _Seen(text)

        def choose(logits: np.ndarray) -> int:
            check_finite_logits(logits)
            if self.repetition_penalty != 1:
                logits = self.penalised(logits, seen.ids)
            token = (
                int(logits.argmax())
                if self.temperature == 0
                else self.drawn(logits, float(random.random()))
            )
            seen.add(token)
            return token

        return choose

    def drawn(self, logits: np.ndarray, uniform: float) -> int:
        """Return the token at a share of all probabilities, in the order of tokens.

        Args:
            logits: (vocabulary,), of a temperature above 0.
            uniform: from 0 to below 1.
        """
        if len(logits) <= EXACT:
            return draws.draw(self.probabilities(logits), uniform)
        if self.top_k:
            kept = draws.largest(logits, min(self.top_k, len(logits)))
            return int(kept[replace(self, top_k=0).drawn(logits[kept], uniform)])
        w, possible = None, None
        if self.top_p < 1:
            w = draws.weights(logits, self.temperature)
            possible = draws.nucleus(w, logits, self.top_p)
        if self.min_p > 0:
            likely = logits >= logits.max() + self.temperature * np.log(self.min_p)
            possible = likely if possible is None else possible & likely
        if possible is not None and np.count_nonzero(possible) <= EXACT:
            return self._drawn_within(np.flatnonzero(possible), logits, uniform)
        w = draws.weights(logits, self.temperature) if w is None else w
        if possible is not None:
            w *= possible
        return draws.draw(w, uniform)

    def _drawn_within(self, kept: np.ndarray, logits: np.ndarray, uniform: float) -> int:
        """Return the token at a share of the probabilities of some tokens, (their number,)."""
        rest = replace(self, top_k=0, top_p=1.0, min_p=0.0)
        return int(kept[rest.drawn(logits[kept], uniform)])

    def penalised(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return logits with those of tokens seen lowered, (vocabulary,) in the same dtype."""
        found, factor = logits.copy(), logits.dtype.type(self.repetition_penalty)
        found[ids] = np.where(logits[ids] < 0, logits[ids] * factor, logits[ids] / factor)
        return found

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return what is sampled from, (vocabulary,) float64, for a temperature above 0."""
        scaled = logits.astype(np.float64)
        if 0 < self.top_k < len(scaled):
            kept = np.argsort(-scaled, kind="stable")[: self.top_k]
            scaled = np.where(np.isin(np.arange(len(scaled)), kept), scaled, -np.inf)
        # The argmax has exp(0): no temperature overflows.
        weights = np.exp((scaled - scaled.max()) / self.temperature)
        p = weights / weights.sum()
        if self.top_p < 1:
            p = _nucleus(p, self.top_p)
        p[p < self.min_p * p.max()] = 0
        return np.asarray(p / p.sum())


def _nucleus(p: np.ndarray, share: float) -> np.ndarray:
    """Set to 0 all but the fewest likeliest tokens whose sum is ``share`` or more."""
    # Tokens below (1 - share) / V have less than 1 - share together: the nucleus is in the rest.
    likely = np.flatnonzero(p >= (1 - share) / len(p))
    order = likely[np.argsort(-p[likely], kind="stable")]
    count = 1 + int(np.searchsorted(np.cumsum(p[order]), share))
    kept = np.zeros_like(p)
    kept[order[:count]] = p[order[:count]]
    return kept


class _Seen:
    """Tokens of a text, each once, as an array that grows."""

    def __init__(self, text: Collection[int]) -> None:
        self._known = {*text}
        self._ids = np.fromiter(self._known, np.int64, len(self._known))
        self._count = len(self._ids)

    @property
    def ids(self) -> np.ndarray:
        """The tokens, (number of them,) int64."""
        return self._ids[: self._count]

    def add(self, token: int) -> None:
        if token in self._known:
            return
        self._known.add(token)
        if self._count == len(self._ids):
            self._ids = np.append(self._ids, np.zeros(max(16, self._count), np.int64))
        self._ids[self._count] = token
        self._count += 1


def check_finite_logits(logits: np.ndarray) -> None:
    """Refuse logits that are no distribution; minus infinity is a token that cannot come.

    Raises:
        ParityError: one is NaN or infinity.
    """
    # The argmax is the first NaN where there is one: one pass over the vocabulary sees both.
    largest = logits[logits.argmax()]
    if not np.isfinite(largest):
        raise ParityError(
            "The model's logits are not finite, so no token can be chosen from them. "
            "Run linexport validate on the artifact."
        )


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return log softmax(logits), (vocabulary,) float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
