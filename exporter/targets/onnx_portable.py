"""Target ``onnx``: every op has a body of standard operators; any runtime of opset 20 runs it."""

from __future__ import annotations

from collections.abc import Sequence

from linexport.plugins.ops.op import Node, Op
from linexport.targets import diagonal
from linexport.targets.base import OrtSession, Target
from linexport.targets.lowering import Candidate


def candidates(op: Op, node: Node) -> Sequence[Candidate]:
    """Always a body of standard operators."""
    if op.name == "LinearAttention" and diagonal.fits(node):
        return [Candidate("by_element", diagonal.REASON, diagonal.by_element)]
    return [Candidate("portable", "standard operators, for any runtime", op.portable)]


TARGET = Target(
    name="onnx",
    summary="Portable ONNX of standard operators (opset 20), for any runtime.",
    candidates=candidates,
    open=OrtSession,
)
