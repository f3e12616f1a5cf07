"""Inputs of an ONNX graph that are added to scores before a softmax: masks of zeros and -inf."""

from __future__ import annotations

import onnx

from linexport.graph.operators import MOVES


def is_added_mask(model: onnx.ModelProto, name: str) -> bool:
    """Return whether a softmax is taken of what an input is added to."""
    reached, sums = {name}, set[str]()
    for node in model.graph.node:
        given = set(node.input)
        if node.op_type == "Softmax" and given & sums:
            return True
        if node.op_type == "Add" and given & (reached | sums):
            sums.update(node.output)
        elif node.op_type in MOVES and node.input[0] in reached:
            reached.update(node.output)
        elif node.op_type in MOVES and node.input[0] in sums:
            sums.update(node.output)
    return False
