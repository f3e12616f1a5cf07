"""Plugin fields: how attributes of a node reach a plugin, and how a plugin is kept in an engine.

    node attribute    on the way to a plugin           here
    string            CHAR, with a zero byte behind    str, without
    integer           INT32, whatever ONNX says        int
    not declared      lost                             declared, each by name

The parser passes on only the fields a creator declares, so every one that is read is declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from linexport.plugins.tensorrt.description import BINARIES, LAUNCH

NAMES = (LAUNCH, BINARIES)
"""The fields of every linexport plugin; all are text."""


def declared(module: ModuleType) -> Any:
    """What a creator announces."""
    return _collection(module, dict.fromkeys(NAMES, b""))


def encode(module: ModuleType, values: Mapping[str, str]) -> Any:
    """Text by name, as fields an engine keeps."""
    return _collection(module, {name: text.encode() for name, text in values.items()})


def decode(collection: Any) -> dict[str, str]:
    """Fields as text by name; those of other types are left aside."""
    found = {}
    for field in collection:
        data = np.asarray(field.data)
        if data.dtype.itemsize == 1:
            found[str(field.name)] = data.tobytes().rstrip(b"\0").decode()
    return found


def _collection(module: ModuleType, values: Mapping[str, bytes]) -> Any:
    # TensorRT keeps pointers to these arrays: the fields must own them.
    return module.PluginFieldCollection(
        [
            module.PluginField(name, np.frombuffer(data, np.int8), module.PluginFieldType.CHAR)
            for name, data in values.items()
        ]
    )
