"""Tokens one after another from a model that takes some and gives the logits of the next.

temperature = 0    argmax; of equals, the first
temperature > 0    sampled from softmax(logits / temperature) over the top_k largest logits
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

    Raises:
        UsageError: a value without meaning.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}; expected 0 (argmax) or more.")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 0 or more.")

    def chooser(self) -> Callable[[np.ndarray], int]:
        """Return a function from logits to a token, with random numbers of its own."""
        random = np.random.default_rng(self.seed)

        def choose(logits: np.ndarray) -> int:
            if np.isnan(logits).any() or logits.max() == np.inf:
                raise ParityError(
                    "The model's logits are not finite, so no token can be chosen from them. "
                    "Run linexport validate on the artifact."
                )
            if self.temperature == 0:
                return int(logits.argmax())
            scaled = logits.astype(np.float64)
            if 0 < self.top_k < len(scaled):
                kept = np.argsort(-scaled, kind="stable")[: self.top_k]
                scaled = np.where(np.isin(np.arange(len(scaled)), kept), scaled, -np.inf)
            # The argmax has exp(0): no temperature overflows.
            likelihoods = np.exp((scaled - scaled.max()) / self.temperature)
            return int(random.choice(len(scaled), p=likelihoods / likelihoods.sum()))

        return choose


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
