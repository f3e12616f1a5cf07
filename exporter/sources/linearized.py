"""The softmax model that a linear form was made of, as its file has it.

{"description": .., "cpu": .., "lengths": [64, ..], "milliseconds": [1.5, ..]}
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict

from linexport.manifest.records import SoftmaxOriginal
from linexport.system.json_object import JsonObject

NAME = "linearized"
"""Key of a checkpoint, and name of an extra file of an exported program, ``linearized.json``."""


def as_json(original: SoftmaxOriginal) -> JsonObject:
    """Return the record as ``original_of`` reads it."""
    found: JsonObject = json.loads(json.dumps(asdict(original)))
    return found


def original_of(value: object) -> SoftmaxOriginal | None:
    """Return the record in a file; None where there is none or it is damaged."""
    if not isinstance(value, dict) or set(value) != set(SoftmaxOriginal.__dataclass_fields__):
        return None
    texts = [value[name] for name in ("description", "cpu")]
    lengths, times = value["lengths"], value["milliseconds"]
    if not (all(isinstance(t, str) for t in texts) and isinstance(lengths, list)):
        return None
    if not (isinstance(times, list) and len(times) == len(lengths)):
        return None
    if not all(type(n) is int and n > 0 for n in lengths):
        return None
    if not all(type(x) is float and math.isfinite(x) and x > 0 for x in times):
        return None
    return SoftmaxOriginal(texts[0], texts[1], tuple(lengths), tuple(times))


def original_in(text: str | bytes | None) -> SoftmaxOriginal | None:
    """Return the record in a text of JSON; None where there is none or it is damaged."""
    try:
        return None if text is None else original_of(json.loads(text))
    except (ValueError, RecursionError):
        return None
