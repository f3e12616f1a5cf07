"""How far rounding moves the original's outputs, row by row, where its own run does not tell.

    y = x rounded to the next value of the precision above x or below it, at random: to the upper
        one with the probability (x - below) / (above - below), so that y is x in the mean
    y = sum_i x_i + u r sum_i |x_i|, rounded so: what another order of a sum makes of it, with r
        between -1 and 1 at random, u half the distance from 1 to the next value

The original's own run in float32 has one rounding error of many: at a token where a norm divides by
nearly nothing it may be right to 5e-6 by chance, where the next program that rounds as well is off
by 1e-4. So where an artifact is off by more than that run explains, the original is run in float64
with the result of every operator rounded so, a few times: random rounding (J. Vignes, Numerical
Algorithms 37, 2004; D. S. Parker, Monte Carlo arithmetic, UCLA CSD-970002, 1997). Values that the
precision has stay as they are, those that an operator only moves among them. Errors are distributed
as the original's own are, token by token, within a factor of two.

This is not a second tolerance: a token may be off by as many times what rounding moves it as
always, and by the same share of the largest value at most. What is wrong with an artifact in front
of an ill-conditioned place is enlarged there as rounding is, and is larger than rounding; what is
wrong behind it shows at the other tokens, which may be off by no more than before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from linexport.parity.cases import Case
from linexport.parity.compare import largest
from linexport.parity.noise.float32_error import apart_by_row
from linexport.parity.routing.near_ties import ForcedChoices, Run, T
from linexport.parity.tolerances import ROUNDING, Tolerance
from linexport.system.torch_internals.operators import OperatorMode, makes_values
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

log = logging.getLogger(__name__)

DRAWS = 16
"""Runs with random roundings, at the most. Where errors have one direction and are normally
distributed, one is more than four times the largest of 16 draws once in 800,000 times; if it is of
a program that rounds 1.5 times as much, once in 9,500 times.
"""

aten = torch.ops.aten
SUMS = {
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.cumsum.default, aten.convolution.default),
}
"""Operators that add up products, or values, in an order that another program need not have."""

HALF_WIDTH = 0.25
"""Share of the distance to the next value by which values are moved before they are rounded to the
nearest in half precision: there an artifact may be off by little more than the original, and random
rounding alone is off by 1.4 times what rounding to the nearest is. Which way one value goes changes
all that follow.
"""

EPS = torch.finfo(torch.float32).eps
"""Sums are added up in float32, those of values in half precision as well."""

FRACTION = 52
"""Bits of a float64 behind its leading one."""


class RandomRounding(OperatorMode):
    """A context in which what PyTorch computes in float64 is rounded at random.

    Args:
        dtype: the precision rounded to. Its range is not: values beyond it stay.
        seed: of the roundings.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._unit = 1 << (FRACTION + round(math.log2(torch.finfo(dtype).eps)))
        self._width = 1.0 if dtype == torch.float32 else HALF_WIDTH

    def __torch_dispatch__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """``func``, rounded where it makes values; a view has those of another tensor."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in SUMS and found.dtype == torch.float64:
            terms = func(*pytree.tree_map(_size, args), **kwargs)
            found += EPS * self._random(found.shape) * terms
        if makes_values(func):
            for leaf in pytree.tree_leaves(found):
                if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                    bits = leaf.view(torch.int64)
                    moved = 0.5 + self._width * self._random(leaf.shape)
                    bits.add_((self._unit * moved).long())
                    bits.bitwise_and_(-self._unit)
        return found

    def _random(self, shape: Sequence[int]) -> Tensor:
        """Draw from -1/2 to 1/2."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float64) - 0.5


def _size(argument: object) -> object:
    return argument.abs() if isinstance(argument, Tensor) else argument


def draw(
    run: Run[T],
    dtype: str,
    seed: int,
    choices: Collection[np.ndarray] | None = None,
    kept: np.ndarray | None = None,
) -> T | None:
    """Run the original once with random roundings.

    Args:
        run: runs it in float64.
        dtype: rounded to.
        seed: of the roundings.
        choices: that it is to make, see ``ForcedChoices``.
        kept: see there.

    Returns:
        Its output; None where it cannot be run so, or makes choices that none are given for:
        roundings could turn those.
    """
    forced = ForcedChoices(choices, kept)
    try:
        output = run(_within(RandomRounding(getattr(torch, dtype), seed), forced))
    except Exception as error:  # whatever the module raises
        log.info("the original cannot be run with random roundings: %r", error)
        return None
    return None if choices is None and forced.made else output


@contextmanager
def _within(rounding: RandomRounding, forced: ForcedChoices) -> Iterator[None]:
    with rounding, forced:
        yield


def rounding_of_rows(
    known: np.ndarray,
    exact: np.ndarray,
    draw: Callable[[int], np.ndarray | None],
    off: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return how far rounding moves each row, drawn only for rows that are off.

    Args:
        known: how far a run of the original's own was moved, by row, see ``compare.rows``.
        exact: the original's output.
        draw: gives the same with random roundings by a seed; None where that is not known.
        off: says which rows of an artifact are off by more than such distances allow.
    """
    rounding = known.copy()
    for seed in range(DRAWS):
        rows = off(rounding)
        drawn = draw(seed) if rows.any() else None
        if drawn is None:
            break
        rounding[rows] = np.maximum(rounding, apart_by_row(exact, drawn))[rows]
    return rounding


def notes(moved: Sequence[tuple[Case, np.ndarray]], tolerance: Tolerance) -> list[str]:
    """Return the note on tokens that were judged by random roundings.

    Args:
        moved: by case, how far these move each such token, relative to the largest value.
        tolerance: of the artifact.
    """
    cases = [(case, rows) for case, rows in moved if len(rows)]
    if not cases:
        return []
    case, rows = max(cases, key=lambda pair: float(pair[1].max()))
    tokens = sum(len(rows) for _, rows in cases)
    others = f", and some in {len(cases) - 1} more" if len(cases) > 1 else ""
    return [
        f"Random roundings of {tolerance.dtype} move the original by up to {rows.max():.0e} of its "
        f"largest value at {tokens:,} tokens, on the {case.name} inputs at {case.at}"
        f"{others}, where its own run lost less by chance: each of these may be off by "
        f"{tolerance.factor:g} times what they move it{tolerance.cap}."
    ]


def notes_of_outputs(moved: Sequence[float], exact: Sequence[np.ndarray], case: Case) -> list[str]:
    """Return the note on a case whose outputs were judged by random roundings, all tokens at once.

    Args:
        moved: how far these move each output.
        exact: the original's outputs.
        case: of inputs a hundred times too large, or too small.
    """
    shares = [m / largest(x) for m, x in zip(moved, exact, strict=True) if largest(x)]
    return [
        f"Random roundings of float32 move the original by up to {max(shares, default=0.0):.0e} of "
        f"its largest value on the {case.name} inputs at {case.at}, where its own run lost less by "
        f"chance: the artifact may be off by {ROUNDING:g} times that."
    ]
