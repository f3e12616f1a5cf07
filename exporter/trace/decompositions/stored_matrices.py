"""Matrices that follow from weights alone, by operators that ONNX does not have -> weights.

    torch.linalg.matrix_exp(A)        torch.linalg.inv(1 - dt A / 2)        torch.linalg.qr(W).Q

Orthogonal parametrizations, Cayley transforms and discretised state spaces compute such matrices
in each call, always the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.export import ExportedProgram, ExportGraphSignature
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from linexport.system.torch_internals.operators import Overload, short_name, writes
from linexport.system.torch_internals.trees import pytree
from linexport.trace.decompositions.triangular_inverse import UNMARKED

log = logging.getLogger(__name__)

TRANSLATED = ("linalg_vector_norm", "linalg_cross")
"""Operators of linear algebra that ONNX can express."""

OTHERS = {
    *("cholesky", "cholesky_inverse", "det", "geqrf", "inverse", "logdet", "lu_unpack"),
    *("matrix_exp", "orgqr", "ormqr", "pinverse", "qr", "slogdet", "svd"),
}
"""Operators without linalg in their name that it cannot."""

MADE = ("arange", "eye", "full", "ones", "scalar_tensor", "zeros")
"""Operators that make a tensor of numbers."""


def store(program: ExportedProgram) -> ExportedProgram:
    """Return a program that reads such matrices as weights; itself where it has none.

    Args:
        program: as it is traced; is not changed where nothing is found.
    """
    if not any(map(_is_linear_algebra, program.graph.nodes)):
        return program
    weights = _Weights(program)
    results: list[tuple[Node, Tensor, InputSpec]] = []
    for node in program.graph.nodes:
        value, root = weights.of(node), weights.root(node)
        if isinstance(value, Tensor) and root is not None and _follows(node):
            results.append((node, value, root))
    if not results:
        return program
    states, specs = dict(program.state_dict), list(program.graph_signature.input_specs)
    for node, value, root in results:
        _replace(program, node, value, root, states, specs)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    log.info("%d matrices that follow from weights alone are stored", len(results))
    return ExportedProgram(
        program.graph_module,
        program.graph,
        ExportGraphSignature(specs, program.graph_signature.output_specs),
        states,
        program.range_constraints,
        program.module_call_graph,
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )


def _is_linear_algebra(node: Node) -> bool:
    if node.target is UNMARKED:
        return True
    if not isinstance(node.target, Overload) or node.target.namespace != "aten":
        return False
    name = short_name(node.target)
    return name in OTHERS or (name.lstrip("_").startswith("linalg_") and name not in TRANSLATED)


def _follows(node: Node) -> bool:
    """Return whether a node is such an operator, or one of the results of one that has several."""
    several = isinstance(node.meta.get("val"), list | tuple)
    made_by = node.all_input_nodes[0] if node.all_input_nodes else node
    is_part = short_name(node.target) == "getitem" and _is_linear_algebra(made_by)
    return (_is_linear_algebra(node) and not several) or is_part


def _replace(
    program: ExportedProgram,
    node: Node,
    value: Tensor,
    source: InputSpec,
    states: dict[str, Tensor],
    specs: list[InputSpec],
) -> None:
    """Let a placeholder take the place of a node, behind that of a weight it follows from.

    Args:
        program: whose graph is changed.
        node: of it.
        value: of the node.
        source: the weight.
        states: gets the value.
        specs: get the placeholder.
    """
    graph = program.graph
    before = next(n for n in graph.nodes if n.op == "placeholder" and n.name == source.arg.name)
    with graph.inserting_after(before):
        made = graph.placeholder(f"{source.arg.name}_{node.name}")
    made.meta = dict(node.meta)
    target = f"{source.target}.{node.name}"  # a name that no tensor of a module has
    is_parameter = source.kind == InputKind.PARAMETER
    stored = value.detach().contiguous()
    states[target] = torch.nn.Parameter(stored, False) if is_parameter else stored
    place = next(i for i, spec in enumerate(specs) if spec.arg.name == source.arg.name)
    specs.insert(place + 1, replace(source, arg=TensorArgument(made.name), target=target))
    node.replace_all_uses_with(made)


class _Weights:
    """Values of nodes that follow from weights alone."""

    def __init__(self, program: ExportedProgram) -> None:
        signature, self._stored = program.graph_signature, program.state_dict
        constants = {spec.target: spec for spec in signature.input_specs}
        self._constants = {t: x for t, x in program.constants.items() if isinstance(x, Tensor)}
        written = set(signature.buffers_to_mutate.values())
        self._specs: Mapping[str, InputSpec] = {
            spec.arg.name: spec
            for target, spec in constants.items()
            if target not in written and (target in self._stored or target in self._constants)
        }
        self._known: dict[Node, object] = {}
        self._roots: dict[Node, InputSpec] = {}

    def of(self, node: Node) -> object:
        """Return the value of a node whose inputs were looked at before; None where it varies."""
        if node.op == "placeholder":
            found: object = self._weight(node)
        else:
            found = self._computed(node)
        if found is not None:
            self._known[node] = found
        return found

    def root(self, node: Node) -> InputSpec | None:
        """Return a parameter or a buffer that a node follows from; None where there is none."""
        return self._roots.get(node)

    def _weight(self, node: Node) -> Tensor | None:
        spec = self._specs.get(node.name)
        if spec is None or spec.target is None:
            return None
        if spec.target in self._constants:
            return self._constants[spec.target]
        self._roots[node] = spec
        return self._stored[spec.target]

    def _computed(self, node: Node) -> object:
        inputs = node.all_input_nodes
        if isinstance(node.target, str) or any(n not in self._known for n in inputs):
            return None
        if not inputs and short_name(node.target) not in MADE:
            return None
        if isinstance(node.target, Overload) and writes(node.target):
            for given in inputs:
                self._known.pop(given)
            return None
        roots = [self._roots[n] for n in inputs if n in self._roots]
        if roots:
            self._roots[node] = roots[0]
        args, kwargs = pytree.tree_map(
            lambda x: self._known[x] if isinstance(x, Node) else x, (node.args, node.kwargs)
        )
        with torch.no_grad():
            return node.target(*args, **kwargs)
