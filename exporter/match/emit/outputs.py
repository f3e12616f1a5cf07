"""Factors and terms behind a fused node: what its op has no attribute for."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.emit.layout import element_type
from linexport.match.emit.state_spaces import StateSpaces
from linexport.match.forms.axes import Index
from linexport.match.forms.terms import Leaf, Term


class Outputs(StateSpaces):
    """Writes the output of a match from that of its node."""

    def post(self, output: gs.Tensor) -> gs.Tensor:
        """Multiply the output with the factors that the op has no attribute for."""
        dtype, shape = np.dtype(output.dtype), output.shape
        # These factors do not depend on positions, so they were moved out of both sums.
        if self.roles.post != 1.0:
            factor = gs.Constant(self.name("factor"), np.asarray(self.roles.post, dtype))
            output = self.add("Mul", [output, factor], dtype, shape=shape)
        for count in self.roles.post_counts:
            whole = self.shape_of([], [count.size])
            number = self.add("Cast", [whole], dtype, attrs={"to": element_type(dtype)}, shape=[1])
            op = "Mul" if count.power > 0 else "Div"
            output = self.add(op, [output, number], dtype, shape=shape)
        return output

    def weighted(self, output: gs.Tensor, packed: tuple[Index, ...]) -> gs.Tensor:
        """Multiply the output with the factors that differ from query to query.

        They do not depend on the key, so they may be moved out of the sum over keys.
        """
        if not self.roles.weights:
            return output
        leaves = (Leaf(output, packed), *self.roles.weights)
        return self.product_of(leaves, packed, self.layout.output, np.dtype(output.dtype))

    def with_bonus(self, output: gs.Tensor, term: Term, packed: tuple[Index, ...]) -> gs.Tensor:
        """Add a per-token bonus term; axes that only the term has are summed over first."""
        dtype, heads = np.dtype(output.dtype), self.layout.output
        free = {a for group in packed for a in group}
        leaves: list[Leaf] = term.of(Leaf)
        if not leaves:
            return self.op.Add(output, term.coefficient)
        summed = tuple(dict.fromkeys(a for f in leaves for i in f.dims for a in i if a not in free))
        if summed:
            inner = [f for f in leaves if f.axes & set(summed)]
            wide = any(f.axes & set(self.roles.widths) for f in inner)
            groups = (*packed[:2], packed[2] if wide else heads, summed)
            x = self.product_of(inner, groups, heads, dtype)
            x = self.op.ReduceSum(x, [3], keepdims=0)
            leaves = [Leaf(x, groups[:3]), *(f for f in leaves if f not in inner)]
        product = self.product_of(leaves, packed, heads, dtype)
        if term.coefficient != 1.0:
            product = self.op.Mul(product, term.coefficient)
        return self.op.Add(output, product, shape=output.shape)
