"""What a runtime is asked: calls of a model, and what its PyTorch original gives for them.

a sequence of 21 tokens at once        from the initial state
its first 13, its next 7, its last     each from the state that the call before returned
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import linexport
from linexport.conversion.model_under_test import model_under_test
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.reference.module import Reference, feeds
from linexport.sources import load_model

Arrays = dict[str, np.ndarray]

LENGTH, PIXELS = 21, 72
PIECES = ((0, 13), (13, 20), (20, 21))


@dataclass(frozen=True)
class Call:
    """One call, its expected outputs (B, T, ...), and the states that it takes of the call before.

    Attributes:
        feeds: inputs by name.
        expected: outputs by name, in float64 by the original.
        carried: inputs that are outputs of the call before, by name; empty where all are given.
        kept: outputs that the next call takes.
    """

    feeds: Arrays
    expected: Arrays
    carried: Mapping[str, str] = field(default_factory=dict)
    kept: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a program in another language reads it, without what is expected."""
        return {
            "feeds": {name: encoded(array) for name, array in self.feeds.items()},
            "carried": dict(self.carried),
            "outputs": [*self.expected],
            "kept": [*self.kept],
        }


def calls(source: str, artifact: Path) -> list[Call]:
    """Return the calls of an artifact of a source."""
    model, loaded = linexport.load(artifact, threads=1), load_model(source)
    tested = model_under_test(model.manifest, loaded, lambda: None)  # type: ignore[arg-type, return-value]
    several = sum(not limits.batch for limits in tested.dims.values()) > 1
    length = PIXELS if several else LENGTH
    sizes = {n: d.nearest(2 if d.batch else length) for n, d in tested.dims.items()}
    drawn = draw_inputs(loaded, tested.input_shapes, Case("runtimes", sizes, 0))
    given = feeds(drawn, tested.input_names)
    outputs = Reference(loaded, torch.float64)(drawn)
    expected = dict(zip(tested.output_names, outputs, strict=True))
    start = model.initial_state(tested.batch(sizes))
    found = [Call({**given, **start}, expected)]
    for begin, end in PIECES if model.states else ():
        piece, wanted = (model.token_axis.cut(a, begin, end) for a in (given, expected))
        carried = {s.past: s.present for s in model.states.values()}
        state, taken = ({}, carried) if begin else (start, {})
        found.append(Call({**piece, **state}, wanted, taken, tuple(carried.values())))
    return found


def error(call: Call, outputs: Arrays) -> float:
    """Return the largest error of the outputs of a call, relative to their largest value."""
    return max(
        float(np.abs(outputs[name] - wanted).max() / np.abs(wanted).max())
        for name, wanted in call.expected.items()
    )


def encoded(array: np.ndarray) -> dict[str, Any]:
    """An array as JSON holds it: its values are little-endian, row by row."""
    data = base64.b64encode(np.ascontiguousarray(array)).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def decoded(value: dict[str, Any]) -> np.ndarray:
    """The array of ``encoded``."""
    flat = np.frombuffer(base64.b64decode(value["data"]), value["dtype"])
    return flat.reshape(value["shape"])
