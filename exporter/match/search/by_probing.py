"""Recurrences that the algebra of ``find`` does not follow, known by what they compute.

    Scan over tokens or chunks, triangular systems, ...    ->    LinearAttention
    Scan over tokens with another correction of its state  ->    GeneralizedDeltaRule

A delta rule is not a sum of products: its values depend on all earlier keys. It has few inputs, so
every assignment of roles to them is tried on random values, and the one that fits is proven.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_graphsurgeon as gs

from linexport.graph.findings import Findings
from linexport.graph.operators import LOOPS
from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.transition import TransitionWriter
from linexport.match.errors import NotAttentionError
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Leaf
from linexport.match.roles.bonus_term import split_bonus
from linexport.match.roles.read import read_roles
from linexport.match.roles.subgraph import Root
from linexport.match.roles.transition import read_transition
from linexport.match.search.probe_roles import find_roles
from linexport.match.search.rewriter import Rewriter
from linexport.match.search.stateful_region import Region, Regions


def replace_loops(
    graph: gs.Graph, withdrawn: Mapping[str, str], initial: Collection[str] = ()
) -> Findings:
    """Replace what loops compute, where it is linear attention with a state.

    Args:
        graph: changed in place.
        withdrawn: matches to leave as they are, by the value they compute, with the reason.
        initial: given states before the first token, see ``initial_states``.
    """
    loops = [node for node in graph.nodes if node.op in LOOPS]
    if not loops:
        return Findings()
    rewriter = Rewriter(graph, Evaluator(graph, initial=initial))
    regions = Regions(graph, rewriter.evaluator)
    for loop in loops:
        covered = any(o.name in rewriter.covered for o in loop.outputs)
        read = any(_is_read(rewriter.evaluator, t) for t in regions.passed(loop))
        if not covered and not read:
            around = regions.around(loop)
            if not any(_is_replaced(rewriter, region, withdrawn) for region in around):
                _replace_transition(rewriter, loop, withdrawn)
    rewriter.free_lengths()
    return Findings(tuple(rewriter.matches), (), tuple(rewriter.rejected))


def _is_read(evaluator: Evaluator, tensor: gs.Tensor) -> bool:
    """Return whether the algebra reads what a value is, so that ``find`` replaces it."""
    form = evaluator.form(tensor)
    if form is None:
        return False
    try:
        return read_roles(split_bonus(form)[0], evaluator.is_weight) is not None
    except NotAttentionError:
        return False


def _is_replaced(rewriter: Rewriter, region: Region, withdrawn: Mapping[str, str]) -> bool:
    """Return whether a region was read; then it is replaced, or among the rejected."""
    nodes = rewriter.region(region.root, [Leaf(t, ()) for t in region.leaves])
    found = find_roles(rewriter.evaluator, region, nodes, rewriter.imports)
    if found is None:
        return False
    roles, form = found
    _replace(rewriter, MatchWriter(region.root, form, roles), withdrawn)
    return True


def _replace_transition(rewriter: Rewriter, loop: gs.Node, withdrawn: Mapping[str, str]) -> None:
    """Replace a loop over tokens whose state is corrected, where it is one."""
    found = read_transition(rewriter.evaluator, loop)
    if found is not None:
        roles, form = found
        _replace(rewriter, TransitionWriter(loop.outputs[1], form, roles), withdrawn)


def _replace(rewriter: Rewriter, writer: MatchWriter, withdrawn: Mapping[str, str]) -> None:
    """Put the fused node in place, or note why it is not."""
    region = rewriter.region(writer.root, writer.roles.leaves)
    root = Root(writer.root, writer.form, writer.roles, region)
    problem: str | Exception | None = withdrawn.get(root.tensor.name)
    if problem is None:
        problem = rewriter.fuse(root, writer)
    if problem is not None:
        rewriter.reject_match(root, str(problem))
