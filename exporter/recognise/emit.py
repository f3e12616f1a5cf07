"""Roles as nodes: packed inputs, feature maps, the fused node, and its output where it was.

Inputs are brought to (B, T, heads * width) and the output back to the dims it had. Where the graph
came from such a layout, which is usual, no node is needed for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from linexport.plugins.ops import feature_map, linear_attention
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import formulas
from linexport.plugins.ops.linear_attention import INPUTS
from linexport.plugins.ops.op import DOMAIN
from linexport.recognise import decay, functions
from linexport.recognise.axes import Index, size_of
from linexport.recognise.exact import LARGEST
from linexport.recognise.feature_maps import Mapped
from linexport.recognise.head_layout import axis_size, head_layout
from linexport.recognise.nodes import Nodes, element_type, written_size
from linexport.recognise.roles import NotAttentionError, Roles
from linexport.recognise.terms import BOOLEAN, IDENTITY, Form, Leaf

DTYPES = ("float32", "float16", "bfloat16")


class Writer(Nodes):
    """Writes the nodes that take the place of a match.

    Attributes:
        nodes: those written.
        result: the last value; it equals the root.
        maps: the kinds of the feature maps of query and key.
    """

    def __init__(
        self, root: gs.Tensor, form: Form, roles: Roles, mapped: Mapped | None = None
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

    @property
    def map_proven_to(self) -> float | None:
        """The largest |x| on which the maps were compared; None where there are none."""
        if self.mapped is not None:
            return self.mapped.proven_to
        return LARGEST if any(self.maps.values()) else None

    def write(self) -> gs.Node:
        """Write all nodes and return the fused one.

        Raises:
            NotAttentionError: it cannot be written with the op.
        """
        roles, order = self.roles, self.layout
        dtype = self._dtype()
        query = self._packed("query", roles.query, order.query, roles.channels, dtype)
        key = self._packed("key", roles.key, order.key, roles.channels, dtype)
        value = self._value(dtype)
        inputs = [query, key, value]
        if roles.decay is not None or roles.mask is not None:
            inputs += [gs.Variable.empty(), gs.Variable.empty()]
            inputs.append(self._decay(dtype) if roles.decay else gs.Variable.empty())
        if roles.mask is not None:
            inputs += [gs.Variable.empty(), self._mask(roles.mask)]
        if self.mapped is not None and self.applies_map and self.parameters:
            inputs += [gs.Variable.empty() for _ in range(len(INPUTS) - len(inputs))]
            inputs += self.parameters
        packed: tuple[Index, ...] = (
            roles.batch,
            roles.query_position,
            (*order.output, *roles.widths),
        )
        shape = [written_size(size_of(group)) for group in packed]
        output = gs.Variable(self.name("output"), dtype=dtype, shape=shape)
        fused = gs.Node(
            linear_attention.OP.name,
            f"{self.root.name}/LinearAttention",
            {
                "q_num_heads": axis_size(order.query),
                "kv_num_heads": axis_size(order.value),
                "update_rule": "gated" if roles.decay else "linear",
                "causal": int(roles.causal),
                "normalize": int(roles.normalize),
                "scale": float(roles.scale),
                "eps": float(roles.eps),
            },
            inputs,
            [output],
            domain=DOMAIN,
        )
        if self.mapped is not None and self.applies_map:
            fused.attrs["feature_map"] = self.mapped.kind
        self.nodes.append(fused)
        self._restore(self._weighted(self._post(output), packed))
        return fused

    def _dtype(self) -> np.dtype[np.generic]:
        kinds, roles = [], self.roles
        for leaf in (*roles.query, *roles.key, *roles.value, *roles.weights):
            to = functions.casts(leaf.function)
            found = leaf.tensor.dtype if to is None else helper.tensor_dtype_to_np_dtype(to)
            if found is None:
                raise NotAttentionError(f"the dtype of {leaf.tensor.name} is not known")
            kinds.append(np.dtype(found))
        widest = max(kinds, key=lambda k: k.itemsize)
        if any(k.name not in DTYPES for k in kinds):
            raise NotAttentionError(f"it computes in {widest}; expected {', '.join(DTYPES)}")
        return widest

    def _value(self, dtype: np.dtype[np.generic]) -> gs.Variable:
        roles, order = self.roles, self.layout
        if roles.value:
            return self._packed("value", roles.value, order.value, roles.widths, dtype)
        # sum_s q . k_s is attention whose values are all one, of width 1.
        ones = np.ones((1, 1, axis_size(order.value)), dtype)
        return self._everywhere(ones, order.value, roles.key_position)

    def _packed(
        self,
        role: str,
        leaves: Sequence[Leaf],
        heads: Index,
        width: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
        """The product of some factors as (B, T, heads * width), in a dtype."""
        time = self.roles.query_position if role == "query" else self.roles.key_position
        groups = (self.roles.batch, time, (*heads, *width))
        if len(leaves) == 1:
            return self._applied(role, self.grouped(leaves[0], groups), leaves[0], heads, dtype)
        return self._product(leaves, groups, heads, dtype)

    def _product(
        self,
        leaves: Sequence[Leaf],
        groups: tuple[Index, ...],
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
        """Return the product of several factors, with the dims of the groups."""
        axes = [(a,) for group in groups for a in group]
        product: gs.Variable | None = None
        for leaf in leaves:
            split = self.ordered(leaf, axes)
            factor = self._applied("", split, leaf, heads, dtype)
            product = (
                factor
                if product is None
                else self.add("Mul", [product, factor], dtype, shape=_wider(product, factor))
            )
        assert product is not None
        present = set().union(*(f.axes for f in leaves))
        return self.merged(product, axes, groups, present)

    def _applied(
        self,
        role: str,
        x: gs.Tensor,
        leaf: Leaf,
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
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
            x = self._function(x, leaf, dtype)
        return self.cast(x, dtype)

    def _several(
        self,
        role: str,
        x: gs.Tensor,
        leaf: Leaf,
        mapped: Mapped,
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
        """A map of several components on the packed tensor.

        Where its kernel is a function of q . k, the fused node applies it: it computes products of
        features from the scores, whose sums do not cancel, and needs features for its state only.
        """
        self.maps[role], count = mapped.kind, axis_size(heads)
        if leaf.function != IDENTITY:
            x = self._function(x, leaf, dtype)
        x = self.cast(x, dtype)
        if mapped.scales[role] != 1.0:
            factor = gs.Constant(self.name("factor"), np.asarray(mapped.scales[role], dtype))
            x = self.add("Mul", [x, factor], dtype, shape=x.shape)
        if self.applies_map:
            return x
        attributes = {"kind": mapped.kind, "num_heads": count, "side": role}
        shape = [*x.shape[:2], count * mapped.features]
        name = f"{self.root.name}/{role}/FeatureMap"
        inputs = [x, *self.parameters]
        return self.add(
            feature_map.OP.name, inputs, dtype, shape=shape, attrs=attributes, name=name
        )

    def _function(self, x: gs.Tensor, leaf: Leaf, dtype: np.dtype[np.generic]) -> gs.Variable:
        b = Body()
        functions.write(b, leaf.function, "x")
        named: dict[str, gs.Tensor] = {"x": x, "": gs.Variable.empty()}
        result: gs.Variable | None = None
        for proto in b.nodes:
            inputs = [named[n] for n in proto.input]
            attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
            if proto.op_type == "Constant":
                array = numpy_helper.to_array(attributes["value"])
                named[proto.output[0]] = gs.Constant(self.name("constant"), array)
                continue
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

    def _everywhere(self, row: np.ndarray, heads: Index, time: Index) -> gs.Variable:
        """Numbers of the heads, (1, 1, heads), repeated for every token."""
        x, groups = gs.Constant(self.name("row"), row), (self.roles.batch, time, heads)
        shape = [written_size(size_of(group)) for group in groups]
        return self.add("Expand", [x, self.shape_of(groups)], row.dtype, shape=shape)

    def _mask(self, leaf: Leaf) -> gs.Tensor:
        """(B, T), True where the key counts."""
        own = leaf.axes - {*self.roles.batch, *self.roles.key_position}
        if own:
            raise NotAttentionError("its mask of keys differs from head to head")
        x = self.grouped(leaf, (self.roles.batch, self.roles.key_position))
        if not leaf.truth or leaf.truth == IDENTITY:
            return x
        return self._function(x, replace(leaf, function=leaf.truth), np.dtype(bool))

    def _decay(self, dtype: np.dtype[np.generic]) -> gs.Variable:
        """(B, T, heads) or (B, T, heads * channels)."""
        heads = self.layout.value
        found = decay.read_decay(self.roles, heads)
        if found.leaf is None:
            row = np.full((1, 1, axis_size(heads)), found.coefficient, dtype)
            return self._everywhere(row, heads, self.roles.query_position)
        groups = (self.roles.batch, found.time, (*heads, *found.width))
        x = self._applied("", self.grouped(found.leaf, groups), found.leaf, heads, dtype)
        if found.coefficient == 1.0:
            return x
        factor = gs.Constant(self.name("factor"), np.asarray(found.coefficient, dtype))
        return self.add("Mul", [x, factor], dtype, shape=x.shape)

    def _post(self, output: gs.Variable) -> gs.Variable:
        """Multiply the output with the factors that the op has no attribute for."""
        dtype, shape = np.dtype(output.dtype), output.shape
        if self.roles.post != 1.0:
            factor = gs.Constant(self.name("factor"), np.asarray(self.roles.post, dtype))
            output = self.add("Mul", [output, factor], dtype, shape=shape)
        for count in self.roles.post_counts:
            whole = self.shape_of([], [count.size])
            number = self.add("Cast", [whole], dtype, attrs={"to": element_type(dtype)}, shape=[1])
            op = "Mul" if count.power > 0 else "Div"
            output = self.add(op, [output, number], dtype, shape=shape)
        return output

    def _weighted(self, output: gs.Variable, packed: tuple[Index, ...]) -> gs.Variable:
        """Multiply the output with the factors that differ from query to query.

        They do not depend on the key, so they may be moved out of the sum over keys.
        """
        if not self.roles.weights:
            return output
        leaves = (Leaf(output, packed), *self.roles.weights)
        return self._product(leaves, packed, self.layout.output, np.dtype(output.dtype))

    def _restore(self, output: gs.Variable) -> None:
        """The result: the packed output in the dims and the dtype of the root."""
        heads = (*self.layout.output, *self.roles.widths)
        groups = (self.roles.batch, self.roles.query_position, heads)
        leaf = Leaf(output, groups)
        result = self.grouped(leaf, self.form.dims)
        dtype = np.dtype(self.root.dtype or output.dtype)
        self.result = self.cast(result, dtype)


def _kind(inputs: Sequence[gs.Tensor], default: np.dtype[np.generic]) -> np.dtype[np.generic]:
    kinds = [np.dtype(t.dtype) for t in inputs if not t.is_empty() and t.dtype is not None]
    floats = [k for k in kinds if k != np.dtype(bool)]
    return floats[0] if floats else default


def _wider(a: gs.Variable, b: gs.Variable) -> list[int | str]:
    assert a.shape is not None and b.shape is not None
    return [y if x == 1 else x for x, y in zip(a.shape, b.shape, strict=True)]
