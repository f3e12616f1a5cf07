"""Tokens one after another from a model that takes some and gives the logits of the next.

temperature = 0    argmax; of equals, the first
temperature > 0    sampled from p = softmax(logits / temperature), restricted to tokens that are
                   all of:  among the top_k largest logits
                            in the nucleus: the fewest likeliest tokens with sum(p) >= top_p
                            p >= min_p max(p)

Sources: top_p of Holtzman et al., The Curious Case of Neural Text Degeneration, 2020; min_p of
Nguyen et al., Turning Up the Heat, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from linexport.errors import ParityError, UsageError

Step = Callable[[np.ndarray], np.ndarray]
"""Further tokens, (1, T) int64, to the logits of the token after them, (vocabulary,)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits.

    Attributes:
        temperature: of the softmax; 0 takes the argmax.
        top_k: number of tokens of the largest logits to sample from; 0 is all of them.
        seed: of the samples.
        top_p: probability of the nucleus to sample from; 1 is all tokens.
        min_p: least probability of a token, as a share of the largest; 0 is any.

    Raises:
        UsageError: a value without meaning.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

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

    def chooser(self, skip: int = 0) -> Callable[[np.ndarray], int]:
        """Return a function from logits to a token, with random numbers of its own.

        Args:
            skip: tokens chosen before, whose random numbers are passed over.
        """
        random = np.random.default_rng(self.seed)
        random.random(skip)

        def choose(logits: np.ndarray) -> int:
            check_finite_logits(logits)
            if self.temperature == 0:
                return int(logits.argmax())
            return int(random.choice(len(logits), p=self.probabilities(logits)))

        return choose

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


def check_finite_logits(logits: np.ndarray) -> None:
    """Refuse logits that are no distribution; minus infinity is a token that cannot come.

    Raises:
        ParityError: one is NaN or infinity.
    """
    if np.isnan(logits).any() or logits.max() == np.inf:
        raise ParityError(
            "The model's logits are not finite, so no token can be chosen from them. "
            "Run linexport validate on the artifact."
        )


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Return log softmax(logits), (vocabulary,) float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def continuation(
    step: Step,
    prompt: np.ndarray,
    sampling: Sampling,
    max_tokens: int | None,
    ends: Collection[int],
) -> Iterator[int]:
    """Yield the tokens after a prompt, (T,) int64: each is fed back for the next.

    Stops after ``max_tokens``, or at a token of ``ends``, which is not part of the text.
    """
    choose, tokens, count = sampling.chooser(), prompt, 0
    while max_tokens is None or count < max_tokens:
        token = choose(step(tokens[None]))
        if token in ends:
            return
        yield token
        tokens, count = np.array([token], np.int64), count + 1
