"""Operators that make something of nothing: ranges and constant fillings."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.match.forms import algebra
from linexport.match.forms.axes import fresh
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.terms import Form, Iota, Term


@rule("Range")
def range_(e: Evaluator, node: gs.Node) -> Form | None:
    """Positions 0, 1, ..., n - 1."""
    start, limit, step = (e.values.get(t) for t in node.inputs)
    if start is None or limit is None or step is None:
        return None
    if start.dtype == object or start.item() != 0 or step.item() != 1:
        return None
    count = limit.item()
    index = fresh(count if isinstance(count, Size) else Size(int(count)))
    return Form((index,), (Term(1.0, (Iota(index),)),)) if index else None


@rule("ConstantOfShape")
def constant_of_shape(e: Evaluator, node: gs.Node) -> Form | None:
    """One number everywhere."""
    shape = e.values.get(node.inputs[0])
    if shape is None:
        return None
    value = node.attrs.get("value")
    number = float(np.asarray(value.values).item()) if value is not None else 0.0
    sizes = [n if isinstance(n, Size) else Size(int(n)) for n in shape]
    return algebra.constant(number, tuple(fresh(s) for s in sizes))
