"""The patch that makes bfloat16 right in Triton's interpreter, and that it is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

INSTALLED_SCAN = interpreter.ScanOps.generic_scan


@triton.jit
def products(a, b, out, SIZE: tl.constexpr):
    """exp(a b / 8) + sum of the first rows, with casts to bfloat16 and back on the way."""
    rows = tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + rows[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    z = tl.dot(x, y) * 0.125
    z = tl.exp(z.to(tl.bfloat16).to(tl.float32)) + tl.sum(x * y, 0)[None, :].to(tl.float32)
    z = tl.where(rows[:, None] < SIZE // 2, z, tl.maximum(x, y).to(tl.float32))
    tl.store(out + at, z.to(tl.bfloat16))


def error() -> float:
    """Of the kernel above, relative to float64 on the same bfloat16 inputs."""
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.normal(size=(16, 16))).to(torch.bfloat16) for _ in range(2))
    out = torch.full((16, 16), float("nan"), dtype=torch.bfloat16)
    products[(1,)](a, b, out, 16)
    x, y = a.double().numpy(), b.double().numpy()
    wanted = np.exp(x @ y / 8) + (x * y).sum(0)
    wanted[8:] = np.maximum(x, y)[8:]
    got = out.double().numpy()
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_patched_interpreter_computes_bfloat16() -> None:
    assert error() < 6e-3


def test_installed_interpreter_does_not(unpatched: None) -> None:
    """Should this fail after an upgrade, the patch is no longer needed."""
    assert not error() < 0.1


@pytest.mark.parametrize("value", [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20)])
def test_casts_round_to_nearest_even(value: float) -> None:
    x = torch.tensor([value], dtype=torch.float32)
    out = torch.zeros(1, dtype=torch.bfloat16)
    cast[(1,)](x, out)
    assert out.item() == x.to(torch.bfloat16).item()


@triton.jit
def cast(x, out):
    """One value to bfloat16."""
    tl.store(out, tl.load(x).to(tl.bfloat16))


@triton.jit
def later(m, g, a, h):
    """Of two stretches: a maximum that decays, and the decay."""
    return tl.maximum(m + h, a), g + h


@triton.jit
def scanned(a, g, out, SIZE: tl.constexpr):
    """The running maximum of columns, then that of one row."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    m, total = tl.associative_scan((tl.load(a + at), tl.load(g + at)), 0, later)
    tl.store(out + at, m + total)
    row = tl.arange(0, SIZE)
    m, _ = tl.associative_scan((tl.load(a + row), tl.load(g + row)), 0, later)
    tl.store(out + SIZE * SIZE + row, m)


def scan() -> torch.Tensor:
    """The output of the kernel above."""
    generator = torch.Generator().manual_seed(0)
    a, g = torch.randn(2, 8, 8, generator=generator)
    out = torch.full((9, 8), float("nan"))
    scanned[(1,)](a, -g.abs(), out, 8)
    return out


def test_scans_by_rows_are_those_of_the_installed_interpreter() -> None:
    by_rows = scan()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ScanOps, "generic_scan", INSTALLED_SCAN)
        assert torch.equal(by_rows, scan())
    assert torch.isfinite(by_rows).all()
