"""The recurrent states of a graph: which input continues which output."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import known_shapes

PAIRS = {
    "LinearAttention": ((3, 1), (4, 2)),
    "CausalConvWithState": ((3, 1),),
}
"""Positions of past inputs and present outputs, by op."""


@dataclass(frozen=True)
class State:
    """One state: feed the output ``present`` of a call to the input ``past`` of the next.

    ``shape`` starts with the batch; zeros begin a sequence.
    """

    past: str
    present: str
    dtype: str
    shape: tuple[int | str | None, ...]
    op: str

    def json(self) -> dict[str, Any]:
        """As written to the manifest."""
        return {**asdict(self), "shape": list(self.shape)}


def find(model: onnx.ModelProto, given: Collection[str] = ()) -> list[State]:
    """States whose past is an input and whose present is an output of the graph.

    A Cast may lie between them and the node. ``given`` are inputs of the original model: a past
    among them is its caller's to carry.
    """
    inputs = {i.name: i for i in model.graph.input}
    outputs = {o.name for o in model.graph.output}
    casts = [n for n in model.graph.node if n.op_type == "Cast"]
    before = {n.output[0]: n.input[0] for n in casts if n.input[0] in inputs}
    after = {n.input[0]: n.output[0] for n in casts if n.output[0] in outputs}
    shapes = known_shapes(model)
    found = []
    for node in model.graph.node:
        if node.domain != DOMAIN:
            continue
        for past, present in PAIRS.get(node.op_type, ()):
            if len(node.input) <= past or len(node.output) <= present:
                continue
            start = before.get(node.input[past], node.input[past])
            end = after.get(node.output[present], node.output[present])
            if start in inputs and end in outputs and start not in given:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(
                    inputs[start].type.tensor_type.elem_type
                )
                found.append(State(start, end, dtype.name, shapes[start], node.op_type))
    return found
