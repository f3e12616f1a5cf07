"""An exported program that writes buffers -> the same with them as inputs and outputs.

    (y, memory) = program(x; memory)        becomes     (y, memory') = program(x, memory)

``graph_signature.buffers_to_mutate`` of the program without writes in place names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from linexport.errors import UnsupportedModelError
from linexport.sources.carried_buffers import Buffer, buffers_of, restart, states_of
from linexport.sources.loaded_model import CarriedBuffers, LoadedModel
from linexport.system.torch_internals.operators import schema
from linexport.system.torch_internals.trees import pytree

INNER = "program."
"""Beginning of the names that buffers of a program have in ``OriginalProgram``."""


class OriginalProgram(nn.Module):
    """The module of a program inside of another, whose class a copy keeps."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        return self.program(*args, **kwargs)


def with_buffers(loaded: LoadedModel) -> LoadedModel:
    """Return a program with the buffers that it writes as states; any other as it is.

    Raises:
        UnsupportedModelError: a buffer that no state stands for.
    """
    program = loaded.program
    assert program is not None
    if not any(_is_written(node) for node in program.graph.nodes):
        return loaded
    functional = program.run_decompositions({})
    names = sorted(functional.graph_signature.buffers_to_mutate.values())
    if not names:
        return loaded
    module = OriginalProgram(loaded.module)
    inner = [f"{INNER}{name}" for name in names]
    try:
        found, _ = buffers_of(
            module, inner, loaded.args, loaded.kwargs, loaded.source.location, INNER
        )
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{loaded.source.location}: the program writes the buffer {names[0]}, and does not run "
            f"on its example inputs: {error}"
        ) from error
    unlike = next((buffer for buffer in found if buffer.initial is None), None)
    if unlike is not None:
        raise UnsupportedModelError(
            f"{loaded.source.location}: the program writes the buffer {unlike.title}, whose values "
            "differ before the first call; of a program, states begin with one number. Convert the "
            "module itself, in a factory, package.module:callable."
        )
    # Sizes of a program are fixed: which buffers have a batch axis is not known.
    buffers = tuple(replace(buffer, batched=False) for buffer in found)
    restart(module, buffers)
    traced = replace(loaded, module=module, program=_lifted(functional, buffers))
    carried = CarriedBuffers(buffers, traced, states_of(buffers))
    return replace(loaded, module=module, carried=carried)


def _is_written(node: torch.fx.Node) -> bool:
    found = schema(node.target)
    return found is not None and found.is_mutable


def _lifted(program: ExportedProgram, buffers: tuple[Buffer, ...]) -> ExportedProgram:
    """Return a functional program that takes and returns buffers, in the order of their states."""
    names = {state.past: b.title for b in buffers for state in b.states()}
    titles = {state.past: names[state.past] for state in states_of(buffers)}
    inputs = _with_inputs(program, titles)
    outputs = _with_outputs(program, list(titles.values()))
    stored = {**program.state_dict, **program.constants}
    pasts = {past: stored[title] for past, title in titles.items()}
    args, kwargs = program.example_inputs or ((), {})
    examples = (args, {**kwargs, **pasts})
    call = program.module_call_graph[0].signature
    assert call is not None
    returned = pytree.tree_unflatten([0] * call.out_spec.num_leaves, call.out_spec)
    given = [*(call.forward_arg_names or []), *pasts]
    specs = pytree.tree_structure(examples), pytree.tree_structure((returned, tuple(pasts)))
    return ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], *specs, given))],
        example_inputs=examples,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _with_inputs(program: ExportedProgram, titles: Mapping[str, str]) -> list[InputSpec]:
    """Move buffers behind all inputs of a graph, under the names of their states.

    Args:
        program: is changed.
        titles: of the buffers, by the name of the input that a state has.

    Returns:
        The inputs, in order.
    """
    given = program.graph_signature.input_specs
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    by_name = {node.name: node for node in placeholders}
    taken = {s.target: s for s in given if s.kind == InputKind.BUFFER}
    moved = [taken[title] for title in titles.values()]
    inputs = [s for s in given if s not in moved]
    last = placeholders[-1]
    for spec in moved:
        node = by_name[spec.arg.name]
        if node is not last:
            last.append(node)
        last = node
    for past, spec in zip(titles, moved, strict=True):
        node = by_name[spec.arg.name]  # an input has the name that a call gives it
        node.name = node.target = past
        inputs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(past), None))
    return inputs


def _with_outputs(program: ExportedProgram, order: Sequence[str]) -> list[OutputSpec]:
    """Return what a graph writes to buffers behind its outputs, in an order of the buffers.

    Args:
        program: is changed.
        order: of the buffers, by title.

    Returns:
        The outputs, in order.
    """
    output = next(node for node in program.graph.nodes if node.op == "output")
    pairs = list(zip(program.graph_signature.output_specs, output.args[0], strict=True))
    written = {s.target: (s, x) for s, x in pairs if s.kind == OutputKind.BUFFER_MUTATION}
    found = [(s, x) for s, x in pairs if s.kind != OutputKind.BUFFER_MUTATION]
    for spec, value in (written[title] for title in order):
        found.append((OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None), value))
    output.args = (tuple(x for _, x in found),)
    return [s for s, _ in found]
