"""Mutations of bytes and of JSON: ``(random, value) -> value``."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    255,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**63 - 1,
    2**63,
    -(2**63),
)
FLOATS = (0.0, -0.0, 1e-320, 1e30, 1e308, -1.5, float("nan"), float("inf"), float("-inf"))
STRINGS = (
    "",
    " ",
    "\0",
    "a\0b",
    "../../etc/passwd",
    "/dev/zero",
    "model.onnx",
    "os:system",
    "\ud800",
    "é\u202e",
    "x" * 5000,
    "{}",
    "%s%n",
    "__class__",
    "float32",
    "batch",
)


def choose(random: Random, *changes: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of the changes."""
    return random.choice(changes)


def flip(random: Random, data: bytes) -> bytes:
    """Change one to eight bits."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 8)):
        if changed:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def truncate(random: Random, data: bytes) -> bytes:
    """Cut the end off."""
    return data[: random.randrange(len(data) + 1)]


def duplicate(random: Random, data: bytes) -> bytes:
    """Repeat a slice, somewhere."""
    start, length = random.randrange(len(data) + 1), random.randint(1, 256)
    at = random.randrange(len(data) + 1)
    return data[:at] + data[start : start + length] * random.choice((1, 2, 100)) + data[at:]


def remove(random: Random, data: bytes) -> bytes:
    """Leave a slice out."""
    start, length = random.randrange(len(data) + 1), random.randint(1, 256)
    return data[:start] + data[start + length :]


def overwrite(random: Random, data: bytes) -> bytes:
    """Put an extreme integer, little or big endian, over some bytes."""
    width = random.choice((1, 2, 4, 8))
    value = random.choice(INTEGERS) % 2 ** (8 * width)
    at = random.randrange(len(data) + 1)
    piece = value.to_bytes(width, random.choice(("little", "big")))
    return data[:at] + piece + data[at + width :]


def noise(random: Random, data: bytes) -> bytes:
    """Put random bytes over a slice."""
    at, length = random.randrange(len(data) + 1), random.randint(1, 64)
    return data[:at] + random.randbytes(length) + data[at + length :]


def raw(random: Random, data: bytes) -> bytes:
    """Change bytes without regard to what they mean."""
    change = choose(random, flip, flip, truncate, duplicate, remove, overwrite, noise)
    return bytes(change(random, data))


def nested(random: Random) -> Any:
    """Return lists or objects inside each other, up to what Python's encoder writes."""
    value: Any = random.choice((0, "x", None))
    for _ in range(random.choice((3, 50, 400))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def scalar(random: Random, value: Any) -> Any:
    """Return another scalar: one that is extreme, of another type, or near the one given."""
    choices: list[Any] = [None, True, False, *INTEGERS, *FLOATS, *STRINGS]
    if isinstance(value, int | float) and not isinstance(value, bool):
        choices += [value + 1, value - 1, -value, value * 1000, str(value), float(value)] * 4
    if isinstance(value, str):
        choices += [value + "x", value[:-1], value.upper(), [value], {value: value}] * 3
    return random.choice(choices)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every ``(container, key)`` of a JSON value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = container.keys() if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


def edit(random: Random, document: Any) -> Any:
    """Change one to three values of a JSON document, in place, and return it."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = places(document) if isinstance(document, dict | list) else []
        if not found:
            return scalar(random, document)
        container, key = random.choice(found)
        match random.choice(
            ("scalar", "scalar", "delete", "swap", "copy", "nest", "empty", "grow")
        ):
            case "scalar":
                container[key] = scalar(random, container[key])
            case "delete":
                del container[key]
            case "swap":
                other, place = random.choice(found)
                container[key], other[place] = copy.deepcopy((other[place], container[key]))
            case "copy":
                other, place = random.choice(found)
                addition = copy.deepcopy(other[place])
                if isinstance(container, list):
                    container.insert(key, addition)
                else:
                    container[random.choice((f"{key}x", *STRINGS[:3]))] = addition
            case "nest":
                container[key] = nested(random)
            case "empty":
                container[key] = random.choice(({}, [], ""))
            case "grow" if isinstance(container[key], list):
                container[key] = container[key] * random.choice((2, 100))
            case "grow":
                container[key] = [container[key]] * random.choice((1, 2, 100))
    return document


def json_text(random: Random, data: bytes) -> bytes:
    """Change the text of a JSON document in ways that a value cannot express."""
    text = data.decode()
    depth = random.choice((100, 2000, 100_000))
    match random.choice(
        ("deep", "deep object", "digits", "constant", "twice", "mark", "bytes", "tail")
    ):
        case "deep":
            return b"[" * depth + b"]" * random.choice((0, depth))
        case "deep object":
            return text[:1].encode() + b'"a":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        case "digits":
            return text.replace("1", "1" * depth, 1).encode()
        case "constant":
            return text.replace("1", random.choice(("NaN", "Infinity", "1e999", "-")), 1).encode()
        case "twice":
            return text.rstrip().rstrip("}").encode() + b"," + text.lstrip().lstrip("{").encode()
        case "mark":
            return random.choice((b"\xef\xbb\xbf" + data, text.encode("utf-16")))
        case "bytes":
            return raw(random, data)
        case _:
            return data + random.choice((b"{}", b"\0", b"]", b" " * 10_000))


def json_bytes(random: Random, data: bytes) -> bytes:
    """Change a JSON file: mostly its values, sometimes its text."""
    if random.random() < 0.15:
        return json_text(random, data)
    try:
        document = json.loads(data)
    except ValueError:
        return raw(random, data)
    # A lone surrogate is legal in JSON as an escape, which is how json writes it.
    return json.dumps(edit(random, document)).encode()
