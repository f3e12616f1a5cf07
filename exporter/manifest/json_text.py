"""JSON as text, and back, from anybody.

dumps  numbers that are not finite become null, text that is not Unicode becomes U+FFFD
loads  one ValueError for whatever is wrong: duplicate keys, NaN, integers beyond 64 bits, depth
"""

from __future__ import annotations

import json
from typing import Any

INTEGERS = 2**63
DIGITS = 20


def dumps(value: object) -> str:
    """Indented standard JSON of nested dicts, lists and scalars."""
    text = json.dumps(_standard(value), indent=2, allow_nan=False)
    return text.replace("\x7f", "\\u007f") + "\n"  # the control character that JSON leaves


def _standard(value: object) -> object:
    if isinstance(value, dict):
        return {_standard(k): _standard(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(v) for v in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return value


def loads(text: str) -> Any:
    """The value that JSON text holds.

    Raises:
        ValueError: it is not standard JSON, or has what no manifest has.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_int=_integer,
            parse_float=_finite,
        )
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice in one object")
    return found


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    value = int(text) if len(text) <= DIGITS else INTEGERS
    if not -INTEGERS <= value < INTEGERS:
        raise ValueError(f"the integer {text[:DIGITS]}... does not fit in 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"the number {text[:DIGITS]} is too large")
    return value
