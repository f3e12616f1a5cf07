"""Nesting of inputs and outputs, whose types torch resolves by name and may import.

A nesting is JSON: ``[1, {"type": "builtins.list", "context": "null", "children_spec": [...]}]``,
where the context is JSON again (the keys of a dictionary). Accepted: tuples, lists and dictionaries
with plain keys. Enum keys and defaultdicts, which import modules named by the file, are not.
"""

from __future__ import annotations

import json

from linexport.errors import UnsupportedModelError
from linexport.sources.pt2.source_strings import label, shorten
from linexport.system.json_object import JsonObject

_SEQUENCES = {"builtins.tuple", "builtins.list"}
_MAPPINGS = {"builtins.dict", "collections.OrderedDict"}


def treespec(text: str) -> None:
    """Check one nesting.

    Raises:
        UnsupportedModelError: it names another type, or is malformed.
    """
    try:
        version, root = json.loads(text)
        if version != 1 or isinstance(version, bool):
            raise ValueError
        _check(root)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnsupportedModelError(
            f"it describes nested inputs or outputs in an unknown way: {shorten(text)}"
        ) from None


def _check(node: JsonObject) -> None:
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if set(node) != {"type", "context", "children_spec"} or not isinstance(children, list):
        raise ValueError
    if kind is None:
        if context is not None or children:
            raise ValueError
    elif kind in _SEQUENCES:
        if context != "null":
            raise ValueError
    elif kind in _MAPPINGS:
        _keys(json.loads(context), len(children))
    else:
        raise UnsupportedModelError(
            f"it takes or returns {shorten(kind)}; tensors, tuples, lists and dictionaries are read"
        )
    for child in children:
        _check(child)


def _keys(keys: object, count: int) -> None:
    if not isinstance(keys, list) or len(keys) != count:
        raise ValueError
    for key in keys:
        if isinstance(key, str):
            label(key)
        elif not isinstance(key, int):
            raise ValueError
