"""JSON of a request, read from its beginning: the first value that is wrong ends the reading.

Nothing after it is parsed, and the memory of what is parsed has a bound:

    strings             as many bytes as they have
    lists of numbers    arrays, thousands of numbers at a time: eight bytes for each
    all other values    MOST_VALUES, DEEPEST within each other

Every step is short. A reader on a thread of its own so leaves the event loop its turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

MOST_VALUES, DEEPEST, MOST_AXES = 2**16, 16, 16
LONGEST_NUMBER = 400
"""Digits of a number."""

AT_ONCE = 2**13
"""Characters of a list of numbers that are read at once."""

_TEXTS = json.JSONDecoder()
"""Reads one text, from its first quotation mark."""

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBERS = re.compile(r"[-+0-9.eE, \t\n\r]+")
_WORDS = re.compile(r"[a-z, \t\n\r]+")
_CONSTANTS = {"true": True, "false": False, "null": None, "NaN": float("nan")}
"""Words, of which JSON lacks the last: a field says in what range it is."""
_NAMES = {"{": "an object", "[": "a list", '"': "a text", "t": "true", "f": "false", "n": "null"}


class JsonError(ValueError):
    """The text is not JSON.

    Attributes:
        place: the character at which it is not.
    """

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


class ElementError(ValueError):
    """A value of JSON where another kind is expected.

    Attributes:
        path: its steps from the top.
    """

    def __init__(self, message: str, path: tuple[int | str, ...]) -> None:
        super().__init__(message)
        self.path = path


class JsonReader:
    """Reads one text.

    Args:
        body: in UTF-8.

    Raises:
        JsonError: it is not text.
    """

    def __init__(self, body: bytes | memoryview) -> None:
        try:
            self._text = str(body, "utf-8")
        except UnicodeDecodeError as error:
            raise JsonError("it is not UTF-8", error.start) from None
        self._at, self._left, self._depth = 0, MOST_VALUES, 0

    def next(self) -> str:
        """Return the first character of the value that comes next."""
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at >= len(self._text):
            raise JsonError("it ends too early", self._at)
        return self._text[self._at]

    def next_inside(self) -> str:
        """Return the first character within the list that comes next."""
        at = _SPACE.match(self._text, self._at + 1).end()  # type: ignore[union-attr]
        return self._text[at : at + 1]

    def end(self) -> None:
        """Check that nothing follows."""
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
        if self._at < len(self._text):
            raise JsonError("something follows it", self._at)

    def found(self) -> str:
        """Return in words what comes next."""
        return _NAMES.get(self.next(), "a number")

    def fields(self) -> Iterator[str]:
        """Yield the names of an object's fields, each before its value is read."""
        self._open("{")
        seen: set[str] = set()
        while self._more("}", bool(seen)):
            if self.next() != '"':
                raise JsonError("a name of a field is missing", self._at)
            name = self.string()
            if name in seen:
                raise JsonError(f"the field {name[:60]!r} occurs twice", self._at)
            seen.add(name)
            if self.next() != ":":
                raise JsonError("a colon is missing", self._at)
            self._at += 1
            yield name

    def items(self) -> Iterator[int]:
        """Yield the numbers of a list's items, each before it is read."""
        self._open("[")
        count = 0
        while self._more("]", count > 0):
            yield count
            count += 1

    def string(self) -> str:
        """Read a text."""
        self._spend()
        try:
            text, self._at = _TEXTS.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise JsonError("a text is damaged, or does not end", error.pos) from None
        found: str = text
        return found

    def value(self) -> Any:
        """Read any value."""
        first = self.next()
        if first == '"':
            return self.string()
        if first == "{":
            return {name: self.value() for name in self.fields()}
        if first == "[":
            return [self.value() for _ in self.items()]
        self._spend()
        for word, constant in _CONSTANTS.items():
            if self._text.startswith(word, self._at):
                self._at += len(word)
                return constant
        found = _NUMBER.match(self._text, self._at, self._at + LONGEST_NUMBER)
        if found is None:
            raise JsonError("a value is expected", self._at)
        self._at = found.end()
        if self._at < len(self._text) and self._text[self._at] not in ",]} \t\n\r":
            raise JsonError("a number is damaged, or too long", self._at)
        text = found[0]
        return int(text) if text.lstrip("-").isdecimal() else float(text)

    def numbers(self, path: tuple[int | str, ...], booleans: bool = True) -> Numbers:
        """Read a list of numbers, or of true and false, or of such lists of one length.

        Args:
            path: of the list, for errors.
            booleans: take true and false.

        Raises:
            ElementError: it is something else, or has an element that is; names the first.
        """
        if self.next() != "[":
            raise ElementError(f"expected a list of numbers; found {self.found()}", path)
        return _NumberReader(self, path, booleans).read()

    @property
    def place(self) -> int:
        """The character that is read next."""
        return self._at

    def skip(self, value: bool = False) -> None:
        """Read one character; ``value`` if it begins one."""
        if value:
            self._spend()
        self._at += 1

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read characters of a pattern: a few thousand at most, up to a comma or spaces.

        Raises:
            JsonError: there is neither among so many.
        """
        found = pattern.match(self._text, self._at, self._at + AT_ONCE)
        assert found is not None
        text = found[0]
        if len(text) == AT_ONCE:
            whole = text[: text.rfind(",") + 1] or text.rstrip(" \t\n\r")
            if len(whole) == AT_ONCE and not whole.endswith(","):
                raise JsonError("a number is damaged, or too long", self._at)
            text = whole
        self._at += len(text)
        return text

    def _open(self, bracket: str) -> None:
        self._spend()
        self._depth += 1
        if self._depth > DEEPEST:
            raise JsonError(f"it is nested more than {DEEPEST} deep", self._at)
        if self.next() != bracket:
            raise JsonError(f"{bracket} is expected", self._at)
        self._at += 1

    def _more(self, bracket: str, after: bool) -> bool:
        """Return whether another value follows in an object or list."""
        if self.next() == bracket:
            self._at += 1
            self._depth -= 1
            return False
        if after:
            if self._text[self._at] != ",":
                raise JsonError("a comma is missing", self._at)
            self._at += 1
            if self.next() == bracket:
                raise JsonError("a value is missing behind a comma", self._at)
        return True

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise JsonError(f"it has more than {MOST_VALUES} values outside of lists", self._at)


class Numbers:
    """Numbers of a list, in parts.

    Attributes:
        parts: arrays of 64 bits, or of bool, one after another.
        lengths: of the lists, the outermost first.
    """

    def __init__(self, parts: list[np.ndarray], lengths: list[int]) -> None:
        self.parts, self.lengths = parts, lengths

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def kinds(self) -> set[str]:
        """NumPy's kinds of the numbers: b, i, u or f."""
        return {part.dtype.kind for part in self.parts}

    def array(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        """Return them as an array; None where they are not of the dtype, or beyond its range."""
        if not self.kinds <= {"b": {*"b"}, "f": {*"iuf"}}.get(dtype.kind, {*"iu"}):
            return None
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            for part in self.parts:
                if len(part) and not (limits.min <= part.min() and part.max() <= limits.max):
                    return None
        return np.concatenate([np.empty(0, dtype), *(part.astype(dtype) for part in self.parts)])


class _NumberReader:
    """Reads a list of numbers where a ``JsonReader`` is."""

    def __init__(self, reader: JsonReader, path: tuple[int | str, ...], booleans: bool) -> None:
        self._reader, self._path, self._booleans = reader, path, booleans
        self._parts: list[np.ndarray] = []
        self._count = 0
        self._open: list[int] = []  # items so far of the lists that have not ended
        self._lengths: dict[int, int] = {}
        self._deepest: int | None = None  # where numbers are

    def read(self) -> Numbers:
        reader, expected, opened = self._reader, True, False
        while True:
            first = reader.next()
            if first == "[" and expected:
                self._begin()
                opened = True
            elif first == "]" and (opened or not expected):
                reader.skip()
                self._end()
                expected = opened = False
                if not self._open:
                    lengths = [self._lengths[depth] for depth in sorted(self._lengths)]
                    return Numbers(self._parts, lengths)
            elif first == "," and not expected:
                reader.skip()
                expected, opened = True, False
            elif not expected:
                raise JsonError("a comma is missing", reader.place)
            elif first in ",]}:":
                raise JsonError("a value is expected", reader.place)
            else:
                expected, opened = self._run(first), False

    def _begin(self) -> None:
        self._reader.skip(value=True)
        if self._open:
            self._open[-1] += 1
        if len(self._open) == self._deepest:
            raise ElementError("its lists have several depths", self._path)
        self._open.append(0)
        if len(self._open) > MOST_AXES:
            raise ElementError(f"its lists are nested more than {MOST_AXES} deep", self._path)

    def _end(self) -> None:
        depth, count = len(self._open), self._open.pop()
        if self._lengths.setdefault(depth, count) != count:
            raise ElementError("its lists have several lengths", self._path)

    def _run(self, first: str) -> bool:
        """Read numbers that follow each other; return whether a comma came after them."""
        depth = len(self._open)
        if self._deepest not in (None, depth) or depth + 1 in self._lengths:
            raise ElementError("its lists have several depths", self._path)
        self._deepest = depth
        words = self._booleans and first in "tf"
        if not words and first not in "-0123456789":
            kind = "a number, true or false" if self._booleans else "a number"
            raise self._wrong(f"expected {kind}; found {self._reader.found()}", 0)
        place = self._reader.place
        text = self._reader.run(_WORDS if words else _NUMBERS).rstrip(" \t\n\r")
        try:
            values = json.loads(f"[{text.removesuffix(',')}]")
        except ValueError:
            raise JsonError("a number is damaged", place) from None
        if words and None in values:
            raise self._wrong("expected true or false; found null", values.index(None))
        part = np.array(values)
        if part.dtype.kind not in "biuf":
            large = next(i for i, v in enumerate(values) if isinstance(v, int) and abs(v) >> 63)
            raise self._wrong("expected a number of 64 bits", large)
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise self._wrong("expected a finite number", int(np.isfinite(part).argmin()))
        self._parts.append(part)
        self._count += len(values)
        self._open[-1] += len(values)
        return text.endswith(",")

    def _wrong(self, message: str, ahead: int) -> ElementError:
        return ElementError(message, (*self._path, self._count + ahead))
