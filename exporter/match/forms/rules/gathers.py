"""GatherND by positions, x[arange(T)], which is x itself, or by their differences."""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from linexport.match.forms.axes import size_of
from linexport.match.forms.evaluate import Evaluator, rule
from linexport.match.forms.rules.kernels import at_distance
from linexport.match.forms.rules.oscillations import kernel_form
from linexport.match.forms.terms import Form, Iota


@rule("GatherND")
def gather(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form of the data, where an index counts the whole of its first dim.

    Of a kernel of positions also K[max(t - s, 0)].
    """
    forms = e.forms(node.inputs)
    if forms is None or node.attrs.get("batch_dims", 0):
        return None
    data, index = forms
    if len(index.dims) == 3 and not index.dims[2]:
        kernel = kernel_form(e, node.inputs[0], data)
        matrix = at_distance(_last(kernel), replace(index, dims=index.dims[:2]))
        return matrix and replace(matrix, dims=(*matrix.dims[-2:], *matrix.dims[:-2]))
    if len(index.dims) != 2 or len(index.terms) != 1 or index.terms[0].coefficient != 1:
        return None
    factors, (counted, entries) = index.terms[0].factors, index.dims
    if entries or factors != (Iota(counted),) or size_of(counted) != size_of(data.dims[0]):
        return None
    return data


def _last(form: Form) -> Form:
    """Return a form with its first dim last."""
    return replace(form, dims=(*form.dims[1:], form.dims[0]))
