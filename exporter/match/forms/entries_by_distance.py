"""Entries of a value of pairs of tokens by the distance between the two, where it decides them.

    [s <= t] [t - s < 3] exp(q_t k_s)      is      unknown where t - s is 0, 1 or 2, else 0

An entry that depends on data is NaN here. Zero times anything is zero, because data are finite. A
score of -infinity remains so, because the sum with a finite number is -infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

Entries = np.ndarray
"""One number for each distance."""

UNKNOWN = np.nan

EXCLUDED = -1e4
"""Scores of at most this have no part in a softmax or a maximum."""


def made_of(node: gs.Node, given: list[Entries]) -> Entries:
    """Return what an operator that acts on entries makes of them."""
    if node.op in SPECIAL:
        return SPECIAL[node.op](*given)
    unknown = np.isnan(given).any(0)
    if unknown.all() or node.op == "Softmax":
        return given[0] * UNKNOWN if node.op != "Softmax" else softmax(given[0])
    result = np.asarray(_run(node, given), np.float64)
    return np.where(unknown, UNKNOWN, result)


def softmax(scores: Entries) -> Entries:
    """Return weights: 0 for what is excluded."""
    return np.where(scores <= EXCLUDED, 0.0, UNKNOWN)


def _times(a: Entries, b: Entries) -> Entries:
    # 0 x = 0, as data are finite.
    return np.where((a == 0) | (b == 0), 0.0, a * b)


def _plus(a: Entries, b: Entries) -> Entries:
    # -inf + x = -inf for finite x.
    low = (a <= EXCLUDED) & np.isnan(b), (b <= EXCLUDED) & np.isnan(a)
    return np.where(low[0], a, np.where(low[1], b, a + b))


def _minus(a: Entries, b: Entries) -> Entries:
    return np.where((a <= EXCLUDED) & np.isnan(b), a, a - b)


def _over(a: Entries, b: Entries) -> Entries:
    with np.errstate(all="ignore"):
        return np.where((a == 0) & np.isnan(b), 0.0, a / b)


def _where(truth: Entries, a: Entries, b: Entries) -> Entries:
    # A choice that data makes is known only between equal values.
    chosen = np.where(truth != 0, a, b)
    return np.where(np.isnan(truth) & (a != b), UNKNOWN, chosen)


def _and(a: Entries, b: Entries) -> Entries:
    # False and x is false, whatever x is.
    return np.where((a == 0) | (b == 0), 0.0, (a != 0) * (b != 0) + 0.0 * (a + b))


def _or(a: Entries, b: Entries) -> Entries:
    # True or x is true, whatever x is.
    one = ((a != 0) & ~np.isnan(a)) | ((b != 0) & ~np.isnan(b))
    return np.where(one, 1.0, 0.0 * (a + b))


def _same(a: Entries, *_: Entries) -> Entries:
    return a


SPECIAL: Mapping[str, Callable[..., Entries]] = {
    "Add": _plus,
    "Sub": _minus,
    "Mul": _times,
    "Div": _over,
    "Where": _where,
    "And": _and,
    "Or": _or,
    "Not": lambda a: np.where(np.isnan(a), UNKNOWN, a == 0),
    "Cast": _same,
    "CastLike": _same,
    "Identity": _same,
    "IsNaN": lambda a: np.where(np.isnan(a), UNKNOWN, 0.0),
    "IsInf": lambda a: np.where(np.isnan(a), UNKNOWN, np.isinf(a)),
}


def _run(node: gs.Node, given: list[Entries]) -> Any:
    """Return what the operator gives; numbers stand for those that are not known."""
    with np.errstate(all="ignore"):
        fed = {
            t.name: np.nan_to_num(x, nan=1.0, posinf=np.inf, neginf=-np.inf).astype(np.float32)
            for t, x in zip(node.inputs, given, strict=True)
        }
        found: Any = ReferenceEvaluator(OnnxExporter.export_node(node)).run(None, fed)
        return found[0]
