"""Elementwise nodes of a graph, norms among them, as one node of the CPU library for each group.

    nodes between two products  ->  linexport.cpu.Tokenwise<program = "...">

Most nodes of a decode step compute next to nothing, and ONNX Runtime takes microseconds for each.
What they make of a token depends on nothing but that token, so the library runs a whole group as
one program, token by token, in the first caches of a processor. The node's function is the nodes
themselves: without the library ONNX Runtime has the graph that it had.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.graph.dims import StaticShape
from linexport.plugins.cpu.library import FUSED_DOMAIN
from linexport.plugins.ops.op import name_overload
from linexport.targets.cpu_fusion.cached_attention import with_cached_attention
from linexport.targets.cpu_fusion.convolutions import (
    find_convolutions,
    fused_convolution,
    take_factors,
)
from linexport.targets.cpu_fusion.exponentials import find_exponentials, fused_exponentials
from linexport.targets.cpu_fusion.groups import (
    Group,
    add_functions,
    drop_unused,
    find_groups,
    ordered,
    readers_of,
)
from linexport.targets.cpu_fusion.layouts import with_tokens_first
from linexport.targets.cpu_fusion.nodes import MEANS, VIEWS, own_axes, write
from linexport.targets.cpu_fusion.parts import take_parts
from linexport.targets.cpu_fusion.program import Program, TensorView, UnfitError
from linexport.targets.cpu_fusion.sizes import with_constant_sizes
from linexport.targets.cpu_fusion.values import LEAD, TokenValues, read_values

log = logging.getLogger(__name__)

DOMAIN, OP = FUSED_DOMAIN, "Tokenwise"

Replacement = tuple[Group, onnx.NodeProto, onnx.FunctionProto]
"""Positions of nodes, the node in their place, and its function."""

MAX_TENSORS = 24
"""Inputs that the library's operator has, and outputs."""


def with_programs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with a program in the place of every group of nodes that has one."""
    model = with_tokens_first(with_constant_sizes(model))
    model = with_cached_attention(model, DOMAIN)
    values = read_values(model)
    readers = readers_of(model.graph)
    functions: dict[tuple[str, str], onnx.FunctionProto] = {}
    replaced: dict[int, onnx.NodeProto] = {}
    gone: set[int] = set()
    programs, convolutions = _programs_and_convolutions(model, values, readers)
    for places, node, function in (*programs, *convolutions):
        functions[node.op_type, function.overload] = function
        replaced[places[-1]] = node
        gone |= set(places)
    for four in find_exponentials(model, readers):
        own = [model.graph.node[index] for index in four]
        node, function = fused_exponentials(own, DOMAIN, model.functions)
        functions[node.op_type, function.overload] = function
        replaced[four[-1]] = node
        gone |= set(four)
    if not replaced:
        return model
    log.info(
        "%d nodes are %d programs of the CPU library, %d convolutions and %d attentions",
        len(gone),
        len(programs),
        len(convolutions),
        len(replaced) - len(programs) - len(convolutions),
    )
    made = onnx.ModelProto()
    made.CopyFrom(model)
    kept = enumerate(model.graph.node)
    nodes = [
        replaced.get(index, node) for index, node in kept if index not in gone or index in replaced
    ]
    try:
        in_order = ordered(nodes)
    except UnfitError as error:  # what is there is not ours: the runtime judges it
        log.debug("no programs: %s", error)
        return model
    del made.graph.node[:]
    made.graph.node.extend(in_order)
    drop_unused(made.graph)
    add_functions(made, functions.values(), DOMAIN)
    return made


def _programs_and_convolutions(
    model: onnx.ModelProto, values: TokenValues, readers: Mapping[str, Sequence[int]]
) -> tuple[list[Replacement], list[Replacement]]:
    """Return what is in the place of groups of nodes that have a program, and of convolutions."""
    groups, places = find_groups(model.graph, values), find_convolutions(model, readers)
    places, groups = take_factors(model.graph, places, groups, values, readers)
    while True:
        programs: list[Replacement] = []
        unfit: list[Group] = []
        members, turned = take_parts(model.graph, groups, places, values)
        for one in members:
            try:
                programs.append((one.own, *_fused(model, one.whole, values, one.outputs)))
            except UnfitError as error:
                name = model.graph.node[one.own[-1]].name
                log.debug("%s and those with it are no program: %s", name, error)
                unfit.append(one.own)
        if not unfit:
            break
        # Others may have counted on these to read parts where they lie.
        groups = [group for group in groups if not any(own[0] in group for own in unfit)]
    convolutions: list[Replacement] = []
    for one in turned:
        nodes = [model.graph.node[index] for index in one.whole]
        convolutions.append((one.own, *fused_convolution(nodes, DOMAIN, model.functions, values)))
    return programs, convolutions


def _fused(
    model: onnx.ModelProto, group: Group, values: TokenValues, outputs: Sequence[str]
) -> tuple[onnx.NodeProto, onnx.FunctionProto]:
    """Return the node of a group, and its function.

    Raises:
        UnfitError: the library has no form for it.
    """
    nodes = [model.graph.node[index] for index in group]
    inputs, program = _program(nodes, values, outputs)
    if max(len(inputs), len(outputs)) > MAX_TENSORS or not any(
        name in values.tokens for name in inputs
    ):
        raise UnfitError("too many inputs or outputs")
    opset = next(o for o in model.opset_import if not o.domain)
    function = _function(nodes, values, inputs, outputs, opset)
    node = helper.make_node(
        OP,
        inputs,
        outputs,
        f"{nodes[-1].name or outputs[-1]}/tokenwise",
        domain=DOMAIN,
        overload=function.overload,
        program=program.text(),
    )
    return node, function


def _program(
    nodes: Sequence[onnx.NodeProto], values: TokenValues, outputs: Sequence[str]
) -> tuple[list[str], Program]:
    """Return the inputs of a group, and its program."""
    program, places = Program(), dict[str, TensorView]()
    inputs: list[str] = []
    results = {name: program.output(values.tokens[name].shape) for name in outputs}
    for node in reversed(nodes):  # what is only viewed in another shape is computed where it goes
        if node.op_type in VIEWS and node.output[0] in results:
            shape = values.tokens[node.input[0]].shape
            results.setdefault(node.input[0], results[node.output[0]].reshaped(shape))

    def read(name: str, rank: int) -> TensorView:
        if name in values.numbers:
            return program.constant(values.numbers[name][0])
        if name not in places:
            shared = name in values.weights
            shape = values.weights[name] if shared else values.tokens[name].shape
            places[name] = program.input(shape, shared)
            inputs.append(name)
        if name in values.weights:
            return places[name].reshaped(own_axes(name, values, rank) or ())
        return places[name]

    def target(name: str, shape: StaticShape) -> TensorView:
        return results[name] if name in results else program.room(shape)

    for node in nodes:
        found = write(node, values, program, read, target)
        for name, place in zip(node.output, found, strict=True):
            places[name] = place
            if name in results and place.memory != results[name].memory:
                program.add("Copy", results[name], [place], place.shape)
    return inputs, program


def _function(
    nodes: Sequence[onnx.NodeProto],
    values: TokenValues,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: onnx.OperatorSetIdProto,
) -> onnx.FunctionProto:
    """Return the nodes as a function; those of equal groups are equal."""
    names = {name: f"x{i}" for i, name in enumerate(inputs)}
    names |= {name: f"y{i}" for i, name in enumerate(outputs)}
    body: list[onnx.NodeProto] = []
    for node in nodes:
        body.extend(_renamed(node, values, names))
    function = helper.make_function(
        DOMAIN,
        OP,
        [names[name] for name in inputs],
        [names[name] for name in outputs],
        body,
        [opset],
        ["program"],
    )
    name_overload(function)
    return function


def _renamed(
    node: onnx.NodeProto, values: TokenValues, names: dict[str, str]
) -> Iterator[onnx.NodeProto]:
    """Yield a node of a function, and the constants it reads before it."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.name = ""
    sizes: dict[str, Sequence[int]] = dict(values.integers)
    if node.op_type == "Reshape":  # to sizes that may have been computed from others
        del made.attribute[:]
        target = [*(0,) * LEAD, *values.tokens[node.output[0]].shape]
        made.input[1] = f"shape {target}"
        sizes[made.input[1]] = target
    elif node.op_type in MEANS:
        made.input[1] = "last"
        sizes["last"] = [-1]
    for name in made.input:
        if name in names or not name:
            continue
        names[name] = f"c{len(names)}"
        if name in values.numbers:
            number, rank = values.numbers[name]
            array = np.full((1,) * rank, number, np.float32)
        else:
            array = np.array(sizes[name], np.int64)
        yield helper.make_node("Constant", [], [names[name]], value=numpy_helper.from_array(array))
    made.input[:] = [name and names[name] for name in made.input]
    made.output[:] = [names.setdefault(name, f"v{len(names)}") for name in node.output]
    yield made
