"""Parity: the artifact's outputs against the original's, over planned cases.

The original is run on all of them before the artifact is opened: neither waits in memory for the
other, nor do the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from linexport.errors import NothingComparedError
from linexport.graph.dims import DimRange, sequence
from linexport.graph.states import State, batch_dim
from linexport.manifest.proof import (
    CaseRecord,
    DenominatorRecord,
    GreedyRecord,
    HeadRecord,
    HistogramRecord,
    LayerRecord,
    ParityRecord,
    ToleranceRecord,
)
from linexport.manifest.records import VisionRecord
from linexport.parity.cases import (
    DEFAULT_SIZES,
    SIDE_BY_SIDE,
    Case,
    ChosenSizes,
    complete_inputs,
    draw_inputs,
    longer_cases,
    plan_cases,
    unbounded,
)
from linexport.parity.compare import EDGES, Comparison, compare_arrays, largest
from linexport.parity.image_cost import ImageCost
from linexport.parity.noise import low_precision_ops, padding, random_rounding
from linexport.parity.noise.float32_error import apart, is_nothing_else
from linexport.parity.reference.extra_outputs import OpenChanged
from linexport.parity.reference.module import Arguments, Reference, feeds, run_deciding
from linexport.parity.reference.outputs import VANISHED, ReferenceOutput, run_reference
from linexport.parity.routing.choices import recording
from linexport.parity.routing.near_ties import NearTies, Run, decide, notes
from linexport.parity.streams.side_by_side import run_side_by_side
from linexport.parity.streams.splits import BEHIND, LONGEST_CALL
from linexport.parity.tolerances import STEPS, TOLERANCES, Tolerance
from linexport.sources.first_run import said_where
from linexport.sources.loaded_model import LoadedModel
from linexport.system import memory
from linexport.system.torch_internals.trees import pytree
from linexport.targets import InferenceSession
from linexport.targets.runtime.providers import CPU_ONLY, Execution

LONGEST_OF_MANY = 1024
"""Tokens of a sequence beside others, at the most."""

NOT_FINITE = "The original gives NaN or infinite values alone on random tokens."
"""Reason of a language model."""

OUTSIDE = (
    "On inputs beyond the bounds of the example the original gives NaN or infinite values: there "
    "nothing is compared."
)
"""Note on a model that takes the logarithm of a decay, say."""

NOT_BEYOND = (
    "On inputs beyond the bounds of the example the original gives numbers and the artifact NaN or "
    "infinite values. If such inputs occur, give an example with some."
)
"""Note on a model whose decays are logarithms in the artifact."""

HALVES = ("bfloat16", "float16")
"""Names of references in half precision."""

REASONS = 3
"""Notes that an error gives as reasons."""


MOVED = 2.0**-20
"""Share by which inputs are moved to see which quantised values rounding turns: eight roundings."""


@dataclass(frozen=True)
class ModelUnderTest:
    """A converted model under test.

    Attributes:
        loaded: the original.
        open: opens the converted model.
        input_names: the original's inputs, in its order; states are not among them.
        input_shapes: their shapes, dynamic sizes by name.
        output_names: the original's outputs, in its order.
        output_shapes: their shapes.
        states: inputs that the model's outputs continue, from an initial value.
        dims: the dynamic dimensions.
        traced: the sizes they had in the example.
        tolerance: what is allowed of the converted model.
        chosen: sizes to check in place of the usual ones.
        vision: the tower beside it; None without one.
        open_tower: opens that.
        execution: the execution provider that the model is opened on.
        open_changed: opens it with its graph changed; None where it has none, as an engine.
        packed: it takes sequences of their own lengths side by side, as a ``PackedSession`` does.
        reaches: how many tokens behind its own each of its nodes looks that stores so many.
    """

    loaded: LoadedModel
    open: Callable[[], InferenceSession]
    input_names: Sequence[str]
    input_shapes: Sequence[Sequence[int | str]]
    output_names: Sequence[str]
    output_shapes: Sequence[Sequence[int | str | None]]
    states: Sequence[State]
    dims: Mapping[str, DimRange]
    traced: Mapping[str, int]
    tolerance: Tolerance = TOLERANCES["float32"]
    chosen: ChosenSizes = DEFAULT_SIZES
    vision: VisionRecord | None = None
    open_tower: Callable[[], InferenceSession] | None = None
    execution: Execution = CPU_ONLY
    open_changed: OpenChanged | None = None
    packed: bool = False
    reaches: Sequence[int] = ()

    @property
    def behind(self) -> int:
        """A length at which every constant that reaches back has reached twice; 0 without any."""
        return 2 * max(self.reaches) + BEHIND if self.reaches else 0

    @property
    def behind_at_once(self) -> int:
        """That length, where the original is run over so many tokens; else 0."""
        return self.behind if self.behind <= LONGEST_CALL + BEHIND else 0

    def complete(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Inputs in their order, those that are left out at their defaults."""
        return complete_inputs(self.loaded, self.input_names, self.input_shapes, given)

    def initial_state(self, batch: int) -> dict[str, np.ndarray]:
        """States that begin a sequence."""
        return {s.past: s.start(batch) for s in self.states}

    def batch(self, sizes: Mapping[str, int]) -> int:
        """The batch size of a case: what the states' first dimension is called, or 1."""
        name = batch_dim(self.states)
        return 1 if name is None else sizes.get(name, 1)


@dataclass
class Parity:
    """Outcome over all cases.

    Attributes:
        notes: what the manifest says of it.
        ties: cases that were compared with the artifact's choices; ``near_ties.notes`` are of them.
        counts: histogram of errors.
        failed: the first case of a whole sequence that did.
        padded_original: see ``ParityRecord``.
    """

    tolerance: Tolerance
    cases: list[CaseRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ties: list[tuple[Case, NearTies]] = field(default_factory=list)
    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(EDGES) - 1, np.int64))
    failed: Case | None = None
    greedy: GreedyRecord | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    padded_original: float | None = None
    head: HeadRecord | None = None

    @property
    def passed(self) -> bool:
        """Every case that could be run passed, and there was one; so did greedy decoding."""
        parts = [one.passed for one in (self.greedy, self.head) if one is not None]
        return bool(self.cases) and all(case.passed for case in self.cases) and all(parts)

    def record(self) -> ParityRecord:
        """The outcome as the manifest holds it."""
        # Beside an original in half precision, an artifact in float32 is off by what that loses.
        own = [c for c in self.cases if self.tolerance.is_half or c.reference not in HALVES]
        compared: list[CaseRecord | HeadRecord] = [*own]
        compared += [] if self.head is None else [self.head]
        return ParityRecord(
            passed=self.passed,
            max_relative_error=largest_error(c.max_relative_error for c in compared),
            max_absolute_error=largest_error(c.max_absolute_error for c in compared),
            lengths=tuple(sorted({c.length for c in self.cases})),
            tolerance=ToleranceRecord(**vars(self.tolerance)),
            smallest_denominator=self._smallest_denominator(),
            cases=tuple(self.cases),
            greedy=self.greedy,
            first_divergence=None,
            histogram=HistogramRecord(tuple(EDGES.tolist()), tuple(self.counts.tolist())),
            layers=tuple(self.layers),
            padded_original=self.padded_original,
            head=self.head,
        )

    def add_padded(self, error: float | None) -> None:
        """Record how far the original's own padded rows are from each row alone."""
        self.padded_original = error
        self.notes.extend(padding.note(error))

    def _smallest_denominator(self) -> DenominatorRecord | None:
        """The one nearest to zero, NaN before all, of normalised linear attention."""
        known = [(c.denominator, c) for c in self.cases if c.denominator is not None]
        if not known:
            return None
        smallest, case = min(known, key=lambda pair: (pair[0] == pair[0], pair[0]))
        return DenominatorRecord(smallest, case.name, case.length)


def largest_error(errors: Iterable[float | None]) -> float:
    """Return the largest error; infinite if one is unknown or there is none."""
    return max((math.inf if e is None else e for e in errors), default=math.inf)


@memory.low_memory()
def check(tested: ModelUnderTest, seed: int = 0) -> Parity:
    """Run every planned case on the original, in float32 and float64, and on the artifact.

    Raises:
        NothingComparedError: the original fails in every case, or an output is not finite in any.
    """
    parity = Parity(tested.tolerance)
    outputs = list(_reference_outputs(tested, parity, seed))
    memory.trim_memory()
    session = tested.open()
    for case, expected in outputs:
        _run_case(tested, session, parity, case, expected)
        memory.trim_memory()
    if tested.packed:
        _run_side_by_side(tested, session, parity, outputs)
    require_compared(tested.output_names, {c.output for c in parity.cases}, parity.notes)
    parity.notes.extend(notes(parity.ties))
    return parity


def require_compared(
    outputs: Sequence[str], compared: Collection[str], said: Sequence[str]
) -> None:
    """Check that something of each output was compared.

    Args:
        outputs: names.
        compared: those of which something was.
        said: notes on why others were not.

    Raises:
        NothingComparedError: nothing of one was; that proves nothing, and is not the artifact's
            fault.
    """
    missing = [name for name in outputs if name not in compared]
    if missing:
        reasons = " ".join(dict.fromkeys(said[:REASONS]))
        raise NothingComparedError(
            f"Nothing of the output {missing[0]} could be compared with the original, whose values "
            f"there are not numbers, or which fails. {reasons} Correct the model, or give an "
            "example whose values and sizes it takes: inputs are drawn like it. Where a size of "
            "one input follows from another's, give both one name: 'h=10' and 'h=2*10' of --input."
        )


def is_number(expected: ReferenceOutput, position: int) -> bool:
    """Return whether an output of the original has anything to compare with.

    One that is NaN everywhere has not; where a denominator of it vanished, that is its reason.
    """
    values = expected.outputs[position]
    return not values.size or expected.vanished or bool(np.isfinite(values).any())


def _reference_outputs(
    tested: ModelUnderTest, parity: Parity, seed: int
) -> Iterator[tuple[Case, list[ReferenceOutput]]]:
    """Yield each case with the original's outputs, where there are any to compare with."""
    loaded = tested.loaded
    floating = any(
        isinstance(x, torch.Tensor) and x.is_floating_point()
        for x in pytree.tree_leaves((loaded.args, loaded.kwargs))
    )
    references = _references(loaded, parity.notes)
    half = None
    if loaded.given is not None:
        half = Reference(loaded, loaded.given.dtype)
    elif parity.tolerance.is_half:
        half = Reference(loaded, getattr(torch, parity.tolerance.dtype))
    compared: list[Case] = []
    cost = ImageCost(tested.dims, tested.input_shapes)
    for planned in _cases(tested, floating, seed, compared):
        case = cost.affordable(planned, parity.notes)
        inputs = draw_inputs(loaded, tested.input_shapes, case)
        said = parity.notes if case.like else list[str]()
        with cost.measuring() as taken:
            expected = run_reference(references, case, inputs, parity.tolerance, said)
        if expected:
            cost.add(case, taken)
        if not case.like and any(not np.isfinite(x).all() for e in expected for x in e.outputs):
            parity.notes.append(OUTSIDE)
            continue
        if half is not None and expected:
            expected = _with_half(half, references[-1], inputs, case, expected, parity)
        if expected:
            compared.append(case)
            yield case, [replace(a, outputs=memory.memory_mapped(a.outputs)) for a in expected]
        del expected
        memory.trim_memory()


def _cases(
    tested: ModelUnderTest, floating: bool, seed: int, compared: Sequence[Case]
) -> Iterator[Case]:
    """Yield the planned cases; then longer ones where the original ran at the traced length alone.

    Args:
        tested: the model.
        floating: whether it has floating inputs.
        seed: of the first case.
        compared: the cases so far that the original ran on.
    """
    dims, traced, chosen = tested.dims, tested.traced, tested.chosen
    shapes, behind = tested.input_shapes, tested.behind_at_once
    cases = plan_cases(dims, traced, floating, seed, shapes, chosen, behind)
    yield from [*cases, *unbounded(tested.loaded, cases)]
    first = sequence(dims)
    if first and not chosen.lengths and all(c.sizes[first] == traced[first] for c in compared):
        yield from longer_cases(dims, traced, seed)


def _references(loaded: LoadedModel, notes: list[str]) -> list[Reference]:
    """Return the original in float32, and in float64 where it can be."""
    references = [Reference(loaded, torch.float32)]
    try:
        references.append(Reference(loaded, torch.float64))
    except Exception as error:
        notes.append(f"No float64 reference: {said_where(error)}")
    return references


def _with_half(
    half: Reference,
    exact: Reference,
    inputs: Arguments,
    case: Case,
    expected: list[ReferenceOutput],
    parity: Parity,
) -> list[ReferenceOutput]:
    """Add the original in half precision, and allow for its own distance from the others.

    An artifact in float32 is allowed that beside it alone. Where half precision overflows and
    float32 does not, an artifact in half precision is compared with float32, and may be off by what
    numbers of as few digits, and of any size, lose. Nothing is returned of large or tiny inputs
    there, nor where outputs are too large or too small for half precision.

    Args:
        half: the original in half precision.
        exact: in the widest precision that it can be run in.
        inputs: of the case.
        case: what is run.
        expected: the original in float32, and in float64 where it can be.
        parity: gets notes.
    """
    tolerance, of_half = parity.tolerance, TOLERANCES[half.name]
    try:
        outputs = half(inputs)
    except Exception as error:
        parity.notes.append(f"No {half.name} reference: {said_where(error)}")
        return expected
    pairs = list(zip(outputs, expected[0].outputs, strict=True))
    beyond = _out_of_range(half.dtype, pairs)
    if beyond:
        run = partial(run_deciding, exact, inputs)
        return _without_half(half, run, case, expected, parity, beyond)
    lost = [apart(a, b) for a, b in pairs]
    between = [of_half.between(x) for x in lost]
    own = ReferenceOutput(half.name, outputs, between, expected[0].denominator, tolerance=of_half)
    if not tolerance.is_half:
        return [*expected, own]
    return [*(replace(e, rounding=lost) for e in expected), own]


def _without_half(
    half: Reference,
    exact: Run[list[np.ndarray]],
    case: Case,
    expected: list[ReferenceOutput],
    parity: Parity,
    beyond: str,
) -> list[ReferenceOutput]:
    """Return references without the one in half precision, which ``beyond`` says why; see there."""
    said = f"The original {beyond} in {half.name} on the {case.name} inputs at {case.at}: there"
    limit, outputs = torch.finfo(half.dtype).max, expected[0].outputs
    alone = f"{said} the artifact is compared with its float32 computation alone."
    if not parity.tolerance.is_half:
        parity.notes.append(alone)
        return expected
    stored = beyond == OVERFLOWS and all(largest(x) <= limit for x in outputs)
    if not stored or case.magnitude not in (0, 1):
        parity.notes.append(f"{said} nothing is compared.")
        return []
    parity.notes.append(alone)
    rounded = random_rounding.draw(exact, half.name, case.seed) or outputs
    lost = [apart(a, b) for a, b in zip(rounded, outputs, strict=True)]
    return [replace(e, rounding=lost) for e in expected]


OVERFLOWS, UNDERFLOWS = "overflows", "underflows"
"""Behaviour of outputs in half precision that those in float32 do not have."""


def _out_of_range(dtype: torch.dtype, pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> str:
    """Return what outputs in half precision do that those in float32 do not; "" for nothing."""
    least = torch.finfo(dtype).smallest_normal
    for half, single in pairs:
        if (np.isfinite(single) & ~np.isfinite(half)).any():
            return OVERFLOWS
        if 0 < largest(single) < least:
            return UNDERFLOWS
    return ""


def _run_case(
    tested: ModelUnderTest,
    session: InferenceSession,
    parity: Parity,
    case: Case,
    expected: list[ReferenceOutput],
) -> None:
    got: dict[str, np.ndarray] | None = None
    failure = None
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    state = tested.initial_state(tested.batch(case.sizes))
    try:
        got = session.run({**feeds(inputs, tested.input_names), **state})
    except Exception as error:
        failure = str(error).splitlines()[0]
    found = _compared(tested, case, expected, got, failure)
    if got is not None:
        if not _passed(found):
            expected, found = _reconsidered(tested, parity, case, expected, got, found)
        if not case.like and not _is_finite(got):
            parity.notes.append(NOT_BEYOND)
            return
        found = _with_more_allowed(tested, parity, case, expected, got, found)
    for record, counts in found:
        parity.cases.append(record)
        parity.counts += counts if tested.tolerance.is_half or record.reference not in HALVES else 0
        if parity.failed is None and not record.passed:
            parity.failed = case


def _reconsidered(
    tested: ModelUnderTest,
    parity: Parity,
    case: Case,
    expected: list[ReferenceOutput],
    got: dict[str, np.ndarray],
    found: list[tuple[CaseRecord, np.ndarray]],
) -> tuple[list[ReferenceOutput], list[tuple[CaseRecord, np.ndarray]]]:
    """Return the original as far as it can be run, and what is found of a case that did not pass.

    The original is run in float64 where that was left out, and makes the artifact's choices where
    rounding decides them.
    """
    own, half = _in_own_precision(expected), [e for e in expected if e.tolerance is not None]
    if [reference.name for reference in own] == ["float32"]:
        expected = [*(_in_both(tested, parity, case) or own), *half]
        found = _compared(tested, case, expected, got, None)
    if not _passed(found):
        found = _decided(tested, parity, case, expected, got) or found
    return expected, found


def _with_more_allowed(
    tested: ModelUnderTest,
    parity: Parity,
    case: Case,
    expected: list[ReferenceOutput],
    got: dict[str, np.ndarray],
    found: list[tuple[CaseRecord, np.ndarray]],
) -> list[tuple[CaseRecord, np.ndarray]]:
    """Return what is found where steps of quantisation, operators and roundings explain it."""
    if tested.tolerance.dtype == STEPS and not _passed(found):
        found = _with_moved_inputs(tested, parity, case, expected, got) or found
    scaled = case.magnitude not in (0, 1) and not tested.tolerance.is_half
    if scaled and not _passed(found):
        allowed = _with_coarse_operators(tested, parity, case, expected)
        found = _compared(tested, case, allowed, got, None)
        if not _passed(found):
            found = _with_random_roundings(tested, parity, case, allowed, got) or found
    return found


def _in_own_precision(expected: Sequence[ReferenceOutput]) -> list[ReferenceOutput]:
    """Return references without the one in half precision of an original."""
    return [e for e in expected if e.tolerance is None]


def _is_finite(outputs: Mapping[str, np.ndarray]) -> bool:
    return all(bool(np.isfinite(x).all()) for x in outputs.values() if x.dtype.kind == "f")


def _run_side_by_side(
    tested: ModelUnderTest,
    session: Any,
    parity: Parity,
    outputs: Sequence[tuple[Case, list[ReferenceOutput]]],
) -> None:
    """Compare sequences of several lengths in a call with the original of each alone."""
    alone = [
        (replace(case, name=SIDE_BY_SIDE), expected)
        for case, expected in outputs
        if tested.batch(case.sizes) == 1 and max(case.sizes.values()) <= LONGEST_OF_MANY
    ]
    given = [
        feeds(draw_inputs(tested.loaded, tested.input_shapes, case), tested.input_names)
        for case, _ in alone
    ]
    first = sequence(tested.dims)
    unit = tested.dims[first].multiple if first else 1
    got: Sequence[dict[str, np.ndarray] | None] = [None] * len(alone)
    failure = None
    try:
        got = run_side_by_side(session, tested.states, given, unit)
    except Exception as error:
        failure = str(error).splitlines()[0]
    for (case, expected), own in zip(alone, got, strict=True):
        for record, counts in _compared(tested, case, expected, own, failure):
            parity.cases.append(record)
            parity.counts += counts


def _with_coarse_operators(
    tested: ModelUnderTest, parity: Parity, case: Case, expected: list[ReferenceOutput]
) -> list[ReferenceOutput]:
    """Allow for what the runtime's operators lose; nothing is left where that is nearly all."""
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    exact = expected[-1].outputs
    single = Reference(tested.loaded, torch.float32)
    lost = low_precision_ops.lost_to_operators(single, inputs, exact)
    parity.notes.extend(low_precision_ops.notes(lost, exact, case, tested.tolerance))
    if any(is_nothing_else(a, b, case) for a, b in zip(lost, exact, strict=True)):
        return []
    return _allowing(expected, lost)


def _allowing(expected: list[ReferenceOutput], lost: list[float]) -> list[ReferenceOutput]:
    """Return references whose outputs lose at least that much to rounding."""
    return [
        replace(e, rounding=[max(pair) for pair in zip(e.rounding, lost, strict=True)])
        for e in expected
    ]


def _passed(found: list[tuple[CaseRecord, np.ndarray]]) -> bool:
    return all(record.passed for record, _ in found)


def _with_random_roundings(
    tested: ModelUnderTest,
    parity: Parity,
    case: Case,
    expected: list[ReferenceOutput],
    got: dict[str, np.ndarray],
) -> list[tuple[CaseRecord, np.ndarray]]:
    """Allow for what random roundings of the original lose; nothing where that does not pass.

    Its own run may have lost less by chance, as that of another program may have lost more.
    """
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    *_, wide = _references(tested.loaded, [])
    exact = _in_own_precision(expected)[-1].outputs
    moved = [0.0] * len(exact)
    for seed in range(random_rounding.DRAWS if wide.dtype == torch.float64 else 0):
        drawn = random_rounding.draw(partial(run_deciding, wide, inputs), "float32", seed)
        if drawn is None:
            break
        moved = [max(m, apart(a, b)) for m, a, b in zip(moved, exact, drawn, strict=True)]
        if any(is_nothing_else(m, a, case) for m, a in zip(moved, exact, strict=True)):
            break
        found = _compared(tested, case, _allowing(expected, moved), got, None)
        if _passed(found):
            parity.notes.extend(random_rounding.notes_of_outputs(moved, exact, case))
            return found
    return []


def _with_moved_inputs(
    tested: ModelUnderTest,
    parity: Parity,
    case: Case,
    expected: list[ReferenceOutput],
    got: dict[str, np.ndarray],
) -> list[tuple[CaseRecord, np.ndarray]]:
    """Allow for values that rounding moves to the next step of their quantisation.

    Its own run in float64 may have turned none by chance; nothing is returned where that does not
    explain it.
    """
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    single = Reference(tested.loaded, torch.float32)
    exact = single(inputs)
    moved = [0.0] * len(exact)
    for seed in range(random_rounding.DRAWS):
        drawn = single(_moved(inputs, seed))
        moved = [max(m, apart(a, b)) for m, a, b in zip(moved, exact, drawn, strict=True)]
        found = _compared(tested, case, _allowing(expected, moved), got, None)
        if _passed(found):
            parity.notes.append(
                f"On the {case.name} inputs at {case.at} rounding moves quantised values of the "
                "original by a step: the artifact may be off by "
                f"{tested.tolerance.factor:g} times what that moves its outputs."
            )
            return found
    return []


def _moved(inputs: Arguments, seed: int) -> Arguments:
    """Return inputs of which each value is moved by a few roundings of float32."""
    generator = torch.Generator().manual_seed(seed)

    def move(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        drawn = torch.rand(leaf.shape, generator=generator, dtype=torch.float64) - 0.5
        return (leaf * (1 + MOVED * drawn)).to(leaf.dtype)

    moved: Arguments = pytree.tree_map(move, inputs)
    return moved


def _decided(
    tested: ModelUnderTest,
    parity: Parity,
    case: Case,
    expected: list[ReferenceOutput],
    got: dict[str, np.ndarray],
) -> list[tuple[CaseRecord, np.ndarray]]:
    """Compare with the artifact's choices, see ``near_ties``; nothing where that does not pass."""
    session = recording(tested.open_changed)
    if session is None:
        return []
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    batch = tested.batch(case.sizes)
    session.run({**feeds(inputs, tested.input_names), **tested.initial_state(batch)})
    references = _references(tested.loaded, [])
    runs = [partial(run_deciding, reference, inputs) for reference in references]
    decided = decide(runs, session.choices(batch).values(), tested.tolerance)
    outputs = {
        r.name: x for r, x in zip(references, decided.outputs if decided else (), strict=False)
    }
    own = _in_own_precision(expected)
    if decided is None or any(e.name not in outputs for e in own):
        return []
    rounding = [apart(*pair) for pair in zip(decided.outputs[0], decided.outputs[-1], strict=True)]
    chosen = [replace(e, outputs=outputs[e.name], rounding=rounding) for e in own]
    found = _compared(tested, case, chosen, got, None)
    if not _passed(found):
        return []
    parity.ties.append((case, decided.ties))
    return found


def _in_both(tested: ModelUnderTest, parity: Parity, case: Case) -> list[ReferenceOutput]:
    """Run the original of a case that fails in float64 too, however long that takes."""
    references = _references(tested.loaded, [])
    if len(references) == 1:
        return []
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    given = (references, case, inputs, parity.tolerance, parity.notes)
    return run_reference(*given, patience=math.inf)


def _compared(
    tested: ModelUnderTest,
    case: Case,
    expected: list[ReferenceOutput],
    got: dict[str, np.ndarray] | None,
    failure: str | None,
) -> list[tuple[CaseRecord, np.ndarray]]:
    found = []
    for reference in expected:
        for position in range(len(tested.output_names)):
            if not is_number(reference, position):
                continue
            record, counts = _record(tested, case, reference, position, got)
            if got is None:
                record = replace(record, reason=f"the artifact fails at this size: {failure}")
            found.append((record, counts))
    return found


def _record(
    tested: ModelUnderTest,
    case: Case,
    reference: ReferenceOutput,
    position: int,
    got: dict[str, np.ndarray] | None,
) -> tuple[CaseRecord, np.ndarray]:
    name = tested.output_names[position]
    length = next((n for d, n in case.sizes.items() if not tested.dims[d].batch), 1)
    batch = next((n for d, n in case.sizes.items() if tested.dims[d].batch), 1)
    found = got[name] if got is not None else np.zeros((0,), np.float32)
    rounding, expected = reference.rounding[position], reference.outputs[position]
    if reference.overflows and expected.shape == found.shape:
        expected = np.where(~np.isfinite(expected) & np.isfinite(found), found, expected)
    tolerance = reference.tolerance or tested.tolerance
    result = compare_arrays(expected, found, tolerance, rounding)
    if reference.vanished and not np.isfinite(found).all():
        result = replace(result, passed=False, reason=VANISHED)
    record = case_record(
        case, result, batch, length, reference.name, name, rounding, reference.denominator
    )
    return record, np.asarray(result.counts)


def case_record(
    case: Case,
    result: Comparison,
    batch: int,
    length: int,
    reference: str,
    output: str,
    rounding: float | None = None,
    denominator: float | None = None,
) -> CaseRecord:
    """One comparison as the manifest holds it; see ``CaseRecord`` for the arguments."""
    return CaseRecord(
        name=case.name,
        batch=batch,
        length=length,
        sizes=dict(case.sizes),
        seed=case.seed,
        magnitude=case.magnitude,
        reference=reference,
        output=output,
        rounding=rounding,
        denominator=denominator,
        max_relative_error=result.max_relative_error,
        max_absolute_error=result.max_absolute_error,
        worst=result.worst,
        nan=result.nan,
        inf=result.inf,
        passed=result.passed,
        reason=result.reason,
    )
