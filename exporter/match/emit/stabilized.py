"""A stabilised attention divided by what else depends on its running maximum, as nodes.

    exp(-m_t) sum_s [..] v_s  /  f(exp(-m_t) sum_s [..], exp(-m_t))      f: max(|x|, y) + eps

The divisor is a function of two values of a query. Both are written in the layout of tokens, and
the operators of f after them: then nothing of the chunks is left in which a model computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.operators import AXES_ONLY, ON_NUMBERS
from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.layout import written_size
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Index, size_of
from linexport.match.forms.terms import Form, Leaf
from linexport.match.roles.roles import Roles
from linexport.match.roles.subgraph import Root

LAYOUT = AXES_ONLY | {"Reshape"}


class StabilizedWriter(MatchWriter):
    """Writes the nodes that take the place of a stabilised attention.

    Args:
        root, form, roles: as of a match; the roles lack weights that depend on the maximum.
        divisors: those weights.
        is_scale: says whether a tensor is exp(-m_t).
        read_sum: gives the form and the roles of a tensor that is a sum of keys; None of others.

    Attributes:
        sums: once all is written, the sums that divisors are made of, as roots without regions.
    """

    def __init__(
        self,
        root: gs.Variable,
        form: Form,
        roles: Roles,
        divisors: tuple[Leaf, ...],
        is_scale: Callable[[gs.Tensor], bool],
        read_sum: Callable[[gs.Tensor], tuple[Form, Roles] | None],
    ) -> None:
        super().__init__(root, form, roles)
        self._divisors, self._is_scale, self._read_sum = divisors, is_scale, read_sum
        self._written: dict[str, gs.Tensor] = {}
        self.sums: list[Root] = []
        self.divides = bool(divisors)

    def write(self) -> gs.Node:
        """Write all nodes and return the fused one.

        Raises:
            NotAttentionError: it cannot be written with the op.
        """
        weights = tuple(map(self._in_tokens, self._divisors))
        self.roles = replace(self.roles, weights=(*self.roles.weights, *weights))
        return super().write()

    def _in_tokens(self, leaf: Leaf) -> Leaf:
        """Return a divisor in the layout of tokens."""
        roles = self.roles
        heads = tuple(
            a for a in self.layout.output if a in leaf.axes - {*roles.batch, *roles.query_position}
        )
        if heads != self.layout.value:
            raise NotAttentionError("what it is divided by differs within a head")
        groups = (roles.batch, roles.query_position, heads)
        return replace(leaf, tensor=self._of_tokens(leaf.tensor, heads), dims=groups)

    def _of_tokens(self, tensor: gs.Tensor, heads: Index) -> gs.Tensor:
        """Return a value of queries, (B, T, heads), from the operators that compute it."""
        if tensor.name not in self._written:
            self._written[tensor.name] = self._computed(tensor, heads)
        return self._written[tensor.name]

    def _computed(self, tensor: gs.Tensor, heads: Index) -> gs.Tensor:
        if self._is_scale(tensor):
            return self.scale(heads)
        found = self._read_sum(tensor) if isinstance(tensor, gs.Variable) else None
        if isinstance(tensor, gs.Variable) and found is not None:
            return self._sum(tensor, *found)
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or node.op not in LAYOUT | ON_NUMBERS or len(node.outputs) != 1:
            raise NotAttentionError(f"what it is divided by is made of {tensor.name}")
        # A value of (B, T, heads) needs none of the layouts it went through.
        if node.op in LAYOUT:
            return self._of_tokens(node.inputs[0], heads)
        inputs = [self._operand(t, heads) for t in node.inputs]
        groups = (self.roles.batch, self.roles.query_position, heads)
        shape = [written_size(size_of(g)) for g in groups]
        return self.add(
            node.op, inputs, np.dtype(tensor.dtype), attrs=dict(node.attrs), shape=shape
        )

    def _operand(self, tensor: gs.Tensor, heads: Index) -> gs.Tensor:
        if not isinstance(tensor, gs.Constant):
            return tensor if tensor.is_empty() else self._of_tokens(tensor, heads)
        if tensor.values.size != 1:
            raise NotAttentionError("what it is divided by has numbers of single heads")
        return gs.Constant(self.name("number"), tensor.values.reshape(()))

    def _sum(self, tensor: gs.Variable, form: Form, roles: Roles) -> gs.Tensor:
        """Return a sum over keys alone, (B, T, heads)."""
        inside = {*roles.batch, *roles.query_position}
        heads = tuple(a for index in form.dims for a in index if a not in inside)
        groups = (roles.batch, roles.query_position, heads)
        self.sums.append(Root(tensor, form, roles, ()))
        named = gs.Variable(self.name("sum"), tensor.dtype, tensor.shape)
        writer = MatchWriter(named, Form(groups, form.terms), roles)
        writer.write()
        self.nodes += writer.nodes
        return writer.result
