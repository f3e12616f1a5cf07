"""Stop strings in a text that comes in pieces.

    text so far  =  given out + held back

The longest end of the text that begins a stop string is held back until it is one, or is none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


class StopStrings:
    """Ends a text before the first stop string, wherever the borders of its pieces are.

    Attributes:
        stopped: whether a stop string has come.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """Return the text that a further piece makes certain."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """Return what was held back, when no more will come."""
        held, self._held = self._held, ""
        return held


def stop_rules(
    special: Mapping[str, int], ends: Collection[int], stops: Collection[str]
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the tokens and the strings that end a text.

    A stop string that is a special token, whose text is not shown, becomes a token.

    Args:
        special: special tokens of the tokenizer.
        ends: tokens that end a text.
        stops: strings that do.
    """
    found = {special[stop] for stop in stops if stop in special}
    return frozenset({*ends, *found}), tuple(stop for stop in stops if stop not in special)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
