"""Kernels in Triton's interpreter: on the CPU, with bfloat16 made right, against float64 oracles.

``tests/conftest.py`` chooses the interpreter.

The interpreter keeps bfloat16 as bit patterns and computes on these, so that products, sums and
casts are silently wrong. ``correct_bfloat16`` gives it a NumPy type that knows what it is; the
patch is of the installed version, and ``test_interpreter`` shows that it is needed and works.
Scans go over rows instead of elements (``scan_rows``): the same values, a hundred times as fast.
Functions that a kernel calls find the language as its launch prepared it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")

import triton.language as tl
from triton.runtime import interpreter

from tests.support.interpreter import prepare_once_a_launch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def correct_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter hold bfloat16 as ``ml_dtypes.bfloat16``, as bits only in memory."""
    builder, numpy_dtype = interpreter.InterpreterBuilder, interpreter._get_np_dtype
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot
    handle = interpreter.TensorHandle
    known = {tl.bfloat16.name: BFLOAT16}

    def np_dtype(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name  # the installed function makes a table of all types in each call
        if name not in known:
            known[name] = numpy_dtype(dtype.scalar)
        return known[name]

    def as_bits(x: Any) -> Any:
        if x is None or x.data.dtype != BFLOAT16:
            return x
        return handle(x.data.view(np.uint16), x.dtype)

    def widened(x: Any) -> Any:
        if x.data.dtype != BFLOAT16:
            return x
        return handle(x.data.astype(np.float32), tl.float32)

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if pointers.get_element_ty() != tl.bfloat16:
            return load(self, pointers, mask, other, *rest)
        if other is None:
            other = handle(np.zeros(pointers.data.shape, BFLOAT16), tl.bfloat16)
        bits = interpreter._interpreter.load(
            pointers.data, mask.data, as_bits(other).data, np.dtype(np.uint16)
        )
        return handle(bits.view(BFLOAT16), tl.bfloat16)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, pointers, as_bits(value), mask, *rest)

    def cast(self: Any, source: Any, to: Any, *rounding: Any) -> Any:
        return handle(source.data.astype(interpreter._get_np_dtype(to)), to.scalar)

    def matmul(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    patch.setattr(interpreter, "_get_np_dtype", np_dtype)
    patch.setattr(builder, "create_masked_load", masked_load)
    patch.setattr(builder, "create_masked_store", masked_store)
    patch.setattr(builder, "cast_impl", cast)
    patch.setattr(builder, "create_fp_to_fp", cast)
    patch.setattr(builder, "create_dot", matmul)


def scan_rows(self: Any, tensors: Any) -> list[Any]:
    """``ScanOps.generic_scan``, with the function of a step called for a whole row."""
    rows = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in tensors), strict=True)
    steps: list[Any] = []
    for row in rows:
        step = tuple(self.to_tensor(x, t.dtype) for x, t in zip(row, tensors, strict=True))
        if steps:
            step = self.combine_fn.fn(*steps[-1], *step)
        steps.append(step if isinstance(step, tuple) else (step,))
    found = []
    for column, t in zip(zip(*steps, strict=True), tensors, strict=True):
        whole = np.stack([x.handle.data for x in column], self.axis)
        found.append(self.to_tensor(whole.reshape(t.handle.data.shape), t.dtype))
    return found


@pytest.fixture(autouse=True)
def bfloat16(request: pytest.FixtureRequest) -> Any:
    """The interpreter with the patch, unless a test is marked ``as_installed``."""
    with pytest.MonkeyPatch.context() as patch:
        if "unpatched" not in request.fixturenames:
            correct_bfloat16(patch)
            patch.setattr(interpreter.ScanOps, "generic_scan", scan_rows)
            prepare_once_a_launch(patch)
        # Rows past the end divide zero by zero; nothing stores them.
        with np.errstate(all="ignore"):
            yield


@pytest.fixture
def unpatched() -> None:
    """For tests of what the interpreter does as it is installed."""
