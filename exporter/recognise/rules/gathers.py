"""GatherND of all positions in their order, x[..., arange(T), :], which is x itself."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.recognise.axes import size_of
from linexport.recognise.evaluate import Evaluator, rule
from linexport.recognise.terms import Form, Iota


@rule("GatherND")
def gather(e: Evaluator, node: gs.Node) -> Form | None:
    """Return the form of the data, where an index counts the whole of its first dim."""
    forms = e.forms(node.inputs)
    if forms is None or node.attrs.get("batch_dims", 0):
        return None
    data, index = forms
    if len(index.dims) != 2 or len(index.terms) != 1 or index.terms[0].coefficient != 1:
        return None
    factors, (counted, entries) = index.terms[0].factors, index.dims
    if entries or factors != (Iota(counted),) or size_of(counted) != size_of(data.dims[0]):
        return None
    return data
