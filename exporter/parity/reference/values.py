"""Values inside the original, by the names they have in the graph.

Values of the ONNX graph keep the names of the traced program's. So the program is interpreted node
by node, or, where the original is a graph itself, that graph is run with some values as outputs.
Only the requested values are kept, and nothing after the last of them is computed.

The program of a model with a Python loop has a few of its steps. Values of these, and what is
computed of them, are unknown at other lengths; outputs among them are those of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import onnx
import torch
from onnx import TensorProto

from linexport.parity.reference import extra_outputs
from linexport.parity.reference.module import Reference, passing
from linexport.sources.first_run import first_rows
from linexport.sources.loaded_model import LoadedModel
from linexport.system import memory
from linexport.system.torch_internals.trees import pytree
from linexport.targets.base import OrtSession
from linexport.trace import Traced
from linexport.trace.loops.step_values import values_of_steps


@dataclass(frozen=True)
class Origin:
    """The place in PyTorch that a value comes from.

    Attributes:
        layer: path of the submodule, "" for the model itself; None where nothing says so.
        module: class of that submodule.
        code: file, line and text of the statement; None where the program does not know it.
    """

    layer: str | None = None
    module: str | None = None
    code: str | None = None


class OriginalValues(Protocol):
    """Values of the original for one set of inputs.

    Attributes:
        names: every floating value that can be requested.
    """

    names: frozenset[str]

    def get(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return these values; names that are not in ``names`` are left out."""
        ...

    def origin(self, name: str) -> Origin:
        """Return the place in PyTorch that computes a value."""
        ...


def original_values(
    loaded: LoadedModel,
    traced: Traced,
    inputs: Sequence[object],
    deciding: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> OriginalValues:
    """Return the values of a traced model.

    Args:
        loaded: the original.
        traced: its trace.
        inputs: its flattened inputs, as tensors; those of a program that are no tensors, too.
        deciding: makes contexts in which a program makes its choices, see ``near_ties``.
    """
    if traced.translated is not None:
        outputs = [o.name for o in traced.graph.graph.output]
        buffers = traced.states if loaded.carried is not None else ()
        begin = [torch.from_numpy(s.start(first_rows(inputs))) for s in buffers]
        return _ProgramValues(loaded, traced.translated, inputs, begin, outputs, deciding)
    return _GraphValues(traced, inputs)


class _ProgramValues:
    """Values of a traced program; its outputs have names of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        program: torch.export.ExportedProgram,
        inputs: Sequence[object],
        begin: Sequence[torch.Tensor],
        output_names: Sequence[str],
        deciding: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._loaded, self._program, self._begin = loaded, program, begin
        self._inputs, self._deciding = inputs, deciding
        self._unknown = values_of_steps(program.graph)
        self._outputs = list(output_names) if self._unknown else []
        self._nodes = {n.name: n for n in program.graph.nodes if _is_floating(n.meta.get("val"))}
        specs = program.graph_signature.output_specs
        given = [s.arg.name for s in specs if s.kind.name == "USER_OUTPUT" and _named(s.arg)]
        self._renamed = {
            name: node
            for name, node in zip(output_names, given, strict=False)
            if node in self._nodes
        }
        known = self._nodes.keys() - {n.name for n in self._unknown}
        self.names = frozenset({*known, *(k for k, v in self._renamed.items() if v in known)})
        self.names |= {*self._outputs}

    def get(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """See ``OriginalValues``."""
        whole = {*names} & {*self._outputs}
        inside = ({*names} & self.names) - whole
        requested = {self._renamed.get(name, name) for name in inside} & {*self._nodes}
        recorder = _Recorder(self._program.graph_module, requested, self._unknown)
        if requested:
            with torch.no_grad(), passing(), self._deciding():
                recorder.record(self._flat())
        values = recorder.values
        named = {name: self._renamed.get(name, name) for name in inside}
        found = {name: values[node] for name, node in named.items() if node in values}
        return found | (self._of_module(whole) if whole else {})

    def _of_module(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Return floating outputs of the module itself."""
        structure = pytree.tree_structure((self._loaded.args, self._loaded.kwargs))
        args, kwargs = pytree.tree_unflatten(self._inputs, structure)
        with self._deciding():
            outputs = Reference(self._loaded, torch.float32)((args, kwargs))
        named = zip(self._outputs, outputs, strict=True)
        return {name: x for name, x in named if name in names and x.dtype.kind == "f"}

    def origin(self, name: str) -> Origin:
        """See ``OriginalValues``."""
        node = self._nodes.get(self._renamed.get(name, name))
        if node is None:
            return Origin()
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        layer, kind = stack[-1] if stack else (None, None)
        name_of = kind if isinstance(kind, str) or kind is None else kind.__name__
        return Origin(layer, name_of and name_of.rpartition(".")[2], _code(node))

    def _flat(self) -> list[object]:
        """Return parameters, constants and inputs in the program's order."""
        given, program = iter([*self._inputs, *self._begin]), self._program
        flat: list[object] = []
        for spec in program.graph_signature.input_specs:
            if spec.kind.name == "USER_INPUT":
                flat.append(next(given))
                continue
            assert spec.target is not None
            held = program.state_dict if spec.target in program.state_dict else program.constants
            flat.append(held[spec.target])
        return flat


class _Recorder(torch.fx.Interpreter):
    """Keeps some of the values that a graph computes, and ends after the last of them."""

    class _Done(Exception):  # noqa: N818 - the end of the work
        pass

    def __init__(
        self,
        module: torch.fx.GraphModule,
        requested: Collection[str],
        unknown: Collection[torch.fx.Node],
    ) -> None:
        super().__init__(module)
        self._requested, self._unknown = requested, unknown
        self.values: dict[str, np.ndarray] = {}

    def record(self, inputs: Sequence[object]) -> None:
        """Run until every value is there."""
        try:
            self.run(*inputs)
        except _Recorder._Done:
            return

    def run_node(self, n: torch.fx.Node) -> object:
        if n in self._unknown:
            return None
        result = super().run_node(n)
        if n.name in self._requested and isinstance(result, torch.Tensor):
            self.values[n.name] = memory.memory_mapped([result.detach().numpy()])[0]
            if len(self.values) == len(self._requested):
                raise _Recorder._Done
        return result


class _GraphValues:
    """Values of an original that is an ONNX graph."""

    def __init__(self, traced: Traced, inputs: Sequence[object]) -> None:
        self._traced = traced
        names = [i.name for i in traced.graph.graph.input]
        tensors = [x.numpy() for x in inputs if isinstance(x, torch.Tensor)]
        self._fed = dict(zip(names, tensors, strict=True))
        typed = [*traced.graph.graph.value_info, *traced.graph.graph.output]
        others = {i.name for i in typed if i.type.tensor_type.elem_type not in (0, *_FLOATS)}
        made = {name for node in traced.graph.graph.node for name in node.output if name}
        self.names = frozenset(made - others)

    def get(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """See ``OriginalValues``."""
        model = onnx.ModelProto()
        model.CopyFrom(self._traced.model)
        model.graph.output.extend(extra_outputs.outputs_of(model, names))
        got = OrtSession(model.SerializeToString()).run(self._fed)
        return {n: x for n, x in got.items() if n in names and x.dtype.kind == "f"}

    def origin(self, name: str) -> Origin:
        """See ``OriginalValues``: a graph does not know."""
        return Origin()


_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _named(argument: object) -> bool:
    return isinstance(getattr(argument, "name", None), str)


def _code(node: torch.fx.Node) -> str | None:
    """Return the innermost line of Python that a node was traced from."""
    lines = (node.stack_trace or "").strip().splitlines()
    places = [i for i, line in enumerate(lines) if line.strip().startswith("File ")]
    if not places:
        return None
    place = lines[places[-1]].strip()
    text = lines[places[-1] + 1].strip() if places[-1] + 1 < len(lines) else ""
    return f"{place}: {text}" if text else place
