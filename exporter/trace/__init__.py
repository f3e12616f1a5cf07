"""LoadedModel -> exported program -> ONNX graph with linexport ops.

An ONNX file needs no program: it is normalised and taken as the graph.

Two gates keep a trace honest. A dynamic dimension that the model's code fixes is an
error that names the line which fixed it; and where the program has a symbol in an output shape,
the ONNX graph must have one too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import torch

from linexport.errors import BuildError, LinexportError, UnsupportedModelError
from linexport.graph import states
from linexport.graph.dims import DimRange, follow
from linexport.graph.external_data import Weights, externalize, with_weights
from linexport.graph.interface import tensor_records
from linexport.graph.states import State
from linexport.graph.walk import reached
from linexport.plugins.ops.registry import all_ops
from linexport.sources.bounds import bounds_by_name
from linexport.sources.loaded_model import DecodeModule, LoadedModel
from linexport.trace.decompositions import stored_matrices
from linexport.trace.decompositions.expand import expand
from linexport.trace.decompositions.triangles import mark_triangular
from linexport.trace.dim_names import length_warnings, limit_to_chunks, name_symbols
from linexport.trace.graph import plain_onnx, to_graph
from linexport.trace.loops import scanned_sizes
from linexport.trace.loops.reroll import NotALoopError, roll
from linexport.trace.normalize import normalise
from linexport.trace.program import export_program, frozen
from linexport.trace.random_ops import reject_nondeterminism

__all__ = [
    "Traced",
    "export_program",
    "length_warnings",
    "plain_export",
    "trace",
    "trace_or_whole",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Traced:
    """A traced model.

    Attributes:
        graph: ONNX graph; linexport ops are nodes without function bodies.
        weights: its large initializers, which are not in the graph.
        dims: the dynamic dimensions by name, with the range the program allows.
        example_sizes: the size each of them had in the example.
        program: the traced program; None where the original is a graph itself.
        translated: the program after the exporter's decompositions.
        lines: source lines of the model's author by the names of nodes and values, as far as the
            exporter kept them.
        bounds: of inputs that are bounded in the example, by name.
        states: those that are inputs and outputs of the graph as it is; of no other are any to be
            exposed.
    """

    graph: onnx.ModelProto
    weights: Weights
    dims: Mapping[str, DimRange]
    example_sizes: Mapping[str, int]
    program: torch.export.ExportedProgram | None = None
    translated: torch.export.ExportedProgram | None = None
    lines: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    states: tuple[State, ...] = ()

    def line(self, *names: str) -> str | None:
        """Return the source line of the first of some nodes or values that has one."""
        return next((self.lines[name] for name in names if name in self.lines), None)

    @property
    def model(self) -> onnx.ModelProto:
        """The graph with all its weights; a copy of them."""
        return with_weights(self.graph, self.weights)


def trace(loaded: LoadedModel) -> Traced:
    """Trace a model with its dynamic dimensions.

    Raises:
        UnsupportedModelError: the model's code fixes a dimension that should be dynamic, one of its
            layers is computed by something that no linexport op stands in for, or the operator set
            of a file cannot be raised; or it draws random numbers.
        BuildError: torch could not trace or translate it for another reason.
    """
    try:
        return _with_buffers(loaded) if loaded.carried is not None else _trace(loaded)
    except LinexportError as error:
        # What the library lacks is the cause, and what the trace then met an effect of it.
        said = [*filter(None, (loaded.unread, str(error), _written(loaded)))]
        if len(said) == 1:
            raise
        raise type(error)("\n".join(said)) from error


def trace_or_whole(loaded: LoadedModel) -> tuple[LoadedModel, Traced]:
    """Trace a model; without its states where only that can be.

    Returns:
        The model that was traced, and its trace.

    Raises:
        UnsupportedModelError, BuildError: see ``trace``.
    """
    try:
        return loaded, trace(loaded)
    except LinexportError as error:
        if loaded.whole is None:
            raise
        log.info("traced without states: %s", error)
    return loaded.whole, trace(loaded.whole)


def _written(loaded: LoadedModel) -> str:
    """Return which buffers a model writes, for errors; "" without any."""
    if loaded.carried is None:
        return ""
    names = ", ".join(buffer.title for buffer in loaded.carried.buffers)
    return (
        f"States of the artifact are the buffers that forward writes: {names}. A Python if, an "
        "index or a size that depends on their values cannot be traced."
    )


def _with_buffers(loaded: LoadedModel) -> Traced:
    """Trace a model with the buffers that it writes as states; without those that nothing reads."""
    assert loaded.carried is not None
    carried = loaded.carried
    traced = _trace(carried.traced, [state.present for state in carried.states])
    graph = traced.graph.graph
    presents = {state.present for state in carried.states}
    outputs = {value.name for value in graph.output} - presents
    if not outputs & reached(graph, [state.past for state in carried.states]):
        log.info("no output depends on the buffers that forward writes")
        return _trace(loaded)
    shapes = {record.name: record.shape for record in tensor_records(graph.input)}
    found = tuple(replace(s, shape=shapes[s.past]) for s in carried.states)
    return replace(traced, states=found)


def _trace(loaded: LoadedModel, presents: Sequence[str] = ()) -> Traced:
    if loaded.graph is not None:
        graph, lines = normalise(loaded.graph)
        _check_types(graph)
        log.info("the ONNX file has %d nodes after normalisation", len(graph.graph.node))
        weights, given = externalize(graph), loaded.graph
        return Traced(graph, weights, given.dims, given.sizes, lines=lines)
    program = mark_triangular(stored_matrices.store(loaded.program or export_program(loaded)))
    reject_nondeterminism(program)
    step = loaded.decode_module
    names, dims, sizes = name_symbols(program, (step or loaded).dynamic_shapes)
    dims = limit_to_chunks(program, names, dims)
    found = to_graph(program, names, (step or loaded).outputs, presents)
    model = found.graph
    try:
        roll(model)
    except NotALoopError as reason:
        log.info("a loop over tokens remains unrolled: %s", reason)
        raise frozen(loaded, reason=f"Its steps are not those of a loop: {reason}.") from reason
    dims = scanned_sizes.tie(model, dims)
    dims = follow(dims)
    expand(model)
    _check_outputs(program, model)
    _check_types(model)
    if step is not None:
        _check_fused(model, step)
        # How long a past is follows from what was fed; it is not for anybody to choose.
        lengths = {str(s.shape[s.growing_axis]) for s in step.states if s.growing_axis is not None}
        dims = {name: limits for name, limits in dims.items() if name not in lengths}
    ranges = ", ".join(f"{name} {limits.min}:{limits.max or ''}" for name, limits in dims.items())
    log.info("traced %d nodes; dynamic dimensions: %s", len(model.graph.node), ranges or "none")
    traced = {name: sizes[name] for name in dims}
    own = step.states if step else ()
    bounds = bounds_by_name(loaded, [value.name for value in model.graph.input])
    made = (model, found.weights, dims, traced, program, found.program)
    return Traced(*made, found.lines, bounds, own)


def plain_export(
    loaded: LoadedModel, folder: Path, program: torch.export.ExportedProgram | None = None
) -> tuple[Path, int]:
    """Write the ONNX file a user has without linexport; returns its path and number of nodes.

    ``torch.onnx.export`` makes it, in ``folder``; an ONNX file is its own plain export. A
    ``program`` that was exported already is not exported again.

    Raises:
        Exception: whatever torch raises; a plain export that fails is a result, not a fault.
    """
    if loaded.graph is not None:
        return loaded.graph.path, loaded.graph.nodes
    path = folder / "plain.onnx"
    return path, plain_onnx(program or loaded.program or export_program(loaded), path)


def _check_fused(model: onnx.ModelProto, step: DecodeModule) -> None:
    """Check that every state of an op is one that a node of that op continues."""
    fused = {(state.past, state.present) for state in states.find_states(model)}
    for state in step.states:
        if state.op in all_ops() and (state.past, state.present) not in fused:
            raise UnsupportedModelError(
                f"No {state.op} node continues the state {state.past}: the layer it belongs to is "
                "computed by code that linexport does not know."
            )


def _check_types(model: onnx.ModelProto) -> None:
    """Check that nothing is computed in bfloat16, which ONNX Runtime cannot do on a CPU."""
    graph = model.graph
    low = onnx.TensorProto.BFLOAT16
    values = [*graph.input, *graph.output, *graph.value_info]
    found = [v.name for v in values if v.type.tensor_type.elem_type == low]
    # Weights that are cast before anything is computed with them are only kept so.
    used = {name for node in graph.node if node.op_type != "Cast" for name in node.input}
    found += [i.name for i in graph.initializer if i.data_type == low and i.name in used]
    if found:
        raise UnsupportedModelError(
            f"The model has values in bfloat16 ({found[0]}), for which ONNX Runtime has no CPU "
            "kernels. Export it in float32: model.float(), float32 where its code names bfloat16, "
            "and without torch.autocast. A factory, package.module:callable, is converted in "
            "float32 by linexport."
        )


def _check_outputs(program: torch.export.ExportedProgram, model: onnx.ModelProto) -> None:
    """Check that a symbolic size of a program output is symbolic in the graph as well."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    shapes = [getattr(x.meta.get("val"), "shape", ()) for x in output.args[0] if hasattr(x, "meta")]
    for shape, info in zip(shapes, model.graph.output, strict=False):
        for axis, (size, dim) in enumerate(
            zip(shape, info.type.tensor_type.shape.dim, strict=False)
        ):
            # torch may write a number as an expression of sizes that cancel.
            if dim.HasField("dim_value") and str(size) != str(dim.dim_value):
                raise BuildError(
                    f"The ONNX graph fixes dimension {axis} of the output {info.name} at "
                    f"{dim.dim_value}, where the traced program has {size}."
                )
