"""A model without functions: each body in the place of its node, with the shapes of all values.

    node of a model-local function  ->  the nodes of its body

Some runtimes have no rule for functions, and some need a shape for every value.
"""

from __future__ import annotations

import onnx
from onnx import inliner, shape_inference

from linexport.graph.walk import all_nodes, rename_values


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its functions inlined and its shapes inferred.

    Args:
        model: any; large weights may be external.
    """
    flat = inliner.inline_local_functions(model)
    _drop_identities(flat)
    _name_nodes(flat)
    used = {node.domain for node in all_nodes(flat)}
    kept = [o for o in flat.opset_import if o.domain in ("", "ai.onnx") or o.domain in used]
    del flat.opset_import[:]
    flat.opset_import.extend(kept)
    return shape_inference.infer_shapes(flat, data_prop=True)


def _drop_identities(model: onnx.ModelProto) -> None:
    """Give values that only pass through an Identity the name of what it returns, in place.

    Runtimes name an output after the value behind it: there is one value, with the right name.
    """
    graph = model.graph
    fixed = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    outputs = {o.name for o in graph.output}
    produced = {name for node in graph.node for name in node.output}
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.node:
        source = node.input[0] if node.op_type == "Identity" and not node.domain else ""
        free = source in produced and not {source, renamed.get(source, source)} & (fixed | outputs)
        if free and node.output[0] in outputs and source not in renamed:
            renamed[source] = node.output[0]
        else:
            kept.append(node)
    if not renamed:
        return
    del graph.node[:]
    graph.node.extend(kept)
    rename_values(graph, renamed)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Give every node a name of its own: those of a body repeat from node to node, or are empty."""
    taken: set[str] = set()
    for node in model.graph.node:
        stem = node.name or node.op_type
        name, count = stem, 1
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        node.name = name
        taken.add(name)
