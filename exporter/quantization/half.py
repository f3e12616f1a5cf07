"""Weights stored in half precision and computed with in float32.

    W  ->  Cast(half)          Gather(W, index)  ->  Cast(Gather(half, index))

ONNX Runtime computes the Cast when it opens the model: no CPU kernel multiplies in half precision,
and a Cast in every call takes longer than the product. So files and downloads halve, and time and
memory are those of float32; only a table remains in half precision in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from linexport.errors import UnsupportedModelError
from linexport.graph import external_data
from linexport.quantization.quantisable import Weight

HALF = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
"""Types by the name users choose them by."""


@dataclass(frozen=True)
class HalfModel:
    """A model with external weights in half precision.

    Attributes:
        graph: the model.
        values: of the weights in half precision, by initializer.
    """

    graph: onnx.ModelProto
    values: dict[str, NDArray]


def half_model(
    model: onnx.ModelProto, values: Mapping[str, NDArray], weights: Sequence[Weight], name: str
) -> HalfModel:
    """Return a copy of the model that reads these weights in half precision.

    Args:
        model: not changed; values of its initializers may be external.
        values: of the weights, by initializer.
        weights: those to store so.
        name: of the type, one of ``HALF``.

    Raises:
        UnsupportedModelError: a weight is too large for the type.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    stored = {f"{w.name}/{name}": _rounded(w.name, values[w.name], name) for w in weights}
    casts: list[onnx.NodeProto] = []
    for weight in weights:
        half, turned = f"{weight.name}/{name}", weight.uses[0].rows_are_inputs
        for use in {u.weight: u for u in weight.uses if not u.is_lookup}.values():
            casts += _cast(half, use.weight, use.rows_are_inputs != turned)
    tables = {w.name for w in weights}
    nodes = [n for node in model.graph.node for n in _looked_up(node, tables, name)]
    gone = {use.weight for w in weights for use in w.uses}
    _replace(result.graph.node, [*casts, *nodes])
    external = [external_data.external_initializer(n, v) for n, v in stored.items()]
    left = [t for t in model.graph.initializer if t.name not in gone]
    _replace(result.graph.initializer, [*left, *external])
    return HalfModel(result, stored)


def _rounded(weight: str, values: NDArray, name: str) -> NDArray:
    with np.errstate(over="ignore"):
        half = values.astype(HALF[name])
    if not np.isfinite(half).all():
        raise UnsupportedModelError(
            f"The weight {weight} has values up to {np.abs(values).max():.3g}; {name} ends at "
            f"{float(ml_dtypes.finfo(HALF[name]).max):.3g}. Use --weights bf16, whose range is "
            "that of float32."
        )
    return half


def _cast(half: str, weight: str, transposed: bool) -> list[onnx.NodeProto]:
    """Nodes that give a float32 weight from its half precision."""
    if not transposed:
        return [helper.make_node("Cast", [half], [weight], to=TensorProto.FLOAT)]
    wide = f"{weight}/float32"
    return [
        helper.make_node("Cast", [half], [wide], to=TensorProto.FLOAT),
        helper.make_node("Transpose", [wide], [weight], perm=[1, 0]),
    ]


def _looked_up(node: onnx.NodeProto, tables: set[str], name: str) -> Iterable[onnx.NodeProto]:
    """Return a lookup in half precision and its Cast; any other node as it is."""
    if node.op_type != "Gather" or node.input[0] not in tables:
        return [node]
    rows = onnx.NodeProto()
    rows.CopyFrom(node)
    table, output = node.input[0], node.output[0]
    rows.input[0], rows.output[0] = f"{table}/{name}", f"{output}/{name}"
    return [rows, helper.make_node("Cast", [rows.output[0]], [output], to=TensorProto.FLOAT)]


def _replace(field: Iterable, items: Iterable) -> None:
    kept = list(items)
    del field[:]  # type: ignore[attr-defined]
    field.extend(kept)  # type: ignore[attr-defined]
