"""States in fewer bits while they are kept: each vector of the last axis, rounded.

    int8       q = round(x / s), s = max|x| / 127 of the vector       about a quarter of the bytes
    float16    q = x / s in half precision, s a power of two so that no value overflows     half

    x' = s q, with s in the dtype of x

What is not floating point, a mask or a count, is kept as it is. A state that was read back is not
the one that was written: ``relative_error`` says how far it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from linexport.errors import UsageError

PRECISIONS = ("float32", "float16", "int8")
"""How a state may be kept; the first keeps every bit of it, whatever its dtype."""

SCALE = "/scale"
"""Ending of the name under which ``s`` is kept."""

LARGEST_HALF, LARGEST_INT8 = 65504.0, 127


def check_precision(precision: str) -> None:
    """Refuse what is not one of ``PRECISIONS``.

    Raises:
        UsageError: it is not.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}.")


def shrink(arrays: Mapping[str, np.ndarray], precision: str) -> dict[str, np.ndarray]:
    """Return the arrays to keep: ``q`` under the name of ``x``, and its scales ``s``."""
    found: dict[str, np.ndarray] = {}
    for name, values in arrays.items():
        if values.dtype.kind != "f" or not values.ndim:
            found[name] = values
            continue
        size = np.abs(values).astype(np.float64)
        if precision == "int8":
            scale = size.max(-1, keepdims=True, initial=0) / LARGEST_INT8
            kind: type = np.int8
        else:
            ratio = size.max(initial=0) / LARGEST_HALF
            scale = np.exp2(np.ceil(np.log2(ratio))) if ratio > 1 else np.float64(1)
            kind = np.float16
        scale = np.asarray(scale, values.dtype)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(scale > 0, values / scale, 0)
        found[name] = (np.rint(scaled) if kind is np.int8 else scaled).astype(kind)
        found[f"{name}{SCALE}"] = scale
    return found


def expand(kept: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that ``shrink`` kept.

    Raises:
        ValueError: an array and its scale do not belong together.
    """
    found = {}
    for name, values in kept.items():
        scale = kept.get(f"{name}{SCALE}")
        if scale is None:
            if not name.endswith(SCALE):
                found[name] = values
            continue
        fits = scale.shape == () or scale.shape == (*values.shape[:-1], 1)
        if values.dtype not in (np.int8, np.float16) or scale.dtype.kind != "f" or not fits:
            raise ValueError(f"{name} and its scale do not belong together")
        found[name] = values.astype(scale.dtype) * scale
    return found


def relative_error(arrays: Mapping[str, np.ndarray], precision: str) -> dict[str, float]:
    """Return ||x' - x|| / ||x|| of each array."""
    back = arrays if precision == PRECISIONS[0] else expand(shrink(arrays, precision))
    found = {}
    for name, values in arrays.items():
        exact = values.astype(np.float64)
        norm = float(np.linalg.norm(exact))
        found[name] = float(np.linalg.norm(back[name] - exact)) / norm if norm else 0.0
    return found
