"""Size of a model, known from its files' headers before anything is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from linexport.errors import LinexportError

FLOAT32_BYTES = 4
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000


def float32_bytes(source: str | Path) -> int | None:
    """Return the bytes of a source's weights in float32; None where no file says so.

    Args:
        source: a model file, or a folder of safetensors; weights in few bits are counted as such.
    """
    path = Path(source)
    try:
        if path.is_dir():
            held = _values_in(_config(path)) if (path / "config.json").is_file() else {}
            return sum(_tensor_bytes(file, held) for file in path.glob("*.safetensors")) or None
        if path.suffix == ".gguf":
            from linexport.sources.gguf.file import GgufFile

            return FLOAT32_BYTES * GgufFile(path).size
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LinexportError):
        return None  # what is wrong with it is said where it is read


def vocabulary(source: str | Path) -> int:
    """Return the number of tokens that a folder's configuration names; 0 where it names none."""
    try:
        config = _config(Path(source))
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


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def _values_in(config: Mapping[str, Any]) -> dict[str, int]:
    """Return how many weights an element holds, by its type, where weights are quantised."""
    settings = config.get("quantization_config") or config.get("quantization")
    if not isinstance(settings, dict):
        return {}
    groups = settings.get("config_groups") or {}
    bits = settings.get("bits") or next(
        (int(group["weights"]["num_bits"]) for group in groups.values() if group.get("weights")), 4
    )
    return {"I32": 32 // bits, "U32": 32 // bits, "U8": 2}


def _tensor_bytes(path: Path, held: Mapping[str, int]) -> int:
    entries = _header(path).values()
    return FLOAT32_BYTES * sum(prod(e["shape"]) * held.get(e["dtype"], 1) for e in entries)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, entry["shape"])) for name, entry in _header(path).items()}


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
