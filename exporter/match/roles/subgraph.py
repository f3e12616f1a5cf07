"""The nodes of an attention in a graph, and what they read from around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from linexport.match.forms.terms import Form
from linexport.match.roles import feature_maps
from linexport.match.roles.roles import Roles


@dataclass(frozen=True)
class Root:
    """A value that is an attention.

    Attributes:
        region: the nodes that compute it from what the roles read, in graph order.
        mapped: the map that its scores are the kernel of, if they are.
    """

    tensor: gs.Variable
    form: Form
    roles: Roles
    region: tuple[gs.Node, ...]
    mapped: feature_maps.Mapped | None = None


def reads(node: gs.Node) -> list[gs.Tensor]:
    """Inputs of a node, and what its bodies take from around them."""
    found = [t for t in node.inputs if not t.is_empty()]
    for body in node.attrs.values():
        if isinstance(body, gs.Graph):
            made = {t.name for t in body.inputs} | {o.name for n in body.nodes for o in n.outputs}
            found += [t for n in body.nodes for t in reads(n) if t.name not in made]
    return found


def dead_nodes(region: Sequence[gs.Node], kept: set[int]) -> list[gs.Node]:
    """Return the nodes of a region that nothing reads any more."""
    dead: dict[int, gs.Node] = {}
    for node in reversed(region):
        consumers = [r for o in node.outputs for r in o.outputs]
        if all(id(r) in dead for r in consumers) and not any(id(o) in kept for o in node.outputs):
            dead[id(node)] = node
    return [n for n in region if id(n) in dead]
