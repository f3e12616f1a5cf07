"""Pairs of real nodes in the place of complex ones, and the writer of such nodes.

A part of a pair is a node, or 0.0 where it is known to be zero: a real number has no imaginary
part, and what is multiplied by it is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from linexport.errors import UnsupportedModelError
from linexport.system.torch_internals import operators
from linexport.system.torch_internals.exports import dispatching, fake_mode

aten = torch.ops.aten

Part = Node | float


class ComplexPair(NamedTuple):
    """A complex value, or a list of them: its real and its imaginary part."""

    re: Part
    im: Part


def value_of(x: object) -> Any:
    """Return what a node stands for while it is traced."""
    return x.meta.get("val") if isinstance(x, Node) else x


def is_complex(x: object) -> bool:
    """Return whether a node is complex, or gives complex values; or a number is."""
    value = value_of(x)
    if isinstance(value, list | tuple):
        return any(map(is_complex, value))
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def operands(node: Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node."""
    return node.args


def is_zero(x: Node) -> bool:
    """Return whether a node makes nothing but zeros."""
    given = arguments(x) if x.op == "call_function" else {}
    name = opname(x).removeprefix("new_").removesuffix("_like")
    return name == "zeros" or (name == "full" and given["fill_value"] == 0)


def opname(node: Node) -> str:
    """Return mul of aten.mul.Tensor."""
    return operators.short_name(node.target)


def arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name, without those left out."""
    names = operators.argument_names(node.target) or [str(i) for i in range(9)]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


class PairWriter:
    """Writes real nodes in front of a node.

    Attributes:
        node: what is replaced.
        dtype: of the parts.
        pairs: complex nodes so far, by name.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.pairs: dict[Node, ComplexPair] = {}
        self._sizes: dict[str, Node] = {}
        self._with_size: dict[str, tuple[Node, int]] = {}
        values = (leaf for node in graph.nodes for leaf in _leaves(value_of(node)))
        self._dispatching = dispatching()
        self.mode: Any = next(filter(None, map(fake_mode, values)))

    def begin(self, node: Node) -> None:
        """Write in front of a node from here on."""
        self.node = node
        given = [node, *node.all_input_nodes]
        dtypes = [v.dtype for x in given for v in _leaves(value_of(x)) if v.is_complex()]
        if dtypes:
            self.dtype = dtypes[0].to_real()

    def note(self, node: Node) -> None:
        """Note the sizes that a node has, or is."""
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(str(value), node)
        for tensor in _leaves(value) if not isinstance(value, list | tuple) else ():
            for dim, size in enumerate(() if tensor.is_complex() else tensor.shape):
                if not isinstance(size, int):
                    self._with_size.setdefault(str(size), (node, dim))

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), value_of)
        with torch.no_grad(), self.mode, self._dispatching():
            found = target(*values[0], **values[1])
        kept = {k: v for k, v in self.node.meta.items() if k != "tensor_meta"}
        made.meta = {**kept, "val": found}
        self.note(made)
        return made

    def pair(self, x: Any) -> ComplexPair:
        """Return a node or a number as a pair."""
        if not isinstance(x, Node):
            return ComplexPair(float(complex(x).real), float(complex(x).imag))
        if x in self.pairs:
            return ComplexPair(
                *(p if isinstance(p, float) else self.cast(p) for p in self.pairs[x])
            )
        if isinstance(value_of(x), torch.Tensor):
            real = self.cast(x)
            # A state that begins with zeros has two parts at its first step as at all others.
            return ComplexPair(real, real if is_zero(x) else 0.0)
        return ComplexPair(self(aten.scalar_tensor.default, x, dtype=self.dtype), 0.0)

    def cast(self, x: Node) -> Node:
        """Return a node in the dtype of the parts."""
        value = value_of(x)
        if isinstance(value, list | tuple) or value.dtype == self.dtype:
            return x
        return self(aten._to_copy.default, x, dtype=self.dtype)

    def fitted(self, pair: ComplexPair, shape: Sequence[object]) -> ComplexPair:
        """Return a pair whose parts, besides zeros, have a shape."""
        return ComplexPair(*(p if p == 0.0 else self.whole(p, shape) for p in pair))

    def whole(self, part: Part, shape: Sequence[object]) -> Node:
        """Return a part as a node of a shape."""
        if isinstance(part, float):
            return self.full(shape, part)
        own = value_of(part).shape
        if len(own) == len(shape) and all(map(_same, own, shape)):
            return part
        return self(aten.expand.default, part, self.sizes(shape))

    def full(self, shape: Sequence[object], number: float) -> Node:
        """Return a tensor full of a number."""
        return self(aten.full.default, self.sizes(shape), number, dtype=self.dtype)

    def sizes(self, shape: Sequence[Any]) -> list[Any]:
        """Return a shape with nodes for the sizes that vary."""
        return [size if isinstance(size, int) else self._size(size) for size in shape]

    def _size(self, size: torch.SymInt) -> Node:
        if str(size) not in self._sizes:
            if str(size) not in self._with_size:
                raise UnsupportedModelError(
                    f"No real tensor has the size {size} of the complex zeros in {self.node}: make "
                    "them with torch.zeros in real numbers, and use torch.complex."
                )
            self(aten.sym_size.int, *self._with_size[str(size)])
        return self._sizes[str(size)]

    def add(self, a: Part, b: Part) -> Part:
        """Return a + b."""
        if isinstance(a, float):
            a, b = b, a
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        return a if b == 0.0 else self(aten.add.Tensor, a, b)

    def sub(self, a: Part, b: Part) -> Part:
        """Return a - b."""
        if isinstance(a, float) or isinstance(b, float):
            return self.add(a, self.neg(b))
        return self(aten.sub.Tensor, a, b)

    def neg(self, a: Part) -> Part:
        """Return -a."""
        return -a if isinstance(a, float) else self(aten.neg.default, a)

    def mul(self, a: Part, b: Part) -> Part:
        """Return a b."""
        if isinstance(a, float):
            a, b = b, a
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        if b in (0.0, 1.0):
            return a if b else 0.0
        return self.neg(a) if b == -1.0 else self(aten.mul.Tensor, a, b)

    def div(self, a: Part, b: Part) -> Part:
        """Return a / b."""
        if isinstance(b, float):
            return a / b if isinstance(a, float) else self(aten.div.Tensor, a, b)
        if isinstance(a, float):
            return self.mul(self(aten.reciprocal.default, b), a)
        return self(aten.div.Tensor, a, b)

    def apply(self, target: object, a: Part) -> Node:
        """Return a function of a part."""
        return self(target, self.full([], a) if isinstance(a, float) else a)

    def where(self, condition: Node, a: Part, b: Part) -> Node:
        """Return a where something holds, b elsewhere."""
        a, b = (self.full([], x) if isinstance(x, float) else x for x in (a, b))
        return self(aten.where.self, condition, a, b)


def _leaves(value: object) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _same(a: object, b: object) -> bool:
    """Return whether two sizes are the same, without asking torch, which would note a guard."""
    return str(a) == str(b)


Rule = Callable[[PairWriter, Node], ComplexPair | Part]
"""Writes a node in real numbers: a complex one as a pair."""

Rules = Mapping[str, Rule]
"""Rules by the name of an operator."""
