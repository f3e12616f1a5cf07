"""Tokens that may not come next, whatever their logits.

suppress_tokens         never
begin_suppress_tokens   not as the first of a text
min_new_tokens n        no end before n tokens of the text
min_length n            no end before n tokens of prompt and text together, without min_new_tokens
no_repeat_ngram_size n  no n tokens in a row that prompt or text have already

The logits of such tokens become minus infinity, as in transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from linexport.errors import UsageError


@dataclass(frozen=True)
class Restrictions:
    """Tokens that the author of a model forbids in texts.

    Attributes:
        suppressed: tokens that never come.
        first_suppressed: tokens that do not begin a text.
        min_tokens: of a text before it may end; None leaves that to ``min_length``.
        min_length: tokens of prompt and text together before it may end.
        ngram: tokens of the shortest sequence that may not come twice; 0 lets all come again.

    Raises:
        UsageError: a negative number.
    """

    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    min_tokens: int | None = None
    min_length: int = 0
    ngram: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("min_new_tokens", self.min_tokens or 0),
            ("min_length", self.min_length),
            ("no_repeat_ngram_size", self.ngram),
        ):
            if value < 0:
                raise UsageError(f"{name} is {value}; expected 0 or more.")

    def allowed(
        self,
        logits: np.ndarray,
        prompt: int,
        written: int,
        ends: Collection[int],
        repeated: Collection[int] = (),
    ) -> np.ndarray:
        """Return logits, (vocabulary,), with minus infinity for tokens that may not come.

        Args:
            logits: of the next token.
            prompt: tokens of the prompt.
            written: tokens of the text.
            ends: tokens by which the model ends a text.
            repeated: further tokens that may not come.

        Raises:
            UsageError: none may.
        """
        least = self.min_length - prompt if self.min_tokens is None else self.min_tokens
        ids = {*self.suppressed, *repeated}
        ids |= {*self.first_suppressed} if written == 0 else set()
        ids |= {*ends} if written < least else set()
        inside = [token for token in ids if 0 <= token < len(logits)]
        if not inside:
            return logits
        found = logits.copy()
        found[inside] = -np.inf
        if found.max() == -np.inf:
            raise UsageError(
                "generation_config.json of this model leaves no token that may come next. Correct "
                "suppress_tokens or no_repeat_ngram_size there, and convert the model again."
            )
        return found


class NGrams:
    """Tokens that came after the last n - 1 tokens before.

    Args:
        size: n; 0 finds none.
        tokens: so far.
    """

    def __init__(self, size: int, tokens: Sequence[int] = ()) -> None:
        self._size = size
        self._last: tuple[int, ...] = ()
        self._after: dict[tuple[int, ...], set[int]] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Take in the next token."""
        if not self._size:
            return
        if len(self._last) == self._size - 1:
            self._after.setdefault(self._last, set()).add(token)
        self._last = (*self._last, token)[1 - self._size :] if self._size > 1 else ()

    def repeated(self) -> Collection[int]:
        """Return the tokens that would make n tokens come again."""
        return self._after.get(self._last, ())
