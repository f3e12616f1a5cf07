"""The recurrent states of a graph: which input continues which output."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx

from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import known_shapes
from linexport.plugins.ops.stabilized_exp import LOWEST

PAIRS = {
    "LinearAttention": ((3, 1), (4, 2)),
    "StabilizedExp": ((2, 3),),
    "CausalConvWithState": ((3, 1),),
}
"""Positions of past inputs and present outputs, by op."""

INITIAL = {"StabilizedExp": LOWEST}
"""What begins a sequence, where that is not zero."""


@dataclass(frozen=True)
class State:
    """One state: feed the output ``present`` of a call to the input ``past`` of the next.

    ``shape`` starts with the batch; ``initial`` everywhere begins a sequence.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str | None, ...]
    op: str
    initial: float = 0.0

    def start(self, batch: int) -> np.ndarray:
        """The value that begins ``batch`` sequences."""
        sizes = [d if isinstance(d, int) else batch for d in self.shape]
        return np.full(sizes, self.initial, self.dtype)

    def json(self) -> dict[str, Any]:
        """As written to the manifest."""
        return {**asdict(self), "shape": list(self.shape)}


def find(model: onnx.ModelProto, given: Collection[str] = ()) -> list[State]:
    """States whose past is an input and whose present is an output of the graph.

    ``given`` are inputs of the original model: a past among them is its caller's to carry.
    """
    inputs = {i.name: i for i in model.graph.input}
    outputs = {o.name for o in model.graph.output}
    shapes = known_shapes(model)
    found = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        for past, present in PAIRS.get(node.op_type, ()):
            if len(node.input) <= past or len(node.output) <= present:
                continue
            start, end = node.input[past], node.output[present]
            if start in inputs and end in outputs and start not in given:
                initial = INITIAL.get(node.op_type, 0.0)
                dtype = onnx.helper.tensor_dtype_to_np_dtype(
                    inputs[start].type.tensor_type.elem_type
                )
                found.append(State(start, end, dtype.name, shapes[start], node.op_type, initial))
    return found
