"""Softmax attention of torch -> a product, a mask, a softmax and a product.

    O = softmax(scale Q K^T + M) V      Q (.., H, T, d), K (.., G, S, d), V (.., G, S, d_v), H = r G

There may be no H and G, and any number of axes in front of them. A query that sees no key, as one
whose row of M is minus infinity, has O = 0.

torch's own translation is of four axes. It multiplies keys by the root of the scale, so that keys
which are kept as a state are other ones; it copies them in a layout of its own, and a query that
sees no key gets the mean of the values, or NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnxscript import ir, values
from onnxscript.function_libs.torch_lib.ops import nn as torch_lib
from torch.export import ExportedProgram

OPSET = 20
DISCRETE = (ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32)
HIDDEN = float("-inf")
UNBOUNDED = ("Div", "Log", "LogSoftmax", "Pow", "Reciprocal")
"""Operators that make infinite numbers of finite ones that are not large."""


def translation(program: ExportedProgram) -> Callable[..., object]:
    """Return what writes ``aten.scaled_dot_product_attention`` as nodes of a graph.

    Args:
        program: that is translated; its weights are known while it is.
    """
    finite = _Finite(program)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> object:
        width = query.shape[-1]
        if dropout_p or (scale is None and not isinstance(width, int)):
            return torch_lib.aten_scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        op, (*front, row, channel) = values.Opset("", OPSET), range(len(key.shape))
        if enable_gqa and query.shape[-3] != key.shape[-3]:
            key, value = (_repeated(op, x, query.shape[-3]) for x in (key, value))
        products = op.MatMul(query, op.Transpose(key, perm=[*front, channel, row]))
        scores = op.Mul(products, op.CastLike(width**-0.5 if scale is None else scale, query))
        seen = _earlier(op, query, key) if is_causal else attn_mask
        if seen is None:
            return op.MatMul(op.Softmax(scores, axis=-1), value)
        zero, hides_all = op.CastLike(0.0, query), not is_causal and not finite(seen)
        if is_causal or attn_mask.dtype == ir.DataType.BOOL:
            seen = op.Where(seen, zero, op.CastLike(HIDDEN, query))
        weights = op.Softmax(op.Add(scores, seen), axis=-1)
        if hides_all:
            weights = op.Where(op.IsNaN(weights), zero, weights)
        return op.MatMul(weights, value)

    return attention


class _Finite:
    """Says which masks have no infinite number, so that every query sees a key.

    They are computed of finite weights, as biases of positions are, without a logarithm, a
    quotient or a power. Inputs of a model, and buffers that it writes, may have any number.
    """

    def __init__(self, program: ExportedProgram) -> None:
        written = {*program.graph_signature.buffers_to_mutate.values()}
        self._stored = {
            spec.arg.name: tensor
            for spec in program.graph_signature.input_specs
            if spec.target is not None and spec.target not in written
            for store in (program.state_dict, program.constants)
            if isinstance(tensor := store.get(spec.target), torch.Tensor)
        }
        self._known: dict[str, bool] = {}

    def __call__(self, mask: Any) -> bool:
        if mask.dtype == ir.DataType.BOOL:
            return False
        pending, seen = [mask], set[int]()
        while pending:
            value = pending.pop()
            node = value.producer()
            if id(value) in seen or value.dtype in DISCRETE:
                continue
            seen.add(id(value))
            if node is None:
                if not self._is_finite(value.name):
                    return False
                continue
            infinite = any(map(_may_be_infinite, node.attributes.values()))
            if node.domain or node.op_type in UNBOUNDED or infinite:
                return False
            pending += [given for given in node.inputs if given is not None]
        return True

    def _is_finite(self, name: str) -> bool:
        """Return whether what no node makes is a weight without infinity."""
        stored = self._stored.get(name)
        if stored is not None and name not in self._known:  # layers share masks
            self._known[name] = not bool(stored.isinf().any())
        return self._known.get(name, False)


def _may_be_infinite(attribute: ir.Attr) -> bool:
    """Return whether an attribute has an infinite number, or nodes of its own."""
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return True
    value = attribute.value
    numbers = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return numbers.dtype.kind not in "OSU" and bool(np.isinf(numbers.astype(np.float64)).any())


def _repeated(op: Any, x: Any, heads: int) -> Any:
    """Return keys or values for each head of queries, (.., H, S, d)."""
    *front, groups, length, width = x.shape
    each = op.Unsqueeze(x, [len(front) + 1])
    each = op.Expand(each, [1] * (len(front) + 1) + [heads // groups, 1, 1])
    each.shape = ir.Shape([*front, groups, heads // groups, length, width])
    found = op.Reshape(each, [0] * len(front) + [heads, -1, width])
    # What ONNX infers of -1 is no symbol, and scores would not be those of all pairs of tokens.
    found.shape = ir.Shape([*front, heads, length, width])
    found.type = each.type = x.type
    return found


def _earlier(op: Any, query: Any, key: Any) -> Any:
    """Return whether key s is not behind query t, (T, S)."""
    rows, columns = (
        op.Range(0, op.Squeeze(op.Shape(x, start=-2, end=-1)), 1) for x in (query, key)
    )
    return op.LessOrEqual(columns, op.Unsqueeze(rows, [1]))
