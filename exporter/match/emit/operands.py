"""Factors of a match as nodes, packed as (B, T, heads * width), and their functions and maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from linexport.graph.operators import BOOLEAN
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import Nodes, side_by_side
from linexport.match.forms import functions
from linexport.match.forms.axes import Index
from linexport.match.forms.terms import IDENTITY, Form, Leaf
from linexport.match.roles.feature_maps import Mapped
from linexport.match.roles.head_layout import axis_size, head_layout
from linexport.match.roles.roles import Roles
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import formulas


class Factors(Nodes):
    """Writes the inputs of the fused node.

    Attributes:
        maps: the kinds of the feature maps of query and key.
        has_signs: decays are written that may be negative.
        divides: a sum over keys is divided by that is not the normaliser of the op.
        result: once all is written, the last value; it equals the root.
    """

    result: gs.Tensor
    has_signs = False
    divides = False

    def __init__(
        self, root: gs.Variable, form: Form, roles: Roles, mapped: Mapped | None = None
    ) -> None:
        super().__init__(root.name, roles.leaves)
        self.root, self.form, self.roles, self.mapped = root, form, roles, mapped
        self.layout = head_layout(roles)
        self.maps: dict[str, str | None] = {}
        self.parameters = [
            gs.Constant(self.name("parameter"), p) for p in (mapped.parameters if mapped else ())
        ]

    @property
    def applies_map(self) -> bool:
        """Return whether the fused node applies the map itself."""
        return self.mapped is not None and formulas(self.mapped.kind).kappa is not None

    def packed(
        self,
        role: str,
        leaves: Sequence[Leaf],
        heads: Index,
        width: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Tensor:
        """The product of some factors as (B, T, heads * width), in a dtype."""
        time = self.roles.query_position if role == "query" else self.roles.key_position
        groups = (self.roles.batch, time, (*heads, *width))
        return self.packed_in(groups, leaves, heads, dtype, role)

    def packed_in(
        self,
        groups: tuple[Index, ...],
        leaves: Sequence[Leaf],
        heads: Index,
        dtype: np.dtype[np.generic],
        role: str = "",
    ) -> gs.Tensor:
        """The product of some factors with the dims of the groups, in a dtype."""
        if len(leaves) == 1:
            return self.applied(role, self.grouped(leaves[0], groups), leaves[0], heads, dtype)
        return self.product_of(leaves, groups, heads, dtype)

    def product_of(
        self,
        leaves: Sequence[Leaf],
        groups: tuple[Index, ...],
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Tensor:
        """Return the product of several factors, with the dims of the groups."""
        # Tokens stay one dim: chunks of them may be none that is whole.
        axes = [index for group in groups for index in side_by_side(group, leaves)]
        product: gs.Tensor | None = None
        for leaf in leaves:
            split = self.ordered(leaf, axes)
            factor = self.applied("", split, leaf, heads, dtype)
            product = (
                factor
                if product is None
                else self.add("Mul", [product, factor], dtype, shape=_wider(product, factor))
            )
        assert product is not None
        present = set().union(*(f.axes for f in leaves))
        return self.merged(product, axes, groups, present)

    def applied(
        self,
        role: str,
        x: gs.Tensor,
        leaf: Leaf,
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Tensor:
        """A leaf's function on the packed tensor: a FeatureMap node where there is such a map."""
        if self.mapped is not None and role in ("query", "key"):
            return self._several(role, x, leaf, self.mapped, heads, dtype)
        kind = functions.kind_of(leaf.function) if role in ("query", "key") else None
        if role in ("query", "key"):
            self.maps[role] = kind
        if kind is not None:
            x = self.cast(x, dtype)
            attributes = {"kind": kind, "num_heads": axis_size(heads), "side": role}
            name = f"{self.root.name}/{role}/FeatureMap"
            return self.add(
                feature_map.OP.name, [x], dtype, shape=x.shape, attrs=attributes, name=name
            )
        if leaf.function != IDENTITY:
            x = self.function(x, leaf, dtype)
        return self.cast(x, dtype)

    def _several(
        self,
        role: str,
        x: gs.Tensor,
        leaf: Leaf,
        mapped: Mapped,
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Tensor:
        """A map of several components on the packed tensor.

        Where its kernel is a function of q . k, the fused node applies it: it computes products of
        features from the scores, whose sums do not cancel, and needs features for its state only.
        """
        self.maps[role], count = mapped.kind, axis_size(heads)
        if leaf.function != IDENTITY:
            x = self.function(x, leaf, dtype)
        x = self.cast(x, dtype)
        if mapped.scales[role] != 1.0:
            x = self.op.Mul(x, mapped.scales[role])
        if self.applies_map:
            return x
        attributes = {"kind": mapped.kind, "num_heads": count, "side": role}
        shape = [*known_shape(x)[:2], count * mapped.features]
        name = f"{self.root.name}/{role}/FeatureMap"
        inputs = [x, *self.parameters]
        return self.add(
            feature_map.OP.name, inputs, dtype, shape=shape, attrs=attributes, name=name
        )

    def function(self, x: gs.Tensor, leaf: Leaf, dtype: np.dtype[np.generic]) -> gs.Tensor:
        b = Body()
        functions.write(b, leaf.function, "x")
        named: dict[str, gs.Tensor] = {"x": x, "": gs.Variable.empty()}
        result: gs.Tensor | None = None
        for proto in b.nodes:
            inputs = [named[n] for n in proto.input]
            attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
            if proto.op_type == "Constant":
                array = numpy_helper.to_array(attributes["value"])
                named[proto.output[0]] = gs.Constant(self.name("constant"), array)
                continue
            if proto.op_type not in (*BOOLEAN, "Where", "Cast"):
                # A truth among numbers is 1 or 0.
                inputs = [self.cast(t, dtype) if t.dtype == np.dtype(bool) else t for t in inputs]
            to = attributes.get("to")
            kind = helper.tensor_dtype_to_np_dtype(to) if to else _kind(inputs, dtype)
            if proto.op_type in BOOLEAN:
                kind = np.dtype(bool)
            result = self.add(
                proto.op_type, inputs, np.dtype(kind), shape=x.shape, attrs=attributes
            )
            named[proto.output[0]] = result
        assert result is not None
        return result


def _kind(inputs: Sequence[gs.Tensor], default: np.dtype[np.generic]) -> np.dtype[np.generic]:
    kinds = [np.dtype(t.dtype) for t in inputs if not t.is_empty() and t.dtype is not None]
    floats = [k for k in kinds if k != np.dtype(bool)]
    return floats[0] if floats else default


def _wider(a: gs.Tensor, b: gs.Tensor) -> list[int | str]:
    assert a.shape is not None and b.shape is not None
    # NumPy's broadcasting, of sizes that are equal or 1.
    return [y if x == 1 else x for x, y in zip(a.shape, b.shape, strict=True)]
