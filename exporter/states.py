"""The recurrent states of a graph: which input continues which output."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from linexport.plugins.ops.registry import known_shapes, linexport_nodes


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

    ``given`` are inputs of the original model: a past among them is its caller's to carry.
    """
    inputs = {i.name: i for i in model.graph.input}
    outputs = {o.name for o in model.graph.output}
    shapes = known_shapes(model)
    found = []
    for node, op, view in linexport_nodes(model):
        for port in op.states(view):
            if len(node.input) <= port.past or len(node.output) <= port.present:
                continue
            start, end = node.input[port.past], node.output[port.present]
            if start in inputs and end in outputs and start not in given:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(
                    inputs[start].type.tensor_type.elem_type
                )
                found.append(State(start, end, dtype.name, shapes[start], node.op_type))
    return found
