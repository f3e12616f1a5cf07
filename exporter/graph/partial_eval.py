"""Small tensors whose values are known before the model runs: constants, and shapes.

Integers may be known only as a ``Size``, an expression in the graph's symbols.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from linexport.graph.folding import is_readable, stored_value
from linexport.graph.monomials import Size, parse
from linexport.graph.operators import groups
from linexport.graph.tensors import known_shape

LARGEST = 4096
"""Elements of a tensor worth evaluating."""

SYMBOLIC = {"Gather", "Concat", "Slice", "Squeeze", "Unsqueeze", "Reshape", "Cast", "CastLike"}
SYMBOLIC |= {"Identity", "Add", "Sub", "Mul", "Div", "Neg", "Mod"}


class Values:
    """Known values by tensor name.

    Args:
        sizes: gives the sizes of a tensor's dims, or None where its rank is unknown.
        zeros: names of values that are taken for zeros, whatever they are.
    """

    def __init__(
        self, sizes: Callable[[gs.Tensor], list[Size] | None], zeros: Collection[str] = ()
    ) -> None:
        self._sizes, self._zeros = sizes, zeros
        self._known: dict[str, np.ndarray] = {}

    @classmethod
    def of_graph(cls, graph: gs.Graph) -> Values:
        """Return what is known of a graph whose tensors have their shapes."""
        known = cls(stated_sizes)
        for node in graph.nodes:
            known.visit(node)
        return known

    def get(self, tensor: gs.Tensor) -> np.ndarray | None:
        """Return a tensor's value, numbers or an object array of ``Size``; None if unknown."""
        if isinstance(tensor, gs.Constant):
            if not is_readable(tensor):
                return None
            # Of large ones only squares are of interest, as masks: weights need not be loaded.
            square = len(tensor.shape) > 1 and tensor.shape[-1] == tensor.shape[-2]
            small = np.prod(tensor.shape, dtype=np.int64) <= LARGEST
            return np.asarray(tensor.values) if small or square else None
        return self._known.get(tensor.name)

    def numbers(self, tensor: gs.Tensor) -> np.ndarray | None:
        """Return a tensor's value if all of it are numbers."""
        value = self.get(tensor)
        return None if value is None or value.dtype == object else value

    def is_zero(self, tensor: gs.Tensor) -> bool:
        """Return whether all of a tensor is zero, whatever its size."""
        return self._is_zero(tensor, {})

    def _is_zero(self, tensor: gs.Tensor, seen: dict[int, bool]) -> bool:
        if id(tensor) not in seen:
            seen[id(tensor)] = False
            seen[id(tensor)] = self._computes_zero(tensor, seen)
        return seen[id(tensor)]

    def _computes_zero(self, tensor: gs.Tensor, seen: dict[int, bool]) -> bool:
        if tensor.name in self._zeros:
            return True
        value = self.numbers(tensor)
        node = tensor.inputs[0] if tensor.inputs else None
        if value is not None or node is None:
            return value is not None and not value.any()
        if node.op == "ConstantOfShape":
            filling = node.attrs.get("value")
            return filling is None or not np.asarray(filling.values).any()
        if node.op == "Div":  # 0 / 0 is not zero
            return False
        given = [() if t.is_empty() else (t,) for t in node.inputs]
        return any(
            all(self._is_zero(t, seen) for place in group for t in given[place])
            for group in groups(node.op, len(node.inputs))
        )

    def visit(self, node: gs.Node) -> None:
        """Note the outputs of a node, as far as they follow from what is known."""
        if not node.outputs:
            return
        value = self._shape(node) if node.op == "Shape" else self._fold(node)
        if value is not None:
            self._known[node.outputs[0].name] = value

    def _shape(self, node: gs.Node) -> np.ndarray | None:
        sizes = self._sizes(node.inputs[0])
        if sizes is None:
            return None
        return _settled(sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))])

    def _fold(self, node: gs.Node) -> np.ndarray | None:
        if node.op == "Constant":
            return stored_value(node)
        inputs = [None if t.is_empty() else self.get(t) for t in node.inputs]
        # An absent optional input is not a missing one.
        missing = [v is None and not t.is_empty() for v, t in zip(inputs, node.inputs, strict=True)]
        # Of its second input CastLike reads the dtype alone, so the value may be unknown.
        if node.op == "CastLike" and not missing[0] and inputs[0] is not None:
            kind = node.inputs[1].dtype
            known = inputs[0].dtype != object and kind is not None
            return inputs[0].astype(kind) if known else inputs[0]
        if not inputs or any(missing) or len(node.outputs) != 1:
            return None
        if any(v is not None and v.size > LARGEST for v in inputs):
            return None
        if any(v is not None and v.dtype == object for v in inputs):
            # A size among them is an expression: no evaluator takes it.
            return _symbolic(node, inputs) if node.op in SYMBOLIC else None
        if any(isinstance(a, gs.Graph) for a in node.attrs.values()) or "Random" in node.op:
            return None
        return _evaluate(node, inputs)


def stated_sizes(tensor: gs.Tensor) -> list[Size] | None:
    """Return the sizes the graph states for a tensor, if it states all of them."""
    whole = tensor.shape is not None and all(size not in (None, "") for size in tensor.shape)
    return [parse(size) for size in known_shape(tensor)] if whole else None


def _evaluate(node: gs.Node, inputs: list[np.ndarray | None]) -> np.ndarray | None:
    # An operator that the reference does not know, or inputs that it refuses: the value is unknown.
    with contextlib.suppress(Exception), np.errstate(all="ignore"):
        proto = OnnxExporter.export_node(node)
        given = [v for v in inputs if v is not None]
        names = [t.name for t in node.inputs if not t.is_empty()]
        (result,) = ReferenceEvaluator(proto).run(None, dict(zip(names, given, strict=True)))
        return np.asarray(result) if np.size(result) <= LARGEST else None
    return None


def _symbolic(node: gs.Node, inputs: list[Any]) -> np.ndarray | None:
    """Return the result of shape arithmetic, None where it is not followed."""
    with contextlib.suppress(Exception):
        x, rest = inputs[0], inputs[1:]
        if node.op in ("Identity", "Cast", "CastLike"):
            return np.asarray(x)
        if node.op == "Gather":
            return _settled(np.take(x, rest[0].astype(np.int64), axis=node.attrs.get("axis", 0)))
        if node.op == "Concat":
            return _settled(np.concatenate([np.asarray(v, object) for v in inputs]))
        if node.op == "Reshape":
            return np.asarray(x).reshape([int(n) for n in rest[0]])
        if node.op in ("Squeeze", "Unsqueeze"):
            return np.asarray(x).reshape(() if node.op == "Squeeze" else (-1,))
        if node.op == "Slice":
            start, end = int(rest[0][0]), int(rest[1][0])
            return _settled(x[start:end]) if len(rest) < 4 or int(rest[3][0]) == 1 else None
        # What is left are the arithmetic operators, entry by entry.
        sizes = [_as_sizes(v) for v in inputs]
        if node.op == "Neg":
            return _settled(_as_sizes(np.asarray(0)) - sizes[0])
        return _settled(_arithmetic(node.op, *sizes))
    return None


def _as_sizes(value: np.ndarray) -> np.ndarray:
    convert = np.vectorize(lambda v: v if isinstance(v, Size) else _whole(v), otypes=[object])
    return np.asarray(convert(value), object)


def _whole(number: Any) -> Size:
    if number != int(number):
        raise ValueError(f"{number} is not a size")
    return Size(int(number))


def _arithmetic(op: str, a: np.ndarray, b: np.ndarray) -> object:
    match op:
        case "Add":
            return a + b
        case "Sub":
            return a - b
        case "Mul":
            return a * b
        case "Mod":
            return a % b
        case _:
            return a // b


def _settled(value: object) -> np.ndarray:
    """Integers where all sizes are known, else ``Size`` objects."""
    array = np.asarray(value, object)
    flat = [parse(int(v)) if not isinstance(v, Size) else v for v in array.ravel()]
    if all(v.known is not None for v in flat):
        return np.asarray([v.known for v in flat], np.int64).reshape(array.shape)
    result = np.empty(len(flat), object)
    result[:] = flat
    return result.reshape(array.shape)


def numpy_type(node: gs.Node) -> np.dtype[np.generic]:
    """Return the dtype that a Cast node makes."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
