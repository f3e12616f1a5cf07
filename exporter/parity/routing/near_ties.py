"""Choices that rounding decides, as a router's of its experts: compared as the artifact makes them.

Two scores can be nearer to each other than their rounding. Which is larger is then no property of
the model: the same sums in another order, as in another program or with other threads, choose the
other expert, and what the model gives for that token, and for all that follow it, is far off. So
where an artifact is off, the original is run again with the artifact's choices in place of its own,
and what it then gives is compared as always. Every choice must be within rounding: with the
original's own scores s_(1) >= s_(2) >= ... of a token, and e_1 ... e_k what the artifact chose,

    | s_(j) - s[e_j] | <= 2 limit(max |s|)    for j = 1 ... k,

the limit being that of any value, see ``linexport.parity.tolerances``: two scores that are each off
by so much may change places. As there, what the original loses in these scores from float64 to
float32 is allowed for.

Values that are rounded to whole numbers, as activations to 8 bits, are such choices: a value near
the middle of two numbers becomes either. With the original's own values x of a token and the
artifact's numbers n, which are the next ones where they differ from the original's round(x),

    | x_i - (n_i + round(x_i)) / 2 | <= limit(max |x|).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from linexport.parity.cases import Case
from linexport.parity.noise.float32_error import apart
from linexport.parity.routing.choices import Choice, Made, Rounded
from linexport.parity.tolerances import Tolerance
from linexport.patches import are_choices_replaced, choosing_together
from linexport.system.torch_internals.operators import OperatorMode, arguments, name_of
from linexport.system.untyped import Keywords, Positional, TorchCallable

log = logging.getLogger(__name__)

T = TypeVar("T")

Deciding = AbstractContextManager[object]
"""A context in which choices are made otherwise than outside of it."""

Run = Callable[[Deciding], T]
"""Runs the original, in that context what chooses."""

LARGEST = {"aten::argmax", "aten::max"}
SMALLEST = {"aten::argmin", "aten::min"}
CHOOSING = {"aten::sort", "aten::topk", *LARGEST, *SMALLEST}
ROUNDING = {"aten::round", "aten::round_"}


@dataclass(frozen=True)
class NearTies:
    """Choices that differ from a program's own by rounding.

    Attributes:
        differing: their number.
        of: number of all choices.
        gap: largest difference of scores, relative to the largest score of the token.
    """

    differing: int = 0
    of: int = 0
    gap: float = 0.0

    def __str__(self) -> str:
        return f"{self.differing} of {self.of} choices, by {self.gap:.0e} of the largest score"


def notes(found: Sequence[tuple[Case, NearTies]]) -> list[str]:
    """Return what is to be said of cases that were compared with the artifact's choices."""
    if not found:
        return []
    case, most = max(found, key=lambda pair: pair[1].differing)
    gap = max(ties.gap for _, ties in found)
    others = f", and some in {len(found) - 1} more" if len(found) > 1 else ""
    return [
        f"On the {case.name} inputs at {case.at} rounding decides {most.differing} of "
        f"{most.of} choices of the original, as a router's between experts or of the next whole "
        f"number{others}: their scores differ by {gap:.0e} of the token's largest at the most. "
        "There the original was run with the choices of the artifact, and compared as always."
    ]


@dataclass(frozen=True)
class Decided(Generic[T]):
    """Outputs of the original with choices of an artifact, run by run."""

    outputs: list[T]
    ties: NearTies


def decide(
    runs: Sequence[Run[T]],
    choices: Collection[np.ndarray],
    tolerance: Tolerance,
    kept: np.ndarray | None = None,
) -> Decided[T] | None:
    """Run the original with the choices of an artifact.

    Args:
        runs: in float32, and in float64 where it can be: a second run that fails is left out.
        choices: see ``ForcedChoices``.
        tolerance: of values.
        kept: see ``ForcedChoices``.

    Returns:
        None where a choice is not within rounding, or the original makes none that is known, or
        cannot be run so.
    """
    if tolerance.is_half:
        return None
    outputs, made = [], []
    for run in runs:
        forced = ForcedChoices(choices, kept)
        try:
            outputs.append(run(forced))
        except Exception as error:  # whatever the module raises
            log.info("the original cannot be run with the choices of the artifact: %r", error)
            break
        if forced.absurd:
            return None
        made.append(forced.made)
    ties = within_rounding(made, tolerance) if any(made) else None
    return None if ties is None else Decided(outputs, ties)


@dataclass(frozen=True)
class Alike(Generic[T]):
    """Outputs of the original in both precisions with one set of choices.

    Attributes:
        single: in float32, of an original that makes no choices; None of another.
        double: in float64 with the choices of float32; None where it makes none, they are not
            near, or it cannot be run so.
    """

    single: T | None = None
    double: T | None = None


def run_alike(single: Run[T], double: Run[T], tolerance: Tolerance) -> Alike[T]:
    """Run the original in float32, and in float64 with the choices it makes there, if any."""
    own = ForcedChoices(None)
    try:
        narrow = single(own)
    except Exception as error:  # whatever the module raises
        log.info("what the original chooses is not known: %r", error)
        return Alike()
    if not own.made:
        return Alike(narrow)
    decided = decide([double], [made.taken for made in own.made], tolerance)
    return Alike() if decided is None else Alike(None, decided.outputs[0])


def within_rounding(runs: Sequence[Sequence[Choice]], tolerance: Tolerance) -> NearTies | None:
    """Return how near the choices taken are to a program's own; None where one is not near.

    Args:
        runs: choices of the program, or of the original in float32 and in float64.
        tolerance: of values.
    """
    lost = [0.0] * max(map(len, runs))
    if len({len(made) for made in runs}) == 1:
        lost = [apart(m.scores, n.scores) for m, n in zip(runs[0], runs[-1], strict=True)]
    most = NearTies()
    for made in runs:
        gaps = [_near(m, tolerance, x) for m, x in zip(made, lost, strict=False)]
        known = [x for x in gaps if x is not None]
        if len(known) < len(gaps):
            return None
        differing = np.concatenate([np.zeros(0), *known])
        ties = NearTies(
            len(differing), sum(m.count for m in made), float(differing.max(initial=0.0))
        )
        most = max(most, ties, key=lambda x: (x.differing, x.of))
    return most


def _near(made: Choice, tolerance: Tolerance, rounding: float) -> np.ndarray | None:
    """Return distances of scores, each relative to the largest of its row, where choices differ.

    None where one of them is more than rounding.
    """
    if isinstance(made, Rounded):
        return _near_middle(made, tolerance, rounding)
    signed = made.scores if made.largest else -made.scores
    own, taken = made.own, made.taken
    if not made.ordered:
        own, taken = np.sort(own, -1), np.sort(taken, -1)
    rows = np.flatnonzero((own != taken).any(-1))
    signed, taken = signed[rows], taken[rows]
    best = -np.sort(-signed, -1)[:, : taken.shape[-1]]
    scores = np.take_along_axis(signed, taken, -1)
    if not made.ordered:
        scores = -np.sort(-scores, -1)
    with np.errstate(invalid="ignore"):
        gaps = np.where(best == scores, 0.0, np.abs(best - scores)).max(-1, initial=0.0)
    sizes = np.where(np.isfinite(signed), np.abs(signed), 0.0).max(-1, initial=0.0)
    limits = [2 * tolerance.limit(float(size), rounding) for size in sizes]
    return gaps / np.where(sizes, sizes, 1.0) if (gaps <= limits).all() else None


def _near_middle(made: Rounded, tolerance: Tolerance, rounding: float) -> np.ndarray | None:
    """Return distances to the middle of two numbers, see ``_near``."""
    rows, columns = np.nonzero(made.own != made.taken)
    own, taken = made.own[rows, columns], made.taken[rows, columns]
    gaps = np.abs(made.scores[rows, columns] - (own + taken) / 2)
    sizes = np.abs(made.scores).max(-1, initial=0.0)[rows]
    limits = [tolerance.limit(float(size), rounding) for size in sizes]
    near = (np.abs(own - taken) == 1) & (gaps <= limits)
    return gaps / np.where(sizes, sizes, 1.0) if near.all() else None


class ForcedChoices(OperatorMode):
    """A context in which PyTorch takes given choices in place of its own.

    Args:
        choices: places (..., k), in the order in which they are made, and whole numbers in
            floating point. Those that no call fits are left out; a call that none fits makes its
            own. None: all calls make their own.
        kept: tokens that count, (B, T) of 1 and 0: others keep their own choice. None: all count.
        near: a tolerance within which choices are taken, others are not; None: all are taken.

    Attributes:
        made: the choices that were taken, of tokens that count.
        absurd: some have a place twice, or one that does not exist, and were not taken.
    """

    def __init__(
        self,
        choices: Collection[np.ndarray] | None,
        kept: np.ndarray | None = None,
        near: Tolerance | None = None,
    ) -> None:
        super().__init__()
        self.made: list[Choice] = []
        self.absurd = False
        self._near = near
        self._left = None if choices is None else [c for c in choices if c.dtype.kind != "f"]
        self._numbers = None if choices is None else [c for c in choices if c.dtype.kind == "f"]
        self._kept = None if kept is None else torch.from_numpy(kept.reshape(-1) != 0)

    def __enter__(self) -> ForcedChoices:
        self._together = choosing_together()
        self._together.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._together.__exit__(None, None, None)

    def __torch_dispatch__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """``func``, or the places that are given and their values."""
        name = name_of(func)
        if name in ROUNDING and are_choices_replaced():
            return self._rounded(func, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        if name not in CHOOSING or not are_choices_replaced():
            return found
        given = arguments(func, args, kwargs or {})
        scores, dim = given["self"], given.get("dim")
        if dim is None or not scores.is_floating_point():
            return found
        own = found if isinstance(found, Tensor) else found[1]
        squeezed = own.dim() < scores.dim()
        largest = name in LARGEST or bool(given.get("largest", given.get("descending")))
        taken = self._taken(
            scores.movedim(dim, -1),
            (own.unsqueeze(dim) if squeezed else own).movedim(dim, -1),
            largest,
            bool(given.get("sorted", True)),
        )
        if taken is None:
            return found
        taken = taken.movedim(-1, dim)
        values = scores.gather(dim, taken)
        taken, values = (x.squeeze(dim) if squeezed else x for x in (taken, values))
        return taken if isinstance(found, Tensor) else (values, taken)

    def _rounded(self, func: TorchCallable, args: Positional, kwargs: Keywords) -> object:
        """Return numbers that are given in place of those of a call that rounds."""
        given = arguments(func, args, kwargs)
        values = given["self"].clone()
        found: Tensor = func(*args, **kwargs)
        if given.get("decimals") or not values.is_floating_point() or not values.dim():
            return found
        own = found.reshape(-1, found.shape[-1])
        numbers = self._next_numbers(own)
        if numbers is None:
            return found
        taken, counted = self._of_counted(torch.from_numpy(numbers).to(own.dtype), own)
        among, mine, other = (
            x[counted].double().numpy() for x in (values.reshape(own.shape), own, taken)
        )
        made = Rounded(among, mine, other)
        if self._near is not None and _near(made, self._near, 0.0) is None:
            return found
        self.made.append(made)
        return found.copy_(taken.reshape(found.shape))

    def _next_numbers(self, own: Tensor) -> np.ndarray | None:
        """Return the next numbers of that size that are the same or the next ones everywhere."""
        mine = own.double().numpy().copy()
        for place, choice in enumerate([mine] if self._numbers is None else self._numbers):
            if choice.shape[-1] == own.shape[-1] and choice.size == own.numel():
                numbers = choice.reshape(own.shape)
                if (np.abs(numbers - mine) <= 1).all():
                    if self._numbers is not None:
                        del self._numbers[place]
                    return np.ascontiguousarray(numbers)
        return None

    def _of_counted(self, taken: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return choices (rows, k) with a program's own for tokens that do not count; who does."""
        counted = torch.ones(len(rows), dtype=torch.bool)
        if self._kept is not None and len(rows) % len(self._kept) == 0:
            counted = self._kept.repeat_interleave(len(rows) // len(self._kept))
            taken = torch.where(counted[:, None], taken, rows)
        return taken, counted

    def _taken(self, scores: Tensor, own: Tensor, largest: bool, ordered: bool) -> Tensor | None:
        """Return what is taken of scores (..., n) in place of (..., k); None for that itself."""
        choice = self._next(own)
        if choice is None:
            return None
        rows = own.reshape(-1, own.shape[-1])
        taken, counted = self._of_counted(torch.from_numpy(choice.reshape(rows.shape)), rows)
        twice = (taken.sort(-1).values.diff(dim=-1) == 0).any()
        if twice or bool((taken < 0).any()) or bool((taken >= scores.shape[-1]).any()):
            self.absurd = True
            return None
        among = scores.reshape(-1, scores.shape[-1])[counted]
        if among.dtype in (torch.bfloat16, torch.float16):
            among = among.float()
        mine, other = (x[counted].numpy() for x in (rows, taken))
        made = Made(among.numpy(), mine, other, largest, ordered)
        if self._near is not None and _near(made, self._near, 0.0) is None:
            return None
        self.made.append(made)
        return taken.reshape(own.shape)

    def _next(self, own: Tensor) -> np.ndarray | None:
        """Return the next choice of that size, and leave out those before it."""
        if self._left is None:
            return own.numpy()
        for place, choice in enumerate(self._left):
            if choice.shape[-1] == own.shape[-1] and choice.size == own.numel():
                del self._left[: place + 1]
                return choice
        return None
