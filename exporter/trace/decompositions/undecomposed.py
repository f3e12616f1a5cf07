"""Programs that are translated as ``torch.export`` traced them, but for the operators to decompose.

torch's exporter traces every program a second time, to decompose what it does not translate: that
was half of the time of a translation. Most programs have a few such operators or none, and each is
decomposed alone here:

    x.unflatten(2, (4, -1))              ->        x.view(x.shape[0], x.shape[1], 4, -1)
    5 - x                                ->        add(-x, 5)
    x[:, 0:]                             ->        x
    assertions                           ->

A program that writes into a tensor, or has branches or loops of torch, is traced a second time.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Collection

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from linexport.system.torch_internals.exports import Decompositions
from linexport.system.torch_internals.operators import (
    Overload,
    arguments,
    is_composite,
    makes_values,
    writes,
)
from linexport.system.torch_internals.sizes import expression
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import TorchInternal

log = logging.getLogger(__name__)

aten = torch.ops.aten

ASSERTIONS = {
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
}
"""Operators that check what was found while the program was traced; they compute nothing."""

COPIES = {aten.detach_.default}
"""Operators whose result is their input, where no gradient is taken."""

NO_END = 2**63 - 1
"""The end of a slice that has none."""


def undecomposed(
    program: ExportedProgram, translated: Collection[TorchInternal], table: Decompositions
) -> ExportedProgram | None:
    """Return a copy of a program whose operators are translated each; None where that takes more.

    Args:
        program: any; it is not changed.
        translated: operators that the exporter translates.
        table: decompositions of others.
    """
    if not all(_is_simple(node, translated, table) for node in program.graph.nodes):
        return None
    graph, signature = copy.deepcopy(program.graph), copy.deepcopy(program.graph_signature)
    for old, new in zip(program.graph.nodes, graph.nodes, strict=True):
        new.name = old.name  # copies of names that Python has, such as input, are called otherwise
    try:
        _rewrite(graph, signature, translated, table)
    except Exception as error:  # torch raises anything; its own way may still be one
        log.info("an operator is not decomposed alone: %s", error)
        return None
    _share_sizes(graph)
    graph.eliminate_dead_code()
    # Some decompositions write into a tensor of their own, as that of rms_norm, or ask for sizes.
    if not all(_is_translated(node, translated) for node in graph.nodes):
        return None
    module = GraphModule(program.graph_module, graph)
    module.meta.update(program.graph_module.meta)
    return ExportedProgram(
        root=module,
        graph=graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=copy.copy(program.range_constraints),
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _rewrite(
    graph: Graph,
    signature: ExportGraphSignature,
    translated: Collection[TorchInternal],
    table: Decompositions,
) -> None:
    """Leave out what torch's exporter leaves out, and decompose what it does not translate."""
    for node in graph.nodes:
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif _is_whole(node):
            _replace(node, node.args[0], signature)
        elif node.target in COPIES:
            _replace(node, node.args[0], signature)
            graph.erase_node(node)
        elif _is_decomposed(node, translated, table):
            _replace(node, _decomposed(graph, node, table), signature)


def _share_sizes(graph: Graph) -> None:
    """Let one node give the size of all dims that have the same symbol."""
    known = dict[object, Node]()
    for node in graph.nodes:
        size = node.meta.get("val")
        if node.target is aten.sym_size.int and isinstance(size, torch.SymInt):
            first = known.setdefault(expression(size), node)
            if first is not node and not _is_given(node):
                node.replace_all_uses_with(first)


def _is_given(node: Node) -> bool:
    """Return whether a node is an output of the program, whose signature has its name."""
    return any(user.op == "output" for user in node.users)


def _is_simple(node: Node, translated: Collection[TorchInternal], table: Decompositions) -> bool:
    """Return whether a node is translated, left out, or decomposed alone."""
    if _is_decomposed(node, translated, table):
        return not _writes(node)
    return node.target in ASSERTIONS or _is_translated(node, translated)


def _is_translated(node: Node, translated: Collection[TorchInternal]) -> bool:
    """Return whether a node is translated, or has no result that is computed."""
    if node.op != "call_function":
        return node.op != "get_attr"
    if node.target in COPIES or node.target is operator.getitem:
        return True
    return node.target in translated and not _writes(node)


def _is_decomposed(
    node: Node, translated: Collection[TorchInternal], table: Decompositions
) -> bool:
    """Return whether other operators take the place of a node.

    torch takes composite operators apart that give views, translated or not.
    """
    target = node.target
    if not isinstance(target, Overload) or target in (*ASSERTIONS, *COPIES):
        return False
    if target in translated:
        return is_composite(target) and not makes_values(target)
    return target in table or is_composite(target)


def _writes(node: Node) -> bool:
    return isinstance(node.target, Overload) and writes(node.target)


def _is_whole(node: Node) -> bool:
    """Return whether a node is a slice of everything."""
    if node.target is not aten.slice.Tensor:
        return False
    given = arguments(node.target, node.args, node.kwargs)
    begins = given["start"] is None or given["start"] == 0
    return begins and given["step"] == 1 and given["end"] in (None, NO_END)


def _replace(node: Node, made: TorchInternal, signature: ExportGraphSignature) -> None:
    """Let what reads a node read what was made in its place."""
    if isinstance(made, Node):
        node.replace_all_uses_with(made)
        signature.replace_all_uses(node.name, made.name)
    else:
        for user in list(node.users):
            _replace(user, made[user.args[1]], signature)


def _decomposed(graph: Graph, node: Node, table: Decompositions) -> TorchInternal:
    """Write the operators that compute a node in front of it; returns what they give."""
    assert isinstance(node.target, Overload)
    target = node.target
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Node)]

    def compute(*values: object) -> object:
        given = iter(values)
        filled = [next(given) if isinstance(leaf, Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, structure)
        return target(*args, **kwargs)

    traced = make_fx(compute, decomposition_table=dict(table))(*(x.meta["val"] for x in inputs))
    places = [n for n in traced.graph.nodes if n.op == "placeholder"]
    known = dict(zip(places, inputs, strict=True))
    own = {key: value for key, value in node.meta.items() if key != "val"}
    with graph.inserting_before(node):
        made = graph.graph_copy(traced.graph, known)
    for found in set(known.values()).difference(inputs):
        found.meta = {**own, **found.meta}
    return made
