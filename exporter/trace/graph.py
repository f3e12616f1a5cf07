"""Exported program -> ONNX graph.

The graph is exported without the exporter's optimiser, which takes x + 1e-9 for x and so drops
epsilons. linexport's operators become nodes of the linexport domain, without function bodies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnxscript import ir, values
from onnxscript.ir.passes.common import LiftConstantsToInitializersPass

from linexport.errors import BuildError, LinexportError
from linexport.graph.external_data import LARGE, LOCATION, Weights, with_weights
from linexport.models import torch_ops
from linexport.plugins.ops import registry
from linexport.plugins.ops.op import DOMAIN, VERSION, Op
from linexport.system.torch_internals.exports import (
    traced_once,
    translations_read_once,
    work_left_out,
)
from linexport.system.torch_internals.frames import node_of
from linexport.trace import branch_copies
from linexport.trace.decompositions import (
    cummax,
    cumprod,
    floor_division,
    idle_squeezes,
    integer_promotion,
    near_zero,
    softmax_attention,
    stable_sort,
    symbolic_padding,
    triangular_inverse,
)
from linexport.trace.decompositions.complex_pairs import with_pairs
from linexport.trace.decompositions.undecomposed import undecomposed
from linexport.trace.dim_names import rename_symbols
from linexport.trace.exporter_state import exporting
from linexport.trace.loops import capture
from linexport.trace.messages import explained, innermost
from linexport.trace.metadata import drop_metadata, last_frame, source_lines
from linexport.trace.value_names import name_values

OPSET = 20
"""The lowest with Gelu: spelled out, ONNX Runtime does not recognise it as torch writes it."""


@dataclass(frozen=True)
class Translated:
    """A program as a graph.

    Attributes:
        graph: ONNX graph without its large weights.
        weights: those, which are the program's.
        program: the one the exporter translated, after its decompositions: values of the graph are
            named after its nodes.
        lines: the user's source lines, see ``source_lines``.
    """

    graph: onnx.ModelProto
    weights: Weights
    program: torch.export.ExportedProgram
    lines: dict[str, str]


def to_graph(
    program: torch.export.ExportedProgram,
    symbols: Mapping[str, str] | None = None,
    outputs: Sequence[str] | None = None,
    presents: Sequence[str] = (),
) -> Translated:
    """Translate a program, keeping linexport ops as nodes.

    ``symbols`` renames the program's size symbols, ``outputs`` the outputs and ``presents`` the
    states that come after them. Nodes of linexport ops
    are named after the submodule they come from; metadata of the exporter, which holds local
    paths, is dropped.

    Raises:
        BuildError: an operator has no translation.
        UnsupportedModelError: one of complex numbers has none, see ``with_pairs``.
    """
    registry.register_schemas()
    branch_copies.separate(program)
    integer_promotion.promote(program)
    symbolic_padding.write_pads(program)
    floor_division.write_whole(program)
    idle_squeezes.remove_idle_squeezes(program)
    translations = _translations()
    try:
        program = with_pairs(program, OPSET, translations)
        own = softmax_attention.translation(program)
        translations[torch.ops.aten.scaled_dot_product_attention.default] = own
        with exporting(), translations_read_once(), work_left_out(), traced_once(undecomposed):
            exported = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                custom_translation_table=translations,
            )
    except LinexportError:
        raise
    except Exception as error:
        raise BuildError(
            f"torch.onnx.export cannot translate the model: {explained(innermost(error))}"
            f"{_user_line(innermost(error))}"
        ) from error
    assert exported is not None
    name_values(exported.model.graph, outputs, presents)
    weights = _take_weights(exported.model)
    # One form of constants for passes to read, and fewer nodes.
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(exported.model)
    model = exported.model_proto
    _widen_indices(model.graph)
    _name_nodes(model)
    lines = source_lines(model)
    drop_metadata(model)
    rename_symbols(model, symbols or {})
    assert exported.exported_program is not None
    return Translated(model, weights, exported.exported_program, lines)


def _user_line(error: BaseException) -> str:
    """Return the user's line that the node comes from which could not be translated; "" if none."""
    node = node_of(error)
    found = last_frame(node.meta.get("stack_trace") or "") if node is not None else None
    return f"\nAt {found['path']}:{found['line']}: {found['code'].strip()}" if found else ""


def to_onnx(
    program: torch.export.ExportedProgram, symbols: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """``to_graph`` with the weights in the graph."""
    found = to_graph(program, symbols)
    return with_weights(found.graph, found.weights)


def _take_weights(model: ir.Model) -> Weights:
    """Make large initializers external; returns their values, which stay where they are."""
    found = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= LARGE:
            found[name] = tensor.numpy()
            value.const_value = ir.ExternalTensor(
                LOCATION, None, None, tensor.dtype, shape=tensor.shape, name=name
            )
    return found


def plain_onnx(program: torch.export.ExportedProgram, path: Path) -> int:
    """Write what ``torch.onnx.export`` gives with its own optimiser; returns the number of nodes.

    Those of bodies count as well. linexport operators are replaced by the PyTorch code they stand
    for. The model is written to ``path``, with its weights in a data file.

    Raises:
        Exception: whatever torch raises; a plain export that fails is a result, not a fault.
    """
    with torch.no_grad(), exporting(), translations_read_once(), work_left_out():
        replaced = _decompositions()
        if any(node.target in replaced for node in program.graph.nodes):
            # They loop over chunks for some update rules: sizes they fix are errors.
            table = torch.export.default_decompositions()
            table.update(replaced)
            program = program.run_decompositions(table)
        exported = torch.onnx.export(program, dynamo=True, verbose=False, opset_version=OPSET)
    assert exported is not None
    # Weights in the same file would be in memory three times over while it is written.
    exported.save(str(path), external_data=True)
    return sum(1 for _ in ir.traversal.RecursiveGraphIterator(exported.model.graph))


def _translations() -> dict[Callable[..., object], Callable[..., object]]:
    """How the exporter writes each linexport operator: as the one node of its op."""
    marks = {
        capture.OPERATOR: capture.symbol,
        triangular_inverse.OPERATOR: triangular_inverse.symbol,
    }
    marks[torch.ops.aten.relu.default] = _relu
    marks |= dict.fromkeys((torch.ops.aten.lerp.Tensor, torch.ops.aten.lerp.Scalar), _lerp)
    marks[torch.ops.aten.expm1.default] = near_zero.exponential
    marks[torch.ops.aten.special_expm1.default] = near_zero.exponential
    marks[torch.ops.aten.log1p.default] = near_zero.logarithm
    marks[torch.ops.aten.special_log1p.default] = near_zero.logarithm
    marks[torch.ops.aten.sort.stable] = stable_sort.in_order
    marks[torch.ops.aten.cumprod.default] = cumprod.cumulative
    marks[torch.ops.aten.cummax.default] = cummax.maximum
    marks[torch.ops.aten.cummin.default] = cummax.minimum
    return marks | {torch_ops.overload(op): _symbol(op) for op in registry.all_ops().values()}


def _relu(x: Any) -> object:
    """Relu; of integers, such as distances, Clip at 0: ONNX Runtime has no Relu of them."""
    op = values.Opset("", OPSET)
    return op.Relu(x) if x.dtype.is_floating_point() else op.Clip(x, op.CastLike(0, x))


def _lerp(start: object, end: object, weight: object) -> object:
    """(1 - w) start + w end: linear in both, and exact at both ends.

    torch's own translation chooses by |w| < 0.5 between two forms of it; a loop with a choice in it
    is not a recurrence with a decay.
    """
    op = values.Opset("", OPSET)
    weight = op.CastLike(weight, start)
    rest = op.Sub(op.CastLike(1.0, start), weight)
    return op.Add(op.Mul(rest, start), op.Mul(weight, end))


def _symbol(op: Op) -> Callable[..., object]:
    symbol = getattr(values.Opset(DOMAIN, VERSION), op.name)

    def write(*args: object, **kwargs: object) -> Any:
        inputs, attributes = torch_ops.by_name(op, args, kwargs)
        last = max(i for i, name in enumerate(op.input_names) if name in inputs)
        return symbol(*(inputs.get(name) for name in op.input_names[: last + 1]), **attributes)

    return write


def _decompositions() -> dict[object, Callable[..., object]]:
    """Return the PyTorch code that operators of linexport stand for."""
    return {torch_ops.overload(op): op.eager for op in registry.all_ops().values()}


def _widen_indices(graph: onnx.GraphProto) -> None:
    """Cast indices of GatherND to int64, which it takes alone: torch writes int32 as it is."""
    nodes = []
    for node in graph.node:
        if node.op_type == "GatherND":
            wide = f"{node.output[0]}/indices"
            to = onnx.TensorProto.INT64
            nodes.append(onnx.helper.make_node("Cast", [node.input[1]], [wide], wide, to=to))
            node.input[1] = wide
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _name_nodes(model: onnx.ModelProto) -> None:
    """Name nodes by the submodule they are of: ``blocks.0.attention/LinearAttention``."""
    taken: set[str] = set()
    for node in model.graph.node:
        metadata = {p.key: p.value for p in node.metadata_props}
        scopes = re.findall(r"'([^']*)'", metadata.get("pkg.torch.onnx.name_scopes", ""))
        own = node.op_type if node.domain == DOMAIN else node.name.removeprefix("node_")
        stem = "/".join(filter(None, [*scopes[-2:-1], own or node.op_type]))
        name, count = stem, 1
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        node.name = name
        taken.add(name)
