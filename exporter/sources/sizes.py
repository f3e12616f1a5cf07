"""Size of a model, known from its files' headers before anything is read."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

FLOAT32_BYTES = 4
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000


def float32_bytes(source: str | Path) -> int | None:
    """Return the bytes of a source's weights in float32; None where no file says so.

    Args:
        source: a model file, or a folder of safetensors.
    """
    path = Path(source)
    try:
        if path.is_dir():
            return sum(_tensor_bytes(file) for file in path.glob("*.safetensors")) or None
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # what is wrong with it is said where it is read


def vocabulary(source: str | Path) -> int:
    """Return the number of tokens that a folder's configuration names; 0 where it names none."""
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        parts = (config, config.get("text_config"))
        found = (p.get("vocab_size") for p in parts if isinstance(p, dict))
        return next((n for n in found if isinstance(n, int) and n > 0), 0)
    except (OSError, ValueError, AttributeError):
        return 0  # what is wrong with it is said where it is read


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the tensors of a file, from its header; none of a damaged one."""
    try:
        return _shapes(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _tensor_bytes(path: Path) -> int:
    return FLOAT32_BYTES * sum(prod(shape) for shape in _shapes(path).values())


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    tensors = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return {name: tuple(map(int, shape)) for name, shape in tensors.items()}
