"""Sequences that a model was given in as few calls as they fit in, kept to compare others with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from linexport.parity.cases import Case
from linexport.parity.check import ModelUnderTest
from linexport.parity.streams.splits import Split
from linexport.system import memory

Arrays = Mapping[str, np.ndarray]

_Key = tuple[tuple[str, ...], str, tuple[tuple[str, int], ...], int, tuple[int, ...]]


@dataclass
class WholeRuns:
    """Outputs and last states of one model; large ones are memory-mapped.

    Attributes:
        tested: the model as it was run, by the names of its outputs: a language model's hidden
            states are the outputs of its decoder.
        kept: by the names of outputs, the case, and the tokens of each call.
    """

    tested: dict[tuple[str, ...], ModelUnderTest] = field(default_factory=dict)
    kept: dict[_Key, Arrays] = field(default_factory=dict)

    def find(self, tested: ModelUnderTest, case: Case, split: Split) -> Arrays | None:
        """Return what a sequence gave; None where it was not run, or ran in other calls."""
        return self.kept.get(_key(tested, case, split))

    def keep(self, tested: ModelUnderTest, case: Case, split: Split, outputs: Arrays) -> Arrays:
        """Keep what a sequence gave, and return it."""
        mapped = dict(zip(outputs, memory.memory_mapped(list(outputs.values())), strict=True))
        self.tested[tuple(tested.output_names)] = tested
        self.kept[_key(tested, case, split)] = mapped
        return mapped

    def model(self, tested: ModelUnderTest) -> ModelUnderTest:
        """Return the model that was run with these outputs."""
        return self.tested[tuple(tested.output_names)]

    def longest_call(self, tested: ModelUnderTest) -> int:
        """Return the tokens of the longest call that is kept of a model with these outputs."""
        names = tuple(tested.output_names)
        return max((max(calls) for own, *_, calls in self.kept if own == names), default=0)


def _key(tested: ModelUnderTest, case: Case, split: Split) -> _Key:
    sizes = tuple(sorted(case.sizes.items()))
    return tuple(tested.output_names), case.name, sizes, case.seed, split.calls
