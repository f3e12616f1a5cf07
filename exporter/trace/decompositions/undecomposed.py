"""Programs that are translated as ``torch.export`` traced them, but for the operators to decompose.

torch's exporter traces every program a second time, to decompose what it does not translate: that
was half of the time of a translation. Most programs have a few such operators or none, and each is
decomposed alone here:

    x.unflatten(2, (4, -1))              ->        x.view(x.shape[0], x.shape[1], 4, -1)
    5 - x                                ->        add(-x, 5)
    x[:, 0:]                             ->        x
    y = x + 1; y.div_(z); f(y)           ->        f((x + 1) / z)
    assertions                           ->

A program that writes into a tensor that has views, or that has branches or loops of torch, is
traced a second time.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch.export import ExportedProgram, ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from linexport.system.torch_internals.exports import Decompositions, fake_mode
from linexport.system.torch_internals.operators import (
    Overload,
    arguments,
    functional,
    is_composite,
    makes_values,
    writes,
)
from linexport.system.torch_internals.sizes import (
    Symbol,
    expression,
    no_new_guards,
    other_forms,
    replaced,
)
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
    mode = _mode(program.graph.nodes)
    if mode is None or not all(_is_simple(n, translated, table) for n in program.graph.nodes):
        return None
    graph, signature = copy.deepcopy(program.graph), copy.deepcopy(program.graph_signature)
    for old, new in zip(program.graph.nodes, graph.nodes, strict=True):
        new.name = old.name  # copies of names that Python has, such as input, are called otherwise
    try:
        with mode, no_new_guards(_sizes(graph)):
            equal = _rewrite(graph, signature, translated, table)
            _write_sizes(graph, equal)
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
) -> dict[Symbol, Symbol | int]:
    """Leave out what torch's exporter leaves out, and decompose what it does not translate.

    Returns:
        Sizes that decomposing finds in another form, as 4 for T // (T // 4), by the traced ones.
    """
    equal = dict[Symbol, Symbol | int]()
    for node in graph.nodes:
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif _is_idle(node) or node.target in COPIES:
            _replace(node, node.args[0], signature)
            graph.erase_node(node)
        elif _writes(node):
            _write_nowhere(graph, node, signature, table)
        elif _is_decomposed(node, translated, table):
            made = _decomposed(graph, node, table)
            equal |= _equal_sizes(node.meta["val"], made)
            _replace(node, made, signature)
    return equal


def _write_nowhere(
    graph: Graph, node: Node, signature: ExportGraphSignature, table: Decompositions
) -> None:
    """Compute what a node writes into a value, and let what comes later read this instead.

    Raises:
        TypeError: the value is in the memory of others too, or has another dtype than what is
            computed.
    """
    value = node.args[0]
    if not isinstance(value, Node) or not _is_alone(value, node):
        raise TypeError(f"{node.target} writes into what is not a value of its own")
    made = _decomposed(graph, node, table, functional(node.target))
    if made.meta["val"].dtype != value.meta["val"].dtype:
        raise TypeError(f"{node.target} casts what it writes to {value.meta['val'].dtype}")
    value.replace_all_uses_with(made, delete_user_cb=lambda user: user > node)
    _replace(node, made, signature)
    graph.erase_node(node)


def _equal_sizes(old: TorchInternal, made: TorchInternal) -> dict[Symbol, Symbol | int]:
    """Return the sizes of a value in the forms that another trace of it has, by those it had."""
    if not isinstance(made, Node):
        pairs = zip(old, made, strict=True)
        return {key: size for pair in pairs for key, size in _equal_sizes(*pair).items()}
    if not isinstance(old, torch.Tensor):
        return {}
    return other_forms(old.shape, made.meta["val"].shape)


def _write_sizes(graph: Graph, equal: Mapping[Symbol, Symbol | int]) -> None:
    """Write the sizes of all values in the forms that are known of them."""
    for node in graph.nodes if equal else ():
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        old, stride = list(value.shape), list(value.stride())
        shape = [replaced(size, equal) for size in old]
        if any(new is not size for new, size in zip(shape, old, strict=True)):
            node.meta["val"] = value.new_empty_strided(
                shape, [replaced(size, equal) for size in stride]
            )


def _sizes(graph: Graph) -> Iterator[torch.SymInt]:
    """Yield the symbolic sizes of the values of a graph."""
    for node in graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        yield from (size for size in sizes if isinstance(size, torch.SymInt))


def _share_sizes(graph: Graph) -> None:
    """Let one node give the size of all dims that have the same symbol."""
    known = dict[object, Node]()
    for node in graph.nodes:
        size = node.meta.get("val")
        if node.target is aten.sym_size.int and isinstance(size, torch.SymInt):
            first = known.setdefault(expression(size), node)
            if first is not node and not _is_given(node):
                node.replace_all_uses_with(first)


def _mode(nodes: Iterable[Node]) -> TorchInternal:
    """Return the context in which torch computes shapes alone; None where nodes have several.

    Nodes of two traces have other symbols, and complex operators are to be decomposed.
    """
    values = [node.meta.get("val") for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    modes = {id(mode): mode for mode in map(fake_mode, tensors)}
    if len(modes) != 1 or any(value.is_complex() for value in tensors):
        return None
    return next(iter(modes.values()))


def _is_given(node: Node) -> bool:
    """Return whether a node is an output of the program, whose signature has its name."""
    return any(user.op == "output" for user in node.users)


def _is_simple(node: Node, translated: Collection[TorchInternal], table: Decompositions) -> bool:
    """Return whether a node is translated, left out, or decomposed alone."""
    if _writes(node) and node.target not in COPIES:
        return functional(node.target) is not None
    if _is_decomposed(node, translated, table):
        return True
    return node.target in ASSERTIONS or _is_translated(node, translated)


def _is_translated(node: Node, translated: Collection[TorchInternal]) -> bool:
    """Return whether a node is translated, or has no result that is computed."""
    if node.op != "call_function":
        return node.op != "get_attr"
    if node.target in COPIES or node.target is operator.getitem:
        return True
    return node.target in translated


def _is_decomposed(
    node: Node, translated: Collection[TorchInternal], table: Decompositions
) -> bool:
    """Return whether other operators take the place of a node.

    torch decomposes composite operators that give views, translated or not.
    """
    target = node.target
    if not isinstance(target, Overload) or target in (*ASSERTIONS, *COPIES):
        return False
    if target in translated:
        return is_composite(target) and not makes_values(target)
    return target in table or is_composite(target)


def _writes(node: Node) -> bool:
    return isinstance(node.target, Overload) and writes(node.target)


def _is_alone(value: Node, until: Node) -> bool:
    """Return whether a value was computed, and no node before another one is a view of it."""
    source = value.args[0] if value.target is operator.getitem else value
    return _computes(source) and all(_computes(user) for user in value.users if user < until)


def _computes(node: object) -> bool:
    """Return whether a node computes a value, which has no memory in common with others."""
    target = node.target if isinstance(node, Node) else None
    if not isinstance(target, Overload) or is_composite(target):
        return False
    return makes_values(target) and not writes(target)


def _is_idle(node: Node) -> bool:
    """Return whether a node gives what it takes: a slice of everything, dropout in no training."""
    if node.target is aten.dropout.default:
        return not arguments(node.target, node.args, node.kwargs)["train"]
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


def _decomposed(
    graph: Graph, node: Node, table: Decompositions, operator: Overload | None = None
) -> TorchInternal:
    """Write the operators that compute a node in front of it; returns what they give.

    Args:
        graph: to write into.
        node: any.
        table: decompositions.
        operator: that is computed of the node's arguments in place of its own.
    """
    target = operator or node.target
    assert isinstance(target, Overload)
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
