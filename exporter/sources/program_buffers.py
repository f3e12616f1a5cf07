"""An exported program that writes buffers -> the same with them as inputs and outputs.

    (y, memory) = program(x; memory)        becomes     (y, memory') = program(x, memory)

``graph_signature.buffers_to_mutate`` of the program without writes in place names them.
"""

from __future__ import annotations

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
    signature, graph = program.graph_signature, program.graph
    names = {state.past: b.title for b in buffers for state in b.states()}
    order = [names[state.past] for state in states_of(buffers)]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    by_name = {node.name: node for node in placeholders}
    taken = {s.target: s for s in signature.input_specs if s.kind == InputKind.BUFFER}
    last = placeholders[-1]
    for name in order:
        node = by_name[taken[name].arg.name]
        if node is not last:
            last.append(node)
        last = node
    moved = [taken[name] for name in order]
    inputs = [s for s in signature.input_specs if s not in moved]
    for state, spec in zip(states_of(buffers), moved, strict=True):
        node = by_name[spec.arg.name]  # an input has the name that a call gives it
        node.name = node.target = state.past
        inputs.append(InputSpec(InputKind.USER_INPUT, TensorArgument(state.past), None))
    output = next(node for node in graph.nodes if node.op == "output")
    pairs = list(zip(signature.output_specs, output.args[0], strict=True))
    written = {s.target: (s, x) for s, x in pairs if s.kind == OutputKind.BUFFER_MUTATION}
    own = [(s, x) for s, x in pairs if s.kind != OutputKind.BUFFER_MUTATION]
    rest = [
        (OutputSpec(OutputKind.USER_OUTPUT, written[n][0].arg, None), written[n][1]) for n in order
    ]
    output.args = (tuple(x for _, x in (*own, *rest)),)
    stored = {**program.state_dict, **program.constants}
    pasts = {state.past: stored[names[state.past]] for state in states_of(buffers)}
    args, kwargs = program.example_inputs or ((), {})
    examples = (args, {**kwargs, **pasts})
    call = program.module_call_graph[0].signature
    assert call is not None
    returned = pytree.tree_unflatten([0] * call.out_spec.num_leaves, call.out_spec)
    given = [*(call.forward_arg_names or []), *pasts]
    specs = pytree.tree_structure(examples), pytree.tree_structure((returned, tuple(order)))
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, [s for s, _ in (*own, *rest)]),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], *specs, given))],
        example_inputs=examples,
        constants=program.constants,
        verifiers=program.verifiers,
    )
