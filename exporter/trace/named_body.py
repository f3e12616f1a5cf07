"""Nodes that are written where one node stood for them, named after what that one computed."""

from __future__ import annotations

from typing import Any

from linexport.plugins.ops.body import Body

DOMAIN = "linexport.trace.written"
"""The domain of nodes that stand for others, until ``written_out.expand`` puts these there."""


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
