"""Plugin fields: how attributes of a node reach a plugin, and how a plugin is kept in an engine.

    node attribute    on the way to a plugin           here
    string            CHAR, with a zero byte behind    str, without
    integer           INT32, whatever ONNX says        int
    not declared      lost                             declared, each by name

The parser passes on only the fields a creator declares, so every one that is read is declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linexport.plugins.kernels.description import BINARIES, LAUNCH

NAMES = (LAUNCH, BINARIES)
"""The fields of every linexport plugin; all are text."""


@dataclass(frozen=True)
class Fields:
    """A collection with the memory it points into: TensorRT keeps addresses, not arrays."""

    collection: object
    arrays: tuple[np.ndarray, ...]


def declared(module: ModuleType) -> Fields:
    """Plugin fields that a creator declares."""
    return encode(module, dict.fromkeys(NAMES, ""))


def encode(module: ModuleType, values: Mapping[str, str]) -> Fields:
    """Text by name, as fields an engine keeps."""
    arrays = {name: np.frombuffer(text.encode(), np.int8) for name, text in values.items()}
    kind = module.PluginFieldType.CHAR
    made = [module.PluginField(name, array, kind) for name, array in arrays.items()]
    return Fields(module.PluginFieldCollection(made), tuple(arrays.values()))


def decode(collection: Any) -> dict[str, str]:
    """Fields as text by name; those of other types are left aside."""
    found = {}
    for field in collection:
        data = np.asarray(field.data)
        if data.dtype.itemsize == 1:
            found[str(field.name)] = data.tobytes().rstrip(b"\0").decode(errors="replace")
    return found
