"""Work of ``torch.onnx.export`` that gives the same each time, or that nothing is made of.

A small model took half of the time of its translation for what does not depend on it:

- The composite operators are asked of PyTorch's dispatcher once for each namespace of operators,
  some thirty times, for each of two tables. They are the same within an export.
- Each of them, several hundred, is replaced on every kind of device that PyTorch knows. Models are
  not on most of them.
- The pass that makes casts explicit computes every value of the program again, to know its type.
  The program states it: a value is computed where a cast is added, and nowhere else.

A PyTorch without one of these places is left alone there.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

from torch.fx import Node

DEVICES = ("CPU", "CUDA", "MPS", "Meta", "XPU")
"""Devices that a model may be on, as PyTorch's dispatcher calls them."""


_exporting = threading.RLock()


@contextmanager
def work_left_out() -> Iterator[None]:
    """Leave that work out of the exports inside."""
    with _exporting, ExitStack() as restore:
        for module, name, change in CHANGES:
            place: Any = importlib.import_module(module)
            *path, last = name.split(".")
            for part in path:
                place = getattr(place, part, None)
            if hasattr(place, last):
                changed = change(getattr(place, last))
                restore.enter_context(mock.patch.object(place, last, changed))
        yield


def _of_devices(keys: list[Any]) -> list[Any]:
    """Return the dispatch keys of ``DEVICES`` alone."""
    return [key for key in keys if key.name.removeprefix("Autograd") in DEVICES]


def _promoted(original: Callable[..., Any]) -> Callable[[Any, Node], Any]:
    """Return ``run_node`` that adds the casts of a node, and takes its value from the program."""
    from torch.onnx._internal.fx.passes import type_promotion

    def run_node(interpreter: Any, node: Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return original(interpreter, node)
        with interpreter._set_current_node(node):
            rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
            if rule:
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]  # a node with casts was run, and has the value of that

    return run_node


CHANGES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("torch._export.utils", "_materialize_cpp_cia_ops", cache),
    ("torch.export.exported_program", "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", _of_devices),
    ("torch.export.exported_program", "_BACKEND_KEYS_TO_OVERRIDE", _of_devices),
    (
        "torch.onnx._internal.fx.passes.type_promotion",
        "_TypePromotionInterpreter.run_node",
        _promoted,
    ),
)
"""Modules, the names in them, and what the value of each becomes."""
