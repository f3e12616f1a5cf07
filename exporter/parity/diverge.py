"""The value at which a converted model first differs from its original, named by ``search``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from linexport.graph import external_data
from linexport.graph.dims import sequence
from linexport.manifest.proof import DivergenceRecord
from linexport.parity.bisection import Ancestry, Found, first_different
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import Comparison, compare_arrays, largest
from linexport.parity.first_token import first_token
from linexport.parity.reference import extra_outputs
from linexport.parity.reference.module import feeds
from linexport.parity.reference.plain_export import run_plain_export
from linexport.parity.reference.values import OriginalValues, original_values
from linexport.parity.routing.choices import choices_of, run_with
from linexport.parity.routing.near_ties import Deciding, ForcedChoices
from linexport.parity.tolerances import Tolerance
from linexport.system import memory
from linexport.system.torch_internals.trees import pytree
from linexport.targets import InferenceSession
from linexport.trace import Traced

log = logging.getLogger(__name__)


class BothValues:
    """Values of an artifact and of its original, for one set of inputs.

    Attributes:
        original: values of the original.
        nodes: of the artifact's graph.
        ancestry: of the artifact's graph.

    Args:
        path: the artifact's model.
        original: see above.
        fed: the artifact's inputs, states among them.
        open_session: opens a model file.
        tolerance: what a value may be off.
        kept: says of a shape which elements count, None where all do.
        choices: that the artifact makes, as in one run in all: others may round otherwise.
    """

    def __init__(
        self,
        path: Path,
        original: OriginalValues,
        fed: Mapping[str, np.ndarray],
        open_session: Callable[..., InferenceSession],
        tolerance: Tolerance,
        kept: Callable[[tuple[int, ...]], np.ndarray | None] = lambda shape: None,
        choices: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> None:
        self.original, self.fed, self.tolerance = original, fed, tolerance
        self._path, self._open, self._kept = path, open_session, kept
        self._choices = choices
        self.nodes = list(external_data.read_graph(path).graph.node)
        self.ancestry = Ancestry(self.nodes)
        self.comparable = original.names & self.ancestry.producer.keys()

    def got(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return these values of the artifact, and its outputs."""
        if not self._choices:
            return extra_outputs.run(self._path, names, self.fed, self._open)[0]
        opened = partial(self._open, low_memory=True)
        changed = partial(extra_outputs.open_changed, self._path, open_session=opened)
        return run_with(changed, self.fed, self._choices, names)[0]

    def compare(self, name: str, expected: np.ndarray, got: np.ndarray) -> Comparison:
        """Compare two values of one name where elements count."""
        kept = self._kept(got.shape) if expected.shape == got.shape else None
        if kept is None:
            return compare_arrays(expected, got, self.tolerance)
        return compare_arrays(expected[kept], got[kept], self.tolerance)

    def differ(self, names: Collection[str]) -> dict[str, bool]:
        """Say of each value whether it is out of tolerance."""
        expected, got = self.original.get(names), self.got(names)
        common = [name for name in names if name in expected and name in got]
        found = {n: not self.compare(n, expected[n], got[n]).passed for n in common}
        del expected, got
        memory.trim_memory()
        return found

    def search(self, outputs: Collection[str]) -> Found | None:
        """Find the first value that differs on the way to any of these; None where none does."""
        wrong = [name for name, differs in self.differ(outputs).items() if differs]
        if not wrong:
            return None
        return first_different(wrong[0], self.ancestry, self.comparable, self.differ)


@memory.low_memory()
def first_divergence(
    tested: ModelUnderTest,
    traced: Traced,
    path: Path,
    open_session: Callable[..., InferenceSession],
    case: Case,
) -> DivergenceRecord | None:
    """Tensor, node, op and error of the first value out of tolerance; None if none can be named."""
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    batch = tested.batch(case.sizes)
    fed = {**feeds(inputs, tested.input_names), **tested.initial_state(batch)}
    try:
        choices = choices_of(tested.open_changed, fed, batch)
        leaves = pytree.tree_leaves(inputs)
        original = original_values(tested.loaded, traced, leaves, as_near(choices, tested))
        both = BothValues(path, original, fed, open_session, tested.tolerance, choices=choices)
        found = both.search(tested.output_names)
        if found is None:
            return None
        origin = original.origin(found.value)
        row, position = _place(tested, both)
        plain = run_plain_export(tested, traced, inputs)
        return replace(
            divergence_record(both, found.value),
            layer=origin.layer,
            row=row,
            position=position,
            line=origin.code,
            plain_relative_error=plain.relative_error,
            plain_failure=plain.failure,
        )
    except Exception as error:  # the failure itself is reported already; this only adds to it
        log.info("where the artifact first differs was not found: %s", error)
        return None


def as_near(
    choices: Mapping[str, np.ndarray], tested: ModelUnderTest, kept: np.ndarray | None = None
) -> Callable[[], Deciding]:
    """Return what makes contexts in which the original makes an artifact's choices.

    Only those that are near: behind the first error of the artifact it goes on by its own. ``kept``
    is as of ``ForcedChoices``.
    """
    if not choices:
        return nullcontext
    return lambda: ForcedChoices([*choices.values()], kept, near=tested.tolerance)


def _place(tested: ModelUnderTest, both: BothValues) -> tuple[int | None, int | None]:
    """Return row and token of the first error in the first output that is out of tolerance."""
    wrong = both.differ(tested.output_names)
    at = next(i for i, name in enumerate(tested.output_names) if wrong.get(name))
    name, shape, tokens = tested.output_names[at], tested.output_shapes[at], sequence(tested.dims)
    if tokens not in shape:
        return None, None
    [expected], got = both.original.get([name]).values(), both.got([name])[name]
    limit = tested.tolerance.limit(largest(expected))
    return first_token(expected, got, shape.index(tokens), limit) or (None, None)


def divergence_record(both: BothValues, value: str) -> DivergenceRecord:
    """Return the record of a value that differs."""
    [expected], got = both.original.get([value]).values(), both.got([value])[value]
    result, node = both.compare(value, expected, got), both.ancestry.producer[value]
    return DivergenceRecord(value, node.name, node.op_type, result.max_relative_error, result.worst)
