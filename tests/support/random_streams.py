"""Random graphs fed in pieces, with states carried over: whether what holds short holds long.

A graph streams if its output in pieces is its output whole. Conversion tries that on 150 tokens, so
no graph may hold there and fail beyond: a state that is slowly lost, a mask of limited length, a
position counted from the wrong end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime

from linexport import passes
from linexport.graph import states
from linexport.plugins.ops.registry import attach_functions
from tests.support.random_graphs import Generator

PIECES: dict[str, Sequence[int]] = {
    "20": (1, 7, 12),
    "90": (13, 64, 1, 12),
    "700": (64, 300, 1, 335),
    "5 x 300": (300,) * 5,
}
"""Lengths of pieces, the shortest sequence first."""

TOLERANCE = 5e-5
"""Relative to the largest value, as of conversion."""

AXES = {"BTHD": 1, "BHTD": 2, "packed": 1, "TBHD": 0}
"""Where an input of that layout has its tokens; the output has them at 1."""


@dataclass
class Streams:
    """What became of some graphs.

    Attributes:
        graphs: how many were drawn.
        stateful: those of them that have states after the passes.
        held: those of them that stream in every length.
        broken: seed, the length that failed and the error, where a shorter one held.
    """

    graphs: int = 0
    stateful: int = 0
    held: int = 0
    broken: list[tuple[int, str, float]] = field(default_factory=list)


def tally(seeds: Iterable[int]) -> Streams:
    """Feed the graphs of some seeds in pieces."""
    result = Streams()
    for seed in seeds:
        graph = Generator(seed).draw()
        model = passes.run(graph.model)
        result.graphs += 1
        if not states.find_states(model):
            continue
        result.stateful += 1
        errors = {name: error(model, pieces, seed) for name, pieces in PIECES.items()}
        failed = [name for name, found in errors.items() if not found <= TOLERANCE]
        result.held += not failed
        if failed and errors[next(iter(PIECES))] <= TOLERANCE:
            result.broken.append((seed, failed[0], errors[failed[0]]))
    return result


def error(model: onnx.ModelProto, pieces: Sequence[int], seed: int) -> float:
    """The largest difference between the output in pieces and whole, relative to the largest."""
    attached = onnx.ModelProto()
    attached.CopyFrom(model)
    attach_functions(attached)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        attached.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    random, found = np.random.default_rng(seed), states.find_states(model)
    given = {i.name: i.shape for i in session.get_inputs() if i.name in "qkv"}
    sizes = {"B": 2, "T": sum(pieces)}
    whole = {
        name: random.standard_normal([sizes.get(d, d) for d in shape]).astype(np.float32)
        for name, shape in given.items()
    }
    start = {s.past: s.start(2) for s in found}
    names = ["out", *(s.present for s in found)]
    try:
        expected = session.run(names, {**whole, **start})[0]
        outputs, carried, ends = [], start, np.cumsum(pieces)[:-1]
        split = {n: np.split(x, ends, given[n].index("T")) for n, x in whole.items()}
        for place in range(len(pieces)):
            fed = {name: parts[place] for name, parts in split.items()}
            output, *present = session.run(names, {**fed, **carried})
            carried = {s.past: x for s, x in zip(found, present, strict=True)}
            outputs.append(output)
    except onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException:
        return float("inf")  # an operator beside the fused one wants the whole sequence
    joined, finite = np.concatenate(outputs, 1), np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(joined)):
        return float("inf")
    apart = np.abs(joined[finite] - expected[finite]).max(initial=0)
    return float(apart / np.abs(expected[finite]).max(initial=1e-30))
