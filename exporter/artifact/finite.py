"""NaN and infinity in inputs and states, found row by row.

sum(values) is finite  ->  so is every value           one pass, and the usual case
else                   ->  the rows with a value that is not, if any: sums of finite values overflow
"""

from __future__ import annotations

import numpy as np


def non_finite_rows(values: np.ndarray) -> np.ndarray:
    """Return the indices along the first axis at which an array has NaN or infinity."""
    if values.dtype.kind != "f" or not values.size:
        return np.empty(0, np.intp)
    values = np.asarray(values)
    dtype = np.float32 if values.dtype.itemsize < 4 else values.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(values.sum(dtype=dtype)):
            return np.empty(0, np.intp)
    wrong = ~np.isfinite(np.atleast_1d(values))
    return np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))
