"""Options as dataclasses of JSON types: read from a plain dict and checked, key by key.

@dataclass(frozen=True, kw_only=True)
class Options:
    features: int = bounded(128)              # a size or count: at least 1 unless said otherwise
    seed: int = bounded(0, at_least=0)
    tau: float = bounded(0.25, above=0)
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from linexport.errors import UsageError

C = TypeVar("C")


def bounded(
    default: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    multiple_of: int | None = None,
) -> Any:
    """A field of an options dataclass whose values are limited to a range, or to multiples."""
    limits = {
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "multiple_of": multiple_of,
    }
    return field(default=default, metadata={k: v for k, v in limits.items() if v is not None})


def parse(kind: type[C], values: Mapping[str, object], owner: str) -> C:
    """The dataclass ``kind`` from a plain dict; its integers are at least 1 unless bounded.

    Raises:
        UsageError: names every key that does not fit, and the known ones.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    problems = [f"unknown key {k!r}.{did_you_mean(k, known)}" for k in values if k not in known]
    problems += [
        f"missing key {k!r}."
        for k, f in known.items()
        if k not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    for key, value in values.items():
        if key in known and not _fits(value, hints[key], known[key]):
            kinds = _expected(hints[key], known[key])
            problems.append(f"{key!r} is {value!r}; expected {kinds}.")
    if problems:
        keys = f"Known keys: {', '.join(known)}." if known else "It has no options."
        raise UsageError(f"Config of {owner}: {' '.join(problems)} {keys}")
    return kind(**values)


def from_text(given: Iterable[str], example: str) -> dict[str, object]:
    """Options of a feature map from ``--map-option``: numbers, true or false, or text.

    Raises:
        UsageError: one is not NAME=VALUE; ``example`` is one that is.
    """
    options: dict[str, object] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise UsageError(f"--map-option {option}: expected NAME=VALUE, such as {example}.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def did_you_mean(name: Any, known: Any) -> str:
    """A sentence that suggests the known name closest to ``name``, or nothing."""
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _fits(value: Any, hint: Any, limits: Field[Any]) -> bool:
    """Compare types exactly: a bool is not an int; an int counts as a float, as in JSON."""
    kinds = _kinds(hint)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        return False
    if type(value) not in (int, float):
        return True
    above, at_least = limits.metadata.get("above"), _at_least(limits, type(value) is int, kinds)
    inside = (above is None or value > above) and (at_least is None or value >= at_least)
    at_most = limits.metadata.get("at_most")
    inside = inside and (at_most is None or value <= at_most)
    multiple = limits.metadata.get("multiple_of")
    return inside and math.isfinite(value) and (multiple is None or value % multiple == 0)


def _at_least(limits: Field[Any], integer: bool, kinds: tuple[object, ...]) -> float | None:
    found: float | None = limits.metadata.get("at_least")
    if found is None and "above" not in limits.metadata and integer and int in kinds:
        return 1
    return found


def _kinds(hint: object) -> tuple[Any, ...]:
    union = get_args(hint) if get_origin(hint) not in (dict, list) else ()
    return tuple(get_origin(k) or k for k in union or (hint,))


def _expected(hint: object, limits: Field[Any]) -> str:
    """Return the type of an option for people: int >= 1, float > 0, int >= 1 | None."""
    kinds = _kinds(hint)
    above, at_least = limits.metadata.get("above"), _at_least(limits, True, kinds)
    bound = f" > {above:g}" if above is not None else ""
    bound += f" >= {at_least:g}" if at_least is not None else ""
    at_most = limits.metadata.get("at_most")
    bound += "" if at_most is None else f" and <= {at_most:g}" if bound else f" <= {at_most:g}"
    multiple = limits.metadata.get("multiple_of")
    bound += f", a multiple of {multiple}" if multiple else ""
    names = ["None" if k is type(None) else k.__name__ for k in kinds]
    return " | ".join(n + bound if n in ("int", "float") else n for n in names)
