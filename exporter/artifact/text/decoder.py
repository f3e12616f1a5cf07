"""Steps by which a ``tokenizer.json`` makes text of tokens: checked, since they run unguarded.

    growth = product over steps of (characters put in) / (characters taken out)

A decoder runs for every token, too often to ask another process. Replacements of a given text
grow what they are given by a known factor, and those by a regular expression take unknown time.
"""

from __future__ import annotations

import json
from pathlib import Path

from linexport.errors import UsageError
from linexport.system.json_object import JsonObject

GROWTH = 1024
"""Characters that decoding may make of one; those of known models make one or two."""


def check_decoder(path: Path, content: bytes) -> None:
    """Check the decoder of a tokenizer which the library has read.

    Args:
        path: of the tokenizer, for errors.
        content: of that file.

    Raises:
        UsageError: it could make more than ``GROWTH`` characters of one, or searches by a regular
            expression.
    """
    growth = 1.0
    for step in _steps(json.loads(content).get("decoder")):
        growth *= _growth(path, step)
    if growth > GROWTH:
        raise UsageError(
            f"{path} has a decoder whose steps make {growth:.3g} characters of one; at most "
            f"{GROWTH} are accepted. Use another tokenizer."
        )


def _steps(decoder: object) -> list[JsonObject]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _growth(path: Path, step: JsonObject) -> float:
    if step.get("type") != "Replace":
        return 2  # at most a space before each character
    pattern = step["pattern"]
    taken = pattern.get("String") if isinstance(pattern, dict) else pattern
    if not isinstance(taken, str):
        raise UsageError(
            f"{path} has a decoder that replaces what a regular expression finds, whose time has "
            "no bound; replacements of a given text are accepted. Use another tokenizer."
        )
    # No text at all is found before each character and at the end.
    return max(1.0, len(step["content"]) / len(taken) if taken else 2 + len(step["content"]))
