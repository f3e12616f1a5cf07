"""Time and memory that the original takes for images: the largest are made smaller.

A loop over the pixels of an image of 511 x 514 takes minutes and gigabytes where the same loop over
4,097 tokens takes a second; scores between all pixels take more memory than a machine has.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor
from torch.overrides import TorchFunctionMode

from linexport.graph.dims import DimRange
from linexport.parity.cases import NEVER_TRACED, Case
from linexport.system.room import available_memory
from linexport.system.untyped import Keywords, Positional, TorchCallable

PATIENCE = 10.0
"""Seconds that the original may take for one case, by the smaller ones before it."""

HELD = 8
"""Tensors as large as the largest that available memory has to hold."""

LEAST = NEVER_TRACED[0] ** 2
"""Pixels that are compared whatever they take: an image of a size that was not traced."""

APART = 4.0
"""Ratio of two sizes from which their times say how time grows with size."""


def sides(dims: Mapping[str, DimRange], shapes: Sequence[Sequence[int | str]]) -> set[str]:
    """Return the dynamic dims of the input that has most of them, the batch aside.

    Two and more are those of an image.

    Args:
        dims: the dynamic dimensions.
        shapes: of the inputs, dynamic sizes by name.
    """
    lengths = {name for name, limits in dims.items() if not limits.batch}
    return max((lengths.intersection(shape) for shape in shapes), key=len, default=set())


class Growth:
    """A quantity of one image that grows with the number of its pixels.

    Args:
        limit: what it may be.
        unit: of it.
        of_two: which of two measurements of one size counts.
    """

    def __init__(self, limit: float, unit: str, of_two: Callable[[float, float], float]) -> None:
        self.limit, self.unit, self._of_two = limit, unit, of_two
        self._measured: dict[int, float] = {}

    def add(self, pixels: int, quantity: float) -> None:
        """Note what was measured at so many pixels."""
        self._measured[pixels] = self._of_two(quantity, self._measured.get(pixels, quantity))

    def expected(self, pixels: int) -> tuple[float, float]:
        """Return the quantity at so many pixels, and the power of their number by which it grows.

        From one size to four times that, a quantity says whether it grows with the number of pixels
        or, as that of scores between all of them, with its square.
        """
        if not self._measured:
            return 0.0, 1.0
        most = max(self._measured)
        less = max((n for n in self._measured if n * APART <= most), default=0)
        if not less or not self._measured[less] or not self._measured[most]:
            return self._measured[most] * pixels / most, 1.0
        grown = math.log(self._measured[most] / self._measured[less]) / math.log(most / less)
        grown = min(max(grown, 1.0), 2.0)
        return self._measured[most] * (pixels / most) ** grown, grown


class ImageCost:
    """Time and memory of the original for images, by their number and their pixels.

    Args:
        dims: the dynamic dimensions.
        shapes: of the inputs, dynamic sizes by name.
    """

    def __init__(self, dims: Mapping[str, DimRange], shapes: Sequence[Sequence[int | str]]) -> None:
        self._dims, self._sides = dims, sides(dims, shapes)
        # Pauses of a busy machine only add to a time: the shortest is the one without them.
        self.seconds = Growth(PATIENCE, "s", min)
        memory = (available_memory() or math.inf) / HELD / 1e9
        self.gigabytes = Growth(memory, "GB in one tensor", max)

    def measuring(self) -> Largest | nullcontext[None]:
        """Return a context that measures what the original takes; of images alone."""
        return Largest() if len(self._sides) > 1 else nullcontext()

    def add(self, case: Case, taken: Largest | None) -> None:
        """Note what a case took in such a context, unless it failed."""
        if taken is not None:
            pixels, images = self._pixels(case)
            self.seconds.add(pixels, taken.seconds / images)
            self.gigabytes.add(pixels, taken.bytes / 1e9 / images)

    def affordable(self, case: Case, notes: list[str]) -> Case:
        """Return a case whose images are smaller where the original would take too much.

        Args:
            case: as it is planned.
            notes: get a line where it is made smaller.
        """
        pixels, images = self._pixels(case)
        if len(self._sides) < 2 or pixels <= LEAST:
            return case
        shares = {one: self._share(one, case) for one in (self.seconds, self.gigabytes)}
        first = min(shares, key=lambda one: shares[one])
        if shares[first] >= 1:
            return case
        share = max(shares[first], LEAST / pixels) ** (1 / len(self._sides))
        smaller = {n: self._dims[n].nearest(int(case.sizes[n] * share)) for n in self._sides}
        found = replace(case, sizes={**case.sizes, **smaller})
        expected = images * first.expected(pixels)[0]
        notes.append(
            f"The original would take about {expected:.2g} {first.unit} at {case.at}: it is "
            f"compared at {found.at} in its place."
        )
        return found

    def _share(self, quantity: Growth, case: Case) -> float:
        """Return the share of a case's pixels up to which a quantity keeps to its limit."""
        pixels, images = self._pixels(case)
        expected, grown = quantity.expected(pixels)
        expected *= images
        return (quantity.limit / expected) ** (1 / grown) if expected > quantity.limit else 1.0

    def _pixels(self, case: Case) -> tuple[int, float]:
        """Return the number of pixels of an image of a case, and the number of images."""
        pixels = math.prod(case.sizes[name] for name in self._sides)
        return pixels, math.prod(case.sizes.values()) / pixels


class Largest(TorchFunctionMode):
    """The bytes of the largest tensor that a model makes, and the seconds that it takes.

    A process that waits for others takes no time of processors, one of many threads more than the
    clock says: the smaller of both is what the model takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._start = 0, (time.perf_counter(), time.process_time())

    @property
    def seconds(self) -> float:
        return min(time.perf_counter() - self._start[0], time.process_time() - self._start[1])

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """Run ``func``."""
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, Tensor):
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return found
