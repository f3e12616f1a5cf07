"""The last steps of a stream, to go back to any of their tokens.

    step    state before, inputs, number of tokens

At the end of a step the state is that of the next one. Inside of a step it is computed again,
from the state before it and the inputs up to that token. States that grow are not kept twice: those
of an earlier token are the beginning of the present ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.model import Model
from linexport.errors import UsageError
from linexport.targets.runtime.appended_caches import beginning


@dataclass(frozen=True)
class _Step:
    before: Arrays
    lengths: Mapping[str, int]
    feeds: Arrays
    tokens: int


class PastSteps:
    """Steps that together have at least as many tokens as may be gone back."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._steps: deque[_Step] = deque()

    @property
    def tokens(self) -> int:
        """Number of tokens that can be gone back."""
        return sum(step.tokens for step in self._steps)

    def copy(self) -> PastSteps:
        """Return the same steps, which are immutable, in a list of their own."""
        other = PastSteps(self._model)
        other._steps = self._steps.copy()
        return other

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def add(self, before: Arrays, feeds: Arrays) -> None:
        """Append a step."""
        axes = {n: s.growing_axis for n, s in self._model.states.items()}
        fixed = {n: v for n, v in before.items() if axes[n] is None}
        lengths = {n: v.shape[a] for n, v in before.items() if (a := axes[n]) is not None}
        self._steps.append(_Step(fixed, lengths, feeds, self._model.token_axis.length(feeds)))

    def keep(self, tokens: int) -> None:
        """Forget the steps before those that have so many tokens."""
        while self._steps and self.tokens - self._steps[0].tokens >= tokens:
            self._steps.popleft()

    def back(self, tokens: int, state: Arrays) -> tuple[Arrays, Arrays | None]:
        """Go back from ``state``; return an earlier one and the inputs that lead from it there.

        Raises:
            UsageError: the steps have fewer tokens.
        """
        if not 0 <= tokens <= self.tokens:
            raise UsageError(
                f"This stream can go back 0 to {self.tokens} tokens; found {tokens}. Open it with "
                "stream(history=...) of at least as many."
            )
        left = tokens
        while left > 0:
            step = self._steps.pop()
            left -= step.tokens
            state = self._before(step, state)
        if left == 0:
            return state, None
        return state, self._model.token_axis.cut(step.feeds, 0, -left)

    def _before(self, step: _Step, state: Arrays) -> Arrays:
        found = dict(step.before)
        for name, length in step.lengths.items():
            found[name] = beginning(state[name], self._model.states[name].growing_axis or 0, length)
        return {name: found[name] for name in state}
