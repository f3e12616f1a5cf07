"""JSON -> ``Manifest``, checked against the schema that its dataclasses are.

``schema.json`` in this folder is the published schema: ``python -m linexport.manifest.schema``
prints it, and a test asserts that the file is current.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from linexport.errors import UsageError
from linexport.manifest.consistency import contradictions
from linexport.manifest.json_text import dumps
from linexport.manifest.records import FORMAT, READ, Manifest

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SHOWN = 60
"""Characters of a damaged value that an error quotes."""


def to_json(manifest: Manifest) -> dict[str, object]:
    """The manifest as nested dicts, as ``manifest.json`` holds it."""
    value: dict[str, object] = json.loads(dumps(asdict(manifest)))
    return value


def from_json(value: Mapping[str, object], name: str = "The manifest") -> Manifest:
    """The manifest that nested dicts describe.

    Args:
        value: what ``to_json`` gave, in any format that is still read.
        name: the file, for the error.

    Raises:
        UsageError: it is not a manifest, of a format not read, or damaged; says where.
    """
    from pydantic import ValidationError

    if not isinstance(value, dict) or "linexport" not in value or "format" not in value:
        raise UsageError(f"{name} is not a linexport manifest.")
    if value["format"] not in READ:
        raise UsageError(
            f"{name} has format {_shown(value['format'])}; this version of linexport reads "
            f"{' and '.join(map(str, READ))}. Use the version that made it, or convert the model "
            "again."
        )
    try:
        found = _adapter().validate_json(json.dumps({**value, "format": FORMAT}))
    except ValidationError as error:
        raise UsageError(f"{name} is damaged: {_first(error.errors())}") from None
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{name} is damaged: {error}. Convert the model again.") from None
    for problem in contradictions(found):
        raise UsageError(f"{name} is damaged: {problem}. Convert the model again.")
    return found


@cache
def _adapter() -> TypeAdapter[Manifest]:
    from pydantic import TypeAdapter

    return TypeAdapter(Manifest)


def _first(errors: Iterable[Any]) -> str:
    """The first problem: its JSON path, what was found there and what was expected."""
    first, *others = errors
    if first["type"] == "missing":
        return f"{_path(first['loc'])} is missing. Convert the model again."
    place, expected = list(first["loc"]), [first["msg"]]
    # Each member of a union reports an error of its own, under its own name.
    for other in others:
        if other["loc"][:-1] == first["loc"][:-1] and other["input"] == first["input"]:
            place = list(first["loc"][:-1])
            expected.append(other["msg"])
    types = " or ".join(m.removeprefix("Input should be ") for m in expected)
    found = _shown(first["input"])
    return f"{_path(place)} is {found}; expected {types}. Convert the model again."


def _path(place: Iterable[int | str]) -> str:
    return "$" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place)


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def json_schema() -> str:
    """The published schema of ``manifest.json``."""
    return dumps(_adapter().json_schema(mode="serialization"))


if __name__ == "__main__":
    print(json_schema(), end="")
