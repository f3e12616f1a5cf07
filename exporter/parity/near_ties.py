"""Tokens at which rounding decides a choice of the original, as a router's of its experts.

Two scores can be nearer to each other than their rounding. Which is larger is then no property of
the model: the same sums in another order, as in another program or with other threads, choose the
other expert, and what the layer gives for that token is far off. Where an artifact is off, the
original is run again with its products rounded otherwise,

    y' = y + 2^-21 rms(y) n,    n ~ N(0, 1),    rms over the last axis,

and a token of the artifact may be what one of ``RUNS`` such runs gives, within the same tolerance.
A wrong artifact is like none of them: all of them are the original.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linexport.parity.cases import Case
from linexport.parity.compare import BLOCK, largest
from linexport.parity.tolerances import Tolerance
from linexport.system import memory

log = logging.getLogger(__name__)

RUNS = 8
"""Runs of the original at the most: each decides one near tie either way about as often."""

ROUNDING = 2.0**-21
"""Relative to the values of a row: some roundings of float32, as sums of hundreds of terms have."""

PRODUCTS = {"aten::addmm", "aten::bmm", "aten::mm"}
CHOICES = {"aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::sort", "aten::topk"}


class RoundedOtherwise(TorchDispatchMode):
    """A context in which products of float32 are rounded as another order of their sums might.

    Attributes:
        chooses: a choice was made in it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chooses = False
        self._random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``func``, and what it gives changed by a rounding if it is a product."""
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.chooses |= name in CHOICES
        if name in PRODUCTS and found.dtype == torch.float32 and found.numel():
            for rows in found.flatten(0, -2).split(max(1, BLOCK // found.shape[-1])):
                size = rows.square().mean(-1, keepdim=True).sqrt()
                noise = torch.randn(rows.shape, generator=self._random)
                rows.add_(noise.mul_(size), alpha=ROUNDING)
        return found


def settled(
    expected: np.ndarray,
    got: np.ndarray,
    tolerance: Tolerance,
    rounding: float,
    run: Callable[[], np.ndarray],
) -> np.ndarray:
    """Return what is expected of an artifact that may have decided near ties otherwise.

    Args:
        expected: the original's output, (..., width).
        got: the artifact's.
        tolerance: within which a token must be that of a run.
        rounding: of the original, which is allowed for as always.
        run: runs the original again.

    Returns:
        ``expected``, at tokens where the artifact is off what one of the runs gives and the
        artifact has; ``expected`` itself where any token is like none of them, or the original
        makes no choices.
    """
    if tolerance.is_half or expected.shape != got.shape or expected.ndim < 2:
        return expected
    limit = tolerance.limit(largest(expected), rounding)
    off = _off(expected, got, limit)
    [found] = memory.memory_mapped([expected.reshape(-1, expected.shape[-1])])
    for seed in range(RUNS):
        if not off.any():
            return found.reshape(expected.shape)
        try:
            with RoundedOtherwise(seed) as otherwise:
                other = run().reshape(found.shape)
        except Exception as error:  # whatever the module raises in such a context
            log.info("the original cannot be run with other roundings: %r", error)
            break
        if not otherwise.chooses:
            break
        like = off & ~_off(other, got, limit)
        found[like] = other[like]
        off &= ~like
    return expected if off.any() else found.reshape(expected.shape)


def note(case: Case) -> str:
    """Return the sentence on a case in which near ties were settled."""
    return (
        f"On the {case.name} inputs of {dict(case.sizes)} rounding decides a choice of the "
        "original, as a router's between experts with nearly the same score: there the artifact is "
        "what the original gives when its products are rounded otherwise."
    )


def _off(expected: np.ndarray, got: np.ndarray, limit: float) -> np.ndarray:
    """Return which tokens, of (..., width), are further apart than the limit."""
    return np.concatenate([*_blocks_off(expected, got, limit)])


def _blocks_off(expected: np.ndarray, got: np.ndarray, limit: float) -> Iterator[np.ndarray]:
    width = expected.shape[-1]
    wide, found = expected.reshape(-1, width), got.reshape(-1, width)
    yield np.zeros(0, bool)
    for start in range(0, len(wide), size := max(1, BLOCK // max(1, width))):
        part = slice(start, start + size)
        with np.errstate(invalid="ignore"):
            near = np.abs(wide[part] - found[part]) <= limit
            yield ~(near | (wide[part] == found[part])).all(-1)
