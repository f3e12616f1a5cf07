"""Complex parameters, buffers and constants of a program -> two real ones each.

A name of a part is that of the whole and one more behind it, which no other tensor can have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Node

from linexport.trace.decompositions.complex_pairs.writer import ComplexPair, PairWriter, value_of

PARTS = ("real", "imag")


class Weights:
    """Tensors that a program has stored, and what its placeholders stand for."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        signature = program.graph_signature
        self._sources = {spec.arg.name: [spec] for spec in signature.input_specs}
        self._states = dict(program.state_dict)
        self._constants = dict(program.constants)

    def split(self, w: PairWriter, node: Node) -> None:
        """Put two placeholders behind that of a complex weight."""
        (source,) = self._sources[node.name]
        parts, specs = list[Node](), list[InputSpec]()
        for name in reversed(PARTS):
            with w.graph.inserting_after(node):
                made = w.graph.placeholder(f"{node.name}_{name}")
            made.meta = {**node.meta, "val": getattr(value_of(node), name).contiguous()}
            w.note(made)
            parts.insert(0, made)
            target = self._store(source, name)
            specs.insert(0, replace(source, arg=TensorArgument(made.name), target=target))
        self._sources[node.name] = specs
        w.pairs[node] = ComplexPair(*parts)

    def _store(self, source: InputSpec, part: str) -> str:
        """Store one part of a tensor, and return its name."""
        whole = source.target or ""
        target = f"{whole}.{part}"
        for stored in (self._states, self._constants):
            if whole in stored:
                found: Any = getattr(stored[whole].detach(), part).contiguous()
                is_parameter = source.kind == InputKind.PARAMETER
                stored[target] = torch.nn.Parameter(found, False) if is_parameter else found
        return target

    def program_of(self, outputs: list[OutputSpec]) -> ExportedProgram:
        """Return the program with its graph as it is, and the weights that it reads."""
        program = self.program
        specs = [spec for found in self._sources.values() for spec in found]
        names = {spec.target for spec in specs}
        states = {n: x for n, x in self._states.items() if n in names}
        return ExportedProgram(
            program.graph_module,
            program.graph,
            ExportGraphSignature(specs, outputs),
            states,
            program.range_constraints,
            program.module_call_graph,
            program.example_inputs,
            {n: x for n, x in self._constants.items() if n in names},
            verifiers=program.verifiers,
        )
