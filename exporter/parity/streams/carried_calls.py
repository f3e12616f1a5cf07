"""Compare calls of a model that writes buffers, one after another, with the original's.

    y_n, memory_n = original(x_n, memory_{n-1})         in float32 and float64
    y_n, state_n  = artifact(x_n, state_{n-1})

Such a model says itself what a call leaves to the next one, and a sequence that is cut into other
calls may give other outputs. So each call of the artifact is compared with a call of the original
on the same inputs, both with what they wrote themselves before, and so are its states.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from linexport.graph.dims import sequence
from linexport.manifest.proof import StreamingRecord
from linexport.manifest.records import BUFFER
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.noise.float32_error import apart
from linexport.parity.reference.module import Arguments, Reference, feeds
from linexport.sources.carried_buffers import stepping
from linexport.sources.first_run import said_where

log = logging.getLogger(__name__)

ROWS = (1, 3)
"""Batches of the streams, one each."""

SINGLE, MIXED = 12, 20
"""Calls of one token, and then of 1 to ``LONGEST`` tokens, of each stream."""

LONGEST = 32

FEWEST = 3
"""Calls without which a stream shows nothing."""


def writes_buffers(tested: ModelUnderTest) -> bool:
    """Return whether states are buffers that the model's own code writes."""
    return any(state.op == BUFFER for state in tested.states)


def check_calls(tested: ModelUnderTest, seed: int = 0) -> StreamingRecord:
    """Run streams of calls on the original and on the artifact, and compare every call."""
    carried = tested.loaded.carried
    if carried is None:
        return StreamingRecord(False, "the original writes no buffers, which the states are of")
    originals = [_Original(tested, kind) for kind in (torch.float32, torch.float64)]
    session, worst = tested.open(), 0.0
    tried: list[tuple[int, ...]] = []
    for rows in ROWS:
        made: list[int] = []
        calls = list(_calls(tested, rows, seed))
        state = tested.initial_state(tested.batch(calls[0].sizes))
        for original in originals:
            original.begin(state)
        for call in calls:
            inputs = draw_inputs(tested.loaded, tested.input_shapes, call)
            try:
                expected = [original.call(inputs) for original in originals]
            except Exception as error:  # as of a buffer that is full
                if len(made) < FEWEST:
                    said = f"the original fails after {_spell(made)}: {said_where(error)}"
                    return StreamingRecord(None, said, worst, tuple(tried))
                break
            made.append(_length(tested, call))
            try:
                got = session.run({**feeds(inputs, tested.input_names), **state})
            except Exception as error:
                log.info("the artifact does not take a call: %s", error)
                return _unlike(f"the artifact does not take {_spell(made)}", worst, tried)
            state = {s.past: np.asarray(got[s.present]) for s in tested.states}
            largest, wrong = _compared(tested, expected, got)
            worst = max(worst, largest)
            if wrong is not None:
                reason = f"{wrong} differs by {largest:.1e} in {_spell(made)} at {call.at}"
                return _unlike(reason, worst, [*tried, tuple(made)])
        tried.append(tuple(made))
    return StreamingRecord(True, None, worst, tuple(tried))


def _unlike(reason: str, worst: float, tried: Sequence[tuple[int, ...]]) -> StreamingRecord:
    return StreamingRecord(False, reason.splitlines()[0], worst, tuple(tried))


def _spell(made: Sequence[int]) -> str:
    last = ", ".join(map(str, made[-8:])) or "none"
    return f"call {len(made)} of a stream, the last ones of {last} tokens"


def _calls(tested: ModelUnderTest, rows: int, seed: int) -> Iterator[Case]:
    """Yield the calls of a stream: of one token each, then of random lengths."""
    choose, dim = random.Random(seed + rows), sequence(tested.dims)
    sizes = {
        name: limits.nearest(rows) if limits.batch else tested.traced[name]
        for name, limits in tested.dims.items()
    }
    lengths = [1] * SINGLE + [choose.randint(1, LONGEST) for _ in range(MIXED)]
    for number, length in enumerate(lengths):
        own = {} if dim is None else {dim: tested.dims[dim].nearest(length)}
        yield Case("call", {**sizes, **own}, seed + number)


def _length(tested: ModelUnderTest, call: Case) -> int:
    dim = sequence(tested.dims)
    return 1 if dim is None else call.sizes[dim]


@dataclass
class _Original:
    """The original in one precision, with what its last call wrote.

    Attributes:
        tested: the artifact of it.
        dtype: the precision.
    """

    tested: ModelUnderTest
    dtype: torch.dtype
    past: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        carried = self.tested.loaded.carried
        assert carried is not None
        self.presents = [state.past for state in carried.states]
        self.reference = Reference(self.tested.loaded, self.dtype)
        self.reference.module = stepping(self.reference.module, carried.buffers)

    def begin(self, state: dict[str, np.ndarray]) -> None:
        """Begin a stream."""
        self.past = {name: torch.from_numpy(values.copy()) for name, values in state.items()}

    def call(self, inputs: Arguments) -> dict[str, np.ndarray]:
        """Return outputs and present states by the names that they have in the artifact."""
        args, kwargs = inputs
        found = self.reference((args, {**kwargs, **self.past}))
        count = len(found) - len(self.presents)
        after = dict(zip(self.presents, found[count:], strict=True))
        self.past = {name: torch.from_numpy(values) for name, values in after.items()}
        outputs = dict(zip(self.tested.output_names, found[:count], strict=True))
        names = {state.past: state.present for state in self.tested.states}
        return {**outputs, **{names[past]: values for past, values in after.items()}}


def _compared(
    tested: ModelUnderTest, expected: Sequence[dict[str, np.ndarray]], got: dict[str, np.ndarray]
) -> tuple[float, str | None]:
    """Return the largest error of a call, and which value is off by more than is allowed."""
    single, double = expected
    worst = 0.0
    for name, values in double.items():
        rounding = apart(single[name], values)
        found = compare_arrays(values, np.asarray(got[name]), tested.tolerance, rounding)
        worst = max(worst, found.max_relative_error)
        if not found.passed:
            return found.max_relative_error, name
    return worst, None
