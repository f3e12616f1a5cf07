"""Roles as nodes: packed inputs, feature maps, the fused node, and its output where it was.

Inputs are brought to (B, T, heads * width) and the output back to the dims it had. Where the graph
came from such a layout, which is usual, no node is needed for either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import DOMAIN
from linexport.recognise import functions
from linexport.recognise.axes import Axis, Index, size_of
from linexport.recognise.roles import NotAttentionError, Roles
from linexport.recognise.sizes import ONE, Size
from linexport.recognise.terms import BOOLEAN, IDENTITY, Form, Leaf

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Layout:
    """The order of head labels in each packed input.

    Attributes:
        query, key, value, decay, output: labels, the slowest first.
    """

    query: Index
    key: Index
    value: Index
    output: Index


def layout(roles: Roles) -> Layout:
    """Heads in consecutive groups: of those that share one, the shared label comes first."""
    order = _seen(roles)
    query, key = roles.heads(roles.query), roles.heads(roles.key)
    value = roles.heads(roles.value) if roles.value else key
    kv = key | value
    if query - kv and kv - query:
        query = query | kv
    common = [a for a in order if a in kv and a in query]
    common.sort(key=lambda a: a not in key)
    rest = [a for a in order if a in kv and a not in query]
    rest.sort(key=lambda a: a not in key)
    all_kv = (*common, *rest)
    own = tuple(a for a in order if a in query and a not in kv)
    # Heads without a key of their own must be the fastest, or the keys are repeated.
    keys = tuple(a for a in all_kv if a in key)
    return Layout(
        (*common, *own),
        keys if all_kv[: len(keys)] == keys else all_kv,
        all_kv,
        (*all_kv, *own),
    )


def _seen(roles: Roles) -> list[Axis]:
    """Labels in the order in which the value, then the others, have them."""
    leaves = (*roles.value, *roles.query, *roles.key)
    return list(dict.fromkeys(a for f in leaves for index in f.dims for a in index))


def _count(index: Index) -> int:
    known = size_of(index).known
    if known is None:
        raise NotAttentionError("the number of its heads is not fixed")
    return known


class Writer:
    """Writes the nodes that take the place of a match.

    Attributes:
        nodes: those written.
        result: the last value; it equals the root.
        maps: the kinds of the feature maps of query and key.
    """

    def __init__(self, root: gs.Tensor, form: Form, roles: Roles) -> None:
        self.root, self.form, self.roles = root, form, roles
        self.layout = layout(roles)
        self.nodes: list[gs.Node] = []
        self.maps: dict[str, str | None] = {}
        self._made = 0
        self._sources = _sources(roles)
        self._dims = (size_of(roles.batch), size_of(roles.rows))

    def write(self) -> gs.Node:
        """All of it; returns the fused node.

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
        width = _count(roles.widths)
        output = self._variable("output", dtype, (*order.output, *roles.widths))
        fused = gs.Node(
            "LinearAttention",
            f"{self.root.name}/LinearAttention",
            {
                "q_num_heads": _count(order.query),
                "kv_num_heads": _count(order.value),
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
        self.nodes.append(fused)
        assert output.shape is not None and width
        self._restore(self._post(output))
        return fused

    def _dtype(self) -> np.dtype[np.generic]:
        kinds = []
        for leaf in (*self.roles.query, *self.roles.key, *self.roles.value):
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
        ones = gs.Constant(self._name("ones"), np.ones((1, 1, _count(order.value)), dtype))
        return self.expanded(ones, order.value, dtype)

    def _packed(
        self,
        role: str,
        leaves: Sequence[Leaf],
        heads: Index,
        width: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
        """The product of some factors as (B, T, heads * width), in a dtype."""
        time = self.roles.rows if role == "query" else self.roles.columns
        groups = (self.roles.batch, time, (*heads, *width))
        if len(leaves) == 1:
            return self._applied(role, self._grouped(leaves[0], groups), leaves[0], heads, dtype)
        axes = [(a,) for group in groups for a in group]
        product: gs.Variable | None = None
        for leaf in leaves:
            split = self._ordered(leaf, axes)
            factor = self._applied("", split, leaf, heads, dtype)
            product = (
                factor
                if product is None
                else self._add("Mul", [product, factor], dtype, shape=_wider(product, factor))
            )
        assert product is not None
        present = set().union(*(f.axes for f in leaves))
        return self._merged(product, axes, groups, present)

    def _applied(
        self,
        role: str,
        x: gs.Tensor,
        leaf: Leaf,
        heads: Index,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
        """A leaf's function on the packed tensor: a FeatureMap node where there is such a map."""
        kind = functions.kind_of(leaf.function) if role in ("query", "key") else None
        if role in ("query", "key"):
            self.maps[role] = kind
        if kind is not None:
            x = self._cast(x, dtype)
            attributes = {"kind": kind, "num_heads": _count(heads)}
            name = f"{self.root.name}/{role}/FeatureMap"
            return self._add("FeatureMap", [x], dtype, shape=x.shape, attrs=attributes, name=name)
        if leaf.function != IDENTITY:
            x = self._function(x, leaf, dtype)
        return self._cast(x, dtype)

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
                named[proto.output[0]] = gs.Constant(self._name("constant"), array)
                continue
            to = attributes.get("to")
            kind = helper.tensor_dtype_to_np_dtype(to) if to else _kind(inputs, dtype)
            if proto.op_type in BOOLEAN:
                kind = np.dtype(bool)
            result = self._add(
                proto.op_type, inputs, np.dtype(kind), shape=x.shape, attrs=attributes
            )
            named[proto.output[0]] = result
        assert result is not None
        return result

    def expanded(
        self, x: gs.Tensor, heads: Index, dtype: np.dtype[np.generic]
    ) -> gs.Variable:
        """(1, 1, heads) repeated for every token."""
        shape = self._shape_of([self.roles.batch, self.roles.rows, heads])
        return self._add("Expand", [x, shape], dtype, heads)

    def packed_decay(
        self,
        leaf: Leaf,
        time: Index,
        heads: Index,
        width: Index,
        coefficient: float,
        dtype: np.dtype[np.generic],
    ) -> gs.Variable:
        """A leaf times a number as (B, T, heads * width)."""
        packed = self._grouped(leaf, (self.roles.batch, time, (*heads, *width)))
        decay = self._applied("", packed, leaf, heads, dtype)
        if coefficient == 1.0:
            return decay
        factor = gs.Constant(self._name("factor"), np.asarray(coefficient, dtype))
        return self._add("Mul", [decay, factor], dtype, shape=decay.shape)

    def _mask(self, leaf: Leaf) -> gs.Tensor:
        """(B, T), True where the key counts."""
        own = leaf.axes - {*self.roles.batch, *self.roles.columns}
        if own:
            raise NotAttentionError("its mask of keys differs from head to head")
        x = self._grouped(leaf, (self.roles.batch, self.roles.columns))
        if not leaf.truth or leaf.truth == IDENTITY:
            return x
        return self._function(x, replace(leaf, function=leaf.truth), np.dtype(bool))

    def _decay(self, dtype: np.dtype[np.generic]) -> gs.Variable:
        from linexport.recognise.decay import write

        return write(self, dtype)

    def _post(self, output: gs.Variable) -> gs.Variable:
        """Times the factors that the op has no attribute for."""
        dtype, shape = np.dtype(output.dtype), output.shape
        if self.roles.post != 1.0:
            factor = gs.Constant(self._name("factor"), np.asarray(self.roles.post, dtype))
            output = self._add("Mul", [output, factor], dtype, shape=shape)
        for count in self.roles.post_counts:
            whole = self._shape_of([], [count.size])
            number = self._add("Cast", [whole], dtype, attrs={"to": _element(dtype)}, shape=[1])
            op = "Mul" if count.power > 0 else "Div"
            output = self._add(op, [output, number], dtype, shape=shape)
        return output

    def _restore(self, output: gs.Variable) -> None:
        """The result: the packed output in the dims and the dtype of the root."""
        heads = (*self.layout.output, *self.roles.widths)
        groups = (self.roles.batch, self.roles.rows, heads)
        leaf = Leaf(output, groups)
        result = self._grouped(leaf, self.form.dims)
        wanted = np.dtype(self.root.dtype or output.dtype)
        self.result = self._cast(result, wanted)

    def _grouped(self, leaf: Leaf, groups: Sequence[Index]) -> gs.Tensor:
        """A tensor with its dims as these; what it lacks is repeated."""
        present = [tuple(a for a in g if a in leaf.axes) for g in groups]
        if tuple(present) == leaf.dims and tuple(groups) == leaf.dims:
            return leaf.tensor
        axes = [(a,) for group in groups for a in group]
        flat = [a for index in leaf.dims for a in index]
        if flat == [a for (a,) in axes]:
            # In order already: one Reshape.
            return self._reshape(leaf.tensor, leaf.dims, groups)
        return self._merged(self._ordered(leaf, axes), axes, groups, set(leaf.axes))

    def _ordered(self, leaf: Leaf, axes: Sequence[Index]) -> gs.Tensor:
        """One dim per label, in the order given, of size 1 where the tensor has no such label."""
        own = [a for index in leaf.dims for a in index]
        x = self._reshape(leaf.tensor, leaf.dims, [(a,) for a in own])
        order = [own.index(a) for (a,) in axes if a in own]
        if order != sorted(order):
            shape = [str(own[p].size) if own[p].size.known is None else own[p].size.known
                     for p in order]
            x = self._add("Transpose", [x], np.dtype(x.dtype), attrs={"perm": order}, shape=shape)
        missing = [p for p, (a,) in enumerate(axes) if a not in own]
        if missing:
            places = gs.Constant(self._name("axes"), np.asarray(missing, np.int64))
            shape = [_dim(a.size) if a in own else 1 for (a,) in axes]
            x = self._add("Unsqueeze", [x, places], np.dtype(x.dtype), shape=shape)
        return x

    def _merged(
        self, x: gs.Tensor, axes: Sequence[Index], groups: Sequence[Index], present: set[Axis]
    ) -> gs.Variable:
        """Labels merged into groups, after repeating what is missing."""
        dtype = np.dtype(x.dtype)
        if any(a not in present for (a,) in axes):
            shape = self._shape_of(axes)
            x = self._add("Expand", [x, shape], dtype, shape=[_dim(a.size) for (a,) in axes])
        return self._reshape(x, axes, groups)

    def _reshape(
        self, x: gs.Tensor, dims: Sequence[Index], groups: Sequence[Index]
    ) -> gs.Tensor:
        if [size_of(i) for i in dims] == [size_of(g) for g in groups]:
            return x
        target = self._shape_of(groups, copied=dims)
        shape = [_dim(size_of(g)) for g in groups]
        return self._add("Reshape", [x, target], np.dtype(x.dtype), shape=shape)

    def _shape_of(
        self,
        groups: Sequence[Index],
        sizes: Sequence[Size] | None = None,
        copied: Sequence[Index] | None = None,
    ) -> gs.Tensor:
        """Sizes as a tensor: a constant if they are known or, in a Reshape, can be copied."""
        wanted = [size_of(g) for g in groups] if sizes is None else list(sizes)
        entries: list[int | None] = []
        for place, size in enumerate(wanted):
            same = copied is not None and place < len(copied) and size_of(copied[place]) == size
            entries.append(size.known if size.known is not None else 0 if same else None)
        if copied is not None and entries.count(None) == 1:
            entries = [-1 if n is None else n for n in entries]
        if None not in entries:
            return gs.Constant(self._name("shape"), np.asarray(entries, np.int64))
        parts = [
            gs.Constant(self._name("size"), np.asarray([n], np.int64))
            if n is not None and n > 0
            else self._size(wanted[p])
            for p, n in enumerate(entries)
        ]
        if len(parts) == 1:
            return parts[0]
        attributes = {"axis": 0}
        return self._add("Concat", parts, np.dtype(np.int64), attrs=attributes, shape=[len(parts)])

    def _size(self, size: Size) -> gs.Tensor:
        """A dynamic size as a tensor of one integer."""
        if size in self._sources:
            tensor, place = self._sources[size]
            attributes = {"start": place, "end": place + 1}
            return self._add("Shape", [tensor], np.dtype(np.int64), attrs=attributes, shape=[1])
        for known in self._sources:
            rest = size.divided(known)
            if rest is not None and known != ONE and known.known is None:
                other = (
                    gs.Constant(self._name("size"), np.asarray([rest.known], np.int64))
                    if rest.known is not None
                    else self._size(rest)
                )
                first = self._size(known)
                return self._add("Mul", [first, other], np.dtype(np.int64), shape=[1])
        raise NotAttentionError(f"no input has the size {size}")

    def _cast(self, x: gs.Tensor, dtype: np.dtype[np.generic]) -> gs.Tensor:
        if np.dtype(x.dtype) == dtype:
            return x
        return self._add("Cast", [x], dtype, attrs={"to": _element(dtype)}, shape=x.shape)

    def _variable(self, hint: str, dtype: np.dtype[np.generic], packed: Index) -> gs.Variable:
        batch, time = self._dims
        shape = [_dim(batch), _dim(time), _dim(size_of(packed))]
        return gs.Variable(self._name(hint), dtype=dtype, shape=shape)

    def _add(
        self,
        op: str,
        inputs: list[gs.Tensor],
        dtype: np.dtype[np.generic],
        packed: Index | None = None,
        *,
        attrs: dict[str, object] | None = None,
        shape: Sequence[int | str] | None = None,
        name: str | None = None,
    ) -> gs.Variable:
        output = (
            self._variable(op.lower(), dtype, packed)
            if packed is not None
            else gs.Variable(self._name(op.lower()), dtype=dtype, shape=list(shape or ()))
        )
        domain = DOMAIN if op == "FeatureMap" else None
        name = name or f"{output.name}/{op}"
        self.nodes.append(gs.Node(op, name, attrs or {}, inputs, [output], domain=domain))
        return output

    def _name(self, hint: str) -> str:
        self._made += 1
        return f"{self.root.name}/{hint}_{self._made}"


def _sources(roles: Roles) -> dict[Size, tuple[gs.Tensor, int]]:
    """Where each dynamic size can be read."""
    return {
        size_of(index): (leaf.tensor, place)
        for leaf in reversed(roles.leaves)
        for place, index in enumerate(leaf.dims)
        if size_of(index).known is None
    }


def _dim(size: Size) -> int | str:
    return str(size) if size.known is None else size.known


def _kind(inputs: Sequence[gs.Tensor], default: np.dtype[np.generic]) -> np.dtype[np.generic]:
    kinds = [np.dtype(t.dtype) for t in inputs if not t.is_empty() and t.dtype is not None]
    floats = [k for k in kinds if k != np.dtype(bool)]
    return floats[0] if floats else default


def _wider(a: gs.Variable, b: gs.Variable) -> list[int | str]:
    assert a.shape is not None and b.shape is not None
    return [y if x == 1 else x for x, y in zip(a.shape, b.shape, strict=True)]


def _element(dtype: np.dtype[np.generic]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))


