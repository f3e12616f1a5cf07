"""The place where a converted model first differs from its original.

Values of the ONNX graph keep the names of the traced program's, so the program is interpreted node
by node on the failing inputs (or, where the original is a graph, that graph is run with all its
values as outputs), the graph is run with the same values as extra outputs, and the first one in
graph order that is out of tolerance is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch.utils import _pytree as pytree

from linexport.manifest.proof import DivergenceRecord
from linexport.parity import observed
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.reference import feeds
from linexport.system import memory
from linexport.targets import Session
from linexport.targets.base import OrtSession
from linexport.trace import Traced


@memory.low_memory()
def first_divergence(
    tested: ModelUnderTest,
    traced: Traced,
    path: Path,
    open_session: Callable[..., Session],
    case: Case,
) -> DivergenceRecord | None:
    """Tensor, node, op and error of the first value out of tolerance; None if none can be named."""
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    try:
        expected = _expected(traced, inputs, tested)
        state = tested.initial_state(tested.batch(case.sizes))
        fed = {**feeds(inputs, tested.input_names), **state}
        got, nodes = observed.run(path, expected, fed, open_session)
    except Exception:
        return None  # The failure itself is reported already; this only adds to it.
    for node in nodes:
        for name in node.output:
            if name in expected and name in got:
                result = compare_arrays(expected[name], got[name], tested.tolerance)
                if not result.passed:
                    error = result.max_relative_error
                    return DivergenceRecord(name, node.name, node.op_type, error, result.worst)
    return None


def _expected(
    traced: Traced, inputs: tuple[Any, ...], tested: ModelUnderTest
) -> Mapping[str, np.ndarray]:
    """Values of the original by name."""
    if traced.translated is not None:
        return _interpret(traced.translated, inputs, tested.output_names)
    original = onnx.ModelProto()
    original.CopyFrom(traced.model)
    every = {name for node in original.graph.node for name in node.output}
    original.graph.output.extend(observed.outputs_of(original, every))
    got = OrtSession(original.SerializeToString()).run(feeds(inputs, tested.input_names))
    return {name: value for name, value in got.items() if value.dtype.kind == "f"}


class _Recorder(torch.fx.Interpreter):
    """Keeps every floating tensor a graph computes, by node name."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, np.ndarray] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.values[n.name] = memory.memory_mapped([result.detach().numpy()])[0]
        return result


def _interpret(
    program: torch.export.ExportedProgram, inputs: tuple[object, ...], output_names: Sequence[str]
) -> Mapping[str, np.ndarray]:
    """Values by name in the graph, whose outputs have names of their own."""
    leaves = iter(pytree.tree_leaves(inputs))
    flat = []
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            flat.append(next(leaves))
        else:
            assert spec.target is not None
            source = program.state_dict if spec.target in program.state_dict else program.constants
            flat.append(source[spec.target])
    recorder = _Recorder(program.graph_module)
    with torch.no_grad():
        results = recorder.run(*flat)
    specs = zip(program.graph_signature.output_specs, results, strict=True)
    outputs = [x for spec, x in specs if spec.kind.name == "USER_OUTPUT" and torch.is_tensor(x)]
    named = zip(output_names, outputs, strict=True)
    return {**recorder.values, **{name: x.numpy() for name, x in named}}
