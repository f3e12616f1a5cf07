"""Target ``onnx``: portable, of standard operators, for any runtime of opset 20."""

from __future__ import annotations

from collections.abc import Sequence

from linexport.plugins.ops import linear_attention
from linexport.plugins.ops.op import Node
from linexport.targets.base import OrtSession, Target
from linexport.targets.lowering import diagonal
from linexport.targets.lowering.choice import Candidate, by_rules


def _attention(node: Node) -> Sequence[Candidate]:
    if not diagonal.fits(node):
        return []
    return [Candidate("by_element", diagonal.REASON, diagonal.by_element)]


TARGET = Target(
    name="onnx",
    candidates=by_rules({linear_attention.OP: _attention}, "standard operators, for any runtime"),
    open=OrtSession,
)
