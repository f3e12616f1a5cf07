"""Nodes that are written where one node stood for them, named after what that one computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx
from onnx import helper
from onnxscript import values

from linexport.plugins.ops.body import Body

DOMAIN = "linexport.trace.written"
"""The domain of nodes that stand for others, until ``expand`` puts these there."""


def mark(node: str, kinds: Sequence[str], x: object, **attributes: int) -> object:
    """Write a node that stands for others in a graph.

    Args:
        node: its operator.
        kinds: element types of ``x`` and of what it computes, which has the shape of ``x``.
        x: its input.
        attributes: of the node.
    """
    if not onnx.defs.has(node, 1, DOMAIN):
        onnx.defs.register_schema(_schema(node, kinds, attributes))
    return getattr(values.Opset(DOMAIN, 1), node)(x, **attributes)


def _schema(node: str, kinds: Sequence[str], attributes: Iterable[str]) -> onnx.defs.OpSchema:
    schema = onnx.defs.OpSchema
    return schema(
        node,
        DOMAIN,
        1,
        inputs=[schema.FormalParameter("given", "T")],
        outputs=[schema.FormalParameter("computed", "T")],
        type_constraints=[("T", [f"tensor({kind})" for kind in kinds], "numbers")],
        attributes=[schema.Attribute(name, schema.AttrType.INT) for name in attributes],
    )


class NamedBody(Body):
    """Nodes whose values are named after a value of the graph.

    Args:
        prefix: of all names.
        parent: the nodes around these.
    """

    def __init__(self, prefix: str, parent: Body | None = None) -> None:
        super().__init__(parent)
        self.prefix = prefix

    def fresh(self, hint: str) -> str:
        """A name that no other value of the graph has."""
        return f"{self.prefix}/{super().fresh(hint)}"

    def node(self, op_type: str, *inputs: str, **attributes: Any) -> Any:
        """Append a node with a name of its own."""
        found = super().node(op_type, *inputs, **attributes)
        self.nodes[-1].name = f"{self.nodes[-1].output[0]}/{op_type}"
        return found

    def written(self, value: str) -> list[onnx.NodeProto]:
        """Return the nodes, of which the last gives a value the name that is the prefix of all."""
        last = helper.make_node("Identity", [value], [self.prefix], f"{self.prefix}/Identity")
        return [*self.nodes, last]
