"""PyTorch's table of ONNX translations, read once a process.

``torch.onnx.export`` parses the source of some 500 functions for every export, always with the
same outcome: 1.1 s of the 2.6 s that the conversion of a small model takes.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_exporting = threading.RLock()
_tables: dict[tuple[int, bool], Any] = {}


@contextmanager
def translations_read_once() -> Iterator[None]:
    """Give every export inside a copy of one table; a PyTorch without that table is left alone."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        original = vars(ONNXRegistry)["from_torchlib"]
    except (ImportError, KeyError):
        yield
        return

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        # torchvision's operators are in the table only once it has been imported.
        key = opset_version, "torchvision" in sys.modules
        if key not in _tables:
            _tables[key] = original.__get__(None, ONNXRegistry)(opset_version=opset_version)
        return _copied(_tables[key])

    with _exporting:
        ONNXRegistry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


def _copied(table: Any) -> Any:
    """Copy a table, to which an export adds translations of its own."""
    fresh = copy.copy(table)
    fresh.functions = {target: list(found) for target, found in table.functions.items()}
    return fresh
