"""Inputs, outputs and states of a graph: their records, and a manifest compared with them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx

from linexport.errors import UsageError
from linexport.graph.states import initial_values
from linexport.manifest import Manifest
from linexport.manifest.records import InputRecord, StateRecord, TensorRecord, VisionRecord
from linexport.plugins.ops.registry import dim_of


def input_records(
    infos: Iterable[onnx.ValueInfoProto], defaults: Mapping[str, int] | None = None
) -> tuple[InputRecord, ...]:
    """Name, dtype, shape and default of graph inputs."""
    known = defaults or {}
    return tuple(InputRecord(**vars(t), default=known.get(t.name)) for t in tensor_records(infos))


def tensor_records(infos: Iterable[onnx.ValueInfoProto]) -> tuple[TensorRecord, ...]:
    """Name, dtype and shape of graph inputs or outputs; "unknown" where numpy has no such dtype."""
    return tuple(
        TensorRecord(
            info.name,
            _dtype(info.type.tensor_type.elem_type),
            tuple(dim_of(d) for d in info.type.tensor_type.shape.dim),
        )
        for info in infos
    )


def _dtype(element: int) -> str:
    try:
        return onnx.helper.tensor_dtype_to_np_dtype(element).name
    except KeyError:
        return "unknown"


def check_interface(manifest: Manifest, model: onnx.ModelProto, name: str) -> None:
    """Compare a manifest with a graph.

    Args:
        manifest: of the artifact.
        model: its graph; weights may be left out.
        name: the manifest's file, for the error.

    Raises:
        UsageError: they differ; says where.
    """
    graph = model.graph
    stored = {t.name for t in graph.initializer}
    inputs = tensor_records(i for i in graph.input if i.name not in stored)
    described = manifest.packed or manifest
    problems = [
        *_differences("input", described.inputs, inputs),
        *_differences("output", described.outputs, tensor_records(graph.output)),
    ]
    taken = {i.name: i for i in inputs}
    made = {o.name for o in graph.output}
    for state in manifest.states:
        if state.past not in taken or state.present not in made:
            problems.append(f"the model has no state {state.past} -> {state.present}")
        else:
            problems += _state(state, taken[state.past])
    problems += _initial(manifest, model)
    if problems:
        raise UsageError(
            f"{name} does not describe its model file: {problems[0]}. Convert the model again."
        )


def check_tower(vision: VisionRecord, model: onnx.ModelProto, name: str) -> None:
    """Compare the record of a vision tower with its graph.

    Args:
        vision: of the manifest.
        model: the tower's graph; weights may be left out.
        name: the manifest's file, for the error.

    Raises:
        UsageError: they differ.
    """
    graph = model.graph
    problems = [
        *_differences("input", vision.inputs, tensor_records(graph.input)),
        *_differences("output", vision.outputs, tensor_records(graph.output)),
    ]
    if problems:
        raise UsageError(
            f"{name} does not describe {vision.file}: {problems[0]}. Convert the model again."
        )


def _differences(
    what: str, described: Iterable[TensorRecord], found: Iterable[TensorRecord]
) -> Iterator[str]:
    said, there = ({r.name: r for r in records} for records in (described, found))
    for name in sorted(said.keys() ^ there.keys()):
        yield f"the {what} {name} is in {'the manifest' if name in said else 'the model'} alone"
    if said.keys() == there.keys() and list(said) != list(there):
        yield f"the {what}s are {list(there)}, in this order"
    for name in sorted(said.keys() & there.keys()):
        one, other = said[name], there[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield (
                f"the {what} {name} is said to be {one.dtype} {list(one.shape)}; it is "
                f"{other.dtype} {list(other.shape)}"
            )


def _state(state: StateRecord, taken: TensorRecord) -> Iterator[str]:
    """A state has the input's type; it grows along its only dynamic axis after the batch."""
    if (state.dtype, state.shape) != (taken.dtype, taken.shape):
        yield f"the state {state.past} is not of the type of its input"
        return
    dynamic = [axis for axis, size in enumerate(taken.shape) if axis and not isinstance(size, int)]
    if dynamic != ([] if state.grows is None else [state.grows]):
        yield f"the state {state.past} is said to grow along axis {state.grows}; it does {dynamic}"


def _initial(manifest: Manifest, model: onnx.ModelProto) -> Iterator[str]:
    """Ops know what their states begin with; caches of softmax layers begin empty."""
    values = list(initial_values(model))
    known = {name: initial for group in values for name, initial in group.items()}
    inline = manifest.options.inline
    for state in () if inline else manifest.states:  # the ops that know are not in the graph
        initial = known.get(state.past, 0.0)
        if state.initial != initial:
            yield f"the state {state.past} is said to begin with {state.initial:g}, not {initial:g}"
    carried = {state.past for state in manifest.states}
    given = {i.name for i in model.graph.input}
    for group in values:
        # All or none: those of none are inputs of the original, which its caller carries.
        left = sorted((set(group) & given) - carried)
        if left and carried & set(group):
            yield f"the state {left[0]} is in the model alone"
