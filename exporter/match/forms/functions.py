"""Elementwise functions of one tensor: which feature map they are, and writing them as nodes.

A function is known by its values: whatever operators compute it, a function of one number that
equals a feature map on all of float32, see ``exact``, is that map. Any other function is left in
front of the attention.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto

from linexport.match.forms.exact import GRID, Exact, first_difference
from linexport.match.forms.terms import IDENTITY, Function
from linexport.models import feature_maps
from linexport.plugins.ops.body import Body

log = logging.getLogger("linexport.match")

FLOATING = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def write(b: Body, function: Function, x: str) -> str:
    """The function as nodes; returns the value.

    A number without a type has that of what it is combined with, which need not be that of x: a
    function may begin with a cast.
    """
    op = function[0]
    if op == "x":
        return x
    if op == "none":
        return ""
    if op == "const":
        value = b.const(function[1], np.dtype(function[2] or np.float32))
        return value if function[2] else str(b.CastLike(value, x))
    attributes: dict[str, Any] = {k: _listed(v) for k, v in function[1]}
    operands = dict(enumerate(function[2:]))
    written = {i: write(b, f, x) for i, f in operands.items() if f[0] != "const"}
    first = 1 if op == "Where" else 0  # behind its condition
    like = next((y for i, y in written.items() if i >= first and y), x)
    written |= {i: write(b, f, like) for i, f in operands.items() if f[0] == "const"}
    return str(b.node(op, *(written[i] for i in operands), **attributes))


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@cache
def kind_of(function: Function) -> str | None:
    """Return the elementwise feature map that a function equals everywhere, if there is one."""
    if function == IDENTITY:
        return None
    found = _exact(function)
    if found is None:
        return None
    probes = sorted(found.probes(), key=abs)
    differs: dict[str, float] = {}
    for kind in feature_maps.kinds():
        if feature_maps.find_map(kind).elementwise and kind != "identity":
            x = first_difference(found, _formula(kind), probes)
            if x is None:
                return kind
            differs[kind] = x
    nearest = max(differs, key=lambda kind: abs(differs[kind]))
    log.debug("%s is not %s: they differ at x = %g", function, nearest, differs[nearest])
    return None


@cache
def _formula(kind: str) -> Exact:
    b = Body()
    result = feature_maps.find_map(kind).phi_onnx(b, "x", 1)
    return Exact(b.nodes, result)


@cache
def keeps_sign(function: Function) -> bool:
    """Return whether a function is not negative for x > 0, but is somewhere for x < 0."""
    found = _exact(function)
    if found is None:
        return False
    values = [(x, found(float(x))) for x in GRID]
    return all(y >= 0 for x, y in values if x > 0) and any(y < 0 for x, y in values if x < 0)


@cache
def never_negative(function: Function, argument_is: bool) -> bool:
    """Return whether a function never is below 0; ``argument_is``: nor is its argument."""
    found = _exact(function)
    if found is None:
        return False
    return all(found(x) >= 0 for x in found.probes() if x >= 0 or not argument_is)


@cache
def steepness(function: Function) -> float:
    """Return the largest size of a function of -1 and 1; 1 where it has other operators."""
    found = _exact(function)
    sizes = [1.0] if found is None else [abs(float(found(x))) for x in (-1.0, 1.0)]
    return max((size for size in sizes if math.isfinite(size)), default=1.0)


def casts(function: Function) -> int | None:
    """The element type a function ends in, if it says so."""
    if function[0] == "Cast":
        return int(dict(function[1])["to"])
    return casts(function[2]) if len(function) > 2 and isinstance(function[2], tuple) else None


def casts_to_float(function: Function) -> bool:
    """Return whether a function is a Cast to a floating-point type."""
    return function[0] == "Cast" and int(dict(function[1])["to"]) in FLOATING


def without_casts(function: Function) -> Function:
    """Return a function without the casts to floating-point types that it ends in."""
    while casts_to_float(function):
        function = function[2]
    return function


def _exact(function: Function) -> Exact | None:
    """The function without the rounding of casts; None where it has other operators."""
    b = Body()
    result = write(b, function, "x")
    try:
        return Exact(b.nodes, result)
    except NotImplementedError:
        return None
