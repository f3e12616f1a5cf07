"""A node that is checked and timed on a GPU: its inputs, oracle and least traffic.

NumPy and the ops' own definitions are all that cases need: they run where neither torch nor Triton
is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from linexport.plugins.ops.op import Node
from linexport.plugins.ops.shapes import PartialShape

Array = NDArray[Any]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """One node and the sizes to run it at.

    Attributes:
        target: largest wanted multiple of the floor, where one is stated.
        peer: name of the peer that computes the same, if any.
    """

    name: str
    batch: int
    length: int
    heads: int = 16
    width: int = 128
    dtype: str = "bfloat16"
    target: float | None = None
    peer: str = ""

    @property
    def wide(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def node(self) -> Node:
        """Return the node as the plugins see it; of a layer, its attention."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, PartialShape]:
        """Return the shapes of the inputs in B and T, by name."""
        return self.node().shapes

    def states(self) -> dict[str, str]:
        """Return the outputs that are states, by the input of their past."""
        return {n: n.replace("past", "present") for n in self.tensors() if n.startswith("past")}

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The oracle's results by name, in float64, of what ``inputs`` gave."""
        raise NotImplementedError

    def bytes(self) -> int:
        """Fewest bytes moved: every sequence once; every state once in and once out."""
        raise NotImplementedError

    def fill(self, name: str, x: Array) -> Array:
        """An input as the op is used with, from a normal draw; in its dtype."""
        return x.astype(DTYPES[self.dtype])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs, by name."""
        sizes = {"B": self.batch, "T": self.length}
        return {
            name: tuple(int(sizes.get(n, n)) for n in shape)  # type: ignore[call-overload]
            for name, shape in self.tensors().items()
        }

    def inputs(self, seed: int = 0, most: int | None = None) -> dict[str, Array]:
        """Return random inputs; of a tensor about ``most`` values, to be repeated."""
        rng = np.random.default_rng(seed)
        found = {}
        for name, shape in self.shapes().items():
            if most and np.prod(shape) > most:
                shape = (1, max(most // int(np.prod(shape[2:])), 1), *shape[2:])
            found[name] = self.fill(name, rng.normal(size=shape).astype(np.float32))
        return found


def padded(shape: tuple[int, ...]) -> Array:
    """A mask (B, T) by which sequence b lacks its last 5 (b + 1) tokens."""
    return np.arange(shape[1]) < shape[1] - 5 * np.arange(1, shape[0] + 1)[:, None]


def small(case: Case) -> Case:
    """Shrink a case to sizes the float64 oracle takes, long enough to be cut into segments."""
    return replace(case, batch=2, length=case.length if case.length < 8 else 1037)
