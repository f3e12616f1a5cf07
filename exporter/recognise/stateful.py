"""Recurrences that the algebra of ``find`` does not follow, known by what they compute.

    Scan over tokens or chunks, triangular systems, ...    ->    LinearAttention

A delta rule is no sum of products: its values depend on all earlier keys. It has few inputs,
though, so that every way to give them roles is tried on numbers, and the right one proven.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from linexport.recognise.emit import MatchWriter
from linexport.recognise.evaluate import Evaluator
from linexport.recognise.findings import Findings
from linexport.recognise.region import Root
from linexport.recognise.rewriter import Rewriter
from linexport.recognise.roles_by_values import find_roles
from linexport.recognise.sizes import Size, parse
from linexport.recognise.stateful_region import LOOPS, Region, Regions, is_whole
from linexport.recognise.terms import Leaf


def replace_loops(graph: gs.Graph, withdrawn: Mapping[str, str]) -> Findings:
    """Replace what loops compute, where it is linear attention with a state.

    Args:
        graph: changed in place.
        withdrawn: matches to leave as they are, by the value they compute, with the reason.
    """
    loops = [node for node in graph.nodes if node.op in LOOPS]
    if not loops:
        return Findings()
    rewriter = Rewriter(graph, Evaluator(graph))
    regions = Regions(graph, rewriter.evaluator)
    for loop in loops:
        covered = any(o.name in rewriter.covered for o in loop.outputs)
        if not covered and _is_opaque(rewriter.evaluator, loop):
            for region in regions.around(loop):
                if _is_replaced(rewriter, region, withdrawn):
                    break
    return Findings(tuple(rewriter.matches), (), tuple(rewriter.rejected))


def _is_opaque(evaluator: Evaluator, loop: gs.Node) -> bool:
    """Return whether the algebra makes nothing of what a loop computes."""
    forms = [(o, evaluator.form(o)) for o in loop.outputs if o.outputs]
    leaves = [(o, None if form is None else form.leaf) for o, form in forms]
    return any(leaf is not None and leaf.tensor is o for o, leaf in leaves)


def _is_replaced(rewriter: Rewriter, region: Region, withdrawn: Mapping[str, str]) -> bool:
    """Return whether a region was read; then it is replaced, or among the rejected."""
    nodes = rewriter.region(region.root, [Leaf(t, ()) for t in region.leaves])
    found = find_roles(rewriter.evaluator, region, nodes, rewriter.imports)
    if found is None:
        return False
    roles, form = found
    root = Root(region.root, form, roles, rewriter.region(region.root, roles.leaves))
    reason = withdrawn.get(region.root.name)
    problem = reason or rewriter.fuse(root, MatchWriter(root.tensor, form, roles))
    if problem is None:
        _free_length(rewriter, region)
    else:
        rewriter.reject_match(root, str(problem))
    return True


def _free_length(rewriter: Rewriter, region: Region) -> None:
    """Have nodes behind a region take any number of tokens, where it took whole chunks alone.

        16 * (seq // 16)        becomes        seq

    Both are equal wherever the model could be run before.
    """
    graph, symbol = rewriter.graph, str(region.tokens)
    values, shaped = rewriter.evaluator.values, [*graph.inputs, *graph.outputs]
    for tensor in [o for n in graph.nodes for o in n.outputs]:
        shaped.append(tensor)
        value = values.get(tensor)
        if value is None or value.size != 1 or not isinstance(value.item(), Size):
            continue
        if not tensor.outputs:
            continue
        if value.item() != region.tokens and is_whole(value.item(), symbol):
            length = _length(rewriter, symbol, value.ndim, tensor.name)
            for reader in list(tensor.outputs):
                reader.inputs = [length if t is tensor else t for t in reader.inputs]
    for tensor in shaped:
        if tensor.shape is not None:
            tensor.shape = [symbol if _is_same(size, symbol) else size for size in tensor.shape]


def _is_same(size: int | str, symbol: str) -> bool:
    return isinstance(size, str) and size != symbol and is_whole(parse(size), symbol)


def _length(rewriter: Rewriter, symbol: str, rank: int, name: str) -> gs.Variable:
    """Return the size of a dimension, read from an input, as a number or a vector."""
    graph = rewriter.graph
    given, place = next((t, i) for t in graph.inputs for i, s in enumerate(t.shape) if s == symbol)
    length = gs.Variable(f"{name}/length", np.int64, [1])
    ends = {"start": place, "end": place + 1}
    rewriter.put_first(gs.Node("Shape", f"{name}/Shape", ends, [given], [length]))
    if rank:
        return length
    number = gs.Variable(f"{name}/number", np.int64, [])
    rewriter.put_first(gs.Node("Squeeze", f"{name}/Squeeze", {}, [length], [number]))
    return number
