"""Elementwise functions of one tensor: which feature map they are, and writing them as nodes.

A function is known by its values: whatever operators spell it, a function of one number that agrees
with a feature map on a dense grid and far outside it is that map.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from linexport.models import feature_maps
from linexport.plugins.ops.body import OPSET, Body
from linexport.recognise.terms import IDENTITY, Function

GRID = np.concatenate(
    [
        np.linspace(-12, 12, 385),
        [s * x for s in (-1.0, 1.0) for x in (1e-6, 1e-3, 15.5, 20.0, 40.0, 80.0)],
    ]
).astype(np.float32)
"""Where functions are compared: both sides of every usual threshold, and the tails."""

RELATIVE, ABSOLUTE = 2e-6, 2e-7
"""Roundings of float32: elu(x) + 1 loses what is below 6e-8, its other spellings do not."""


def write(b: Body, function: Function, x: str) -> str:
    """The function as nodes; returns the value."""
    op = function[0]
    if op == "x":
        return x
    if op == "none":
        return ""
    if op == "const":
        value = b.const(np.asarray(function[1], function[2] or np.float32))
        return value if function[2] else str(b.CastLike(value, x))
    attributes: dict[str, Any] = {k: _listed(v) for k, v in function[1]}
    return str(b.node(op, *(write(b, f, x) for f in function[2:]), **attributes))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@cache
def kind_of(function: Function) -> str | None:
    """The elementwise feature map a function is, if it is one."""
    if function == IDENTITY:
        return None
    values = _values(_without_casts(function))
    if values is None:
        return None
    for kind in feature_maps.kinds():
        found = feature_maps.find(kind)
        if not found.elementwise or kind == "identity":
            continue
        expected = found.phi(torch.from_numpy(GRID)).numpy()
        limit = ABSOLUTE + RELATIVE * np.abs(expected)
        with np.errstate(invalid="ignore"):
            if bool((np.abs(values - expected) <= limit).all()):
                return kind
    return None


@cache
def keeps_sign(function: Function) -> bool:
    """Positive where x is, and negative somewhere: the sign of a sum of such is the inputs'."""
    values = _values(_without_casts(function))
    if values is None:
        return False
    return bool((values[GRID > 0] >= 0).all() and (values[GRID < 0] < 0).any())


def casts(function: Function) -> int | None:
    """The element type a function ends in, if it says so."""
    if function[0] == "Cast":
        return int(dict(function[1])["to"])
    return casts(function[2]) if len(function) > 2 and isinstance(function[2], tuple) else None


def _without_casts(function: Function) -> Function:
    if function[0] == "Cast":
        return _without_casts(function[2])
    if function[0] in ("x", "const", "none"):
        return function
    return (*function[:2], *(_without_casts(f) for f in function[2:]))


def _values(function: Function) -> np.ndarray | None:
    b = Body()
    try:
        y = write(b, function, "x")
        graph = helper.make_graph(
            b.nodes,
            "function",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, [None])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", max(OPSET, 20))])
        with np.errstate(all="ignore"):
            (values,) = ReferenceEvaluator(model).run(None, {"x": GRID})
        return np.asarray(values)
    except Exception:
        # A function this evaluator cannot run is simply not a known map.
        return None
