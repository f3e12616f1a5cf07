"""A graph cut at some of its values: parts that are run one after another.

    inputs -> [0] -> v_0 -> [1] -> v_1 -> ... -> [n] -> outputs

A part has the nodes between the values it begins from and those it gives. What follows from the
inputs alone, such as masks and rotary embeddings, is computed in every part that needs it. Parts
may read how long the states of others are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from linexport.errors import UnsupportedModelError
from linexport.graph.outputs import value_info, with_outputs
from linexport.graph.walk import reads


@dataclass(frozen=True)
class Segment:
    """A part of a graph.

    Attributes:
        model: its nodes and initializers, with the values it begins from as inputs.
        inputs: names of inputs of the whole graph that it reads.
        begins: names of the cut values that it reads.
        ends: the cut value that it gives; None for the last part.
        outputs: names of outputs of the whole graph that it gives.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    begins: tuple[str, ...]
    ends: str | None
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """Nodes by position, and the names that they read and do not compute."""

    nodes: frozenset[int]
    read: frozenset[str]


def cut(model: onnx.ModelProto, values: Sequence[str], states: Mapping[str, str]) -> list[Segment]:
    """Cut a graph at values that follow one another.

    Args:
        model: its initializers may be external; is not changed.
        values: names, in the order of the graph; of floating-point numbers.
        states: outputs that continue inputs, by input.

    Returns:
        One part more than there are values. Every output of the graph is given by the first part
        that can compute it from the cut values before it. What continues a state and follows from
        the inputs alone, such as a mask, is given by all parts that read that state.

    Raises:
        UnsupportedModelError: the graph does not compute one of the values.
    """
    made = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    absent = [name for name in values if name not in made]
    if absent:
        raise UnsupportedModelError(
            f"The graph has no value {absent[0]}, at which it would be cut: a rewrite removed it."
        )
    place = {name: i for i, name in enumerate(values)}
    given: list[list[str]] = [[] for _ in range(len(values) + 1)]
    for output in model.graph.output:
        found = _part(model, made, [output.name], place.keys() - {output.name})
        own = place.get(output.name)
        after = max((place[name] + 1 for name in found.read & place.keys()), default=0)
        given[after if own is None else own].append(output.name)
    segments = []
    for index, outputs in enumerate(given):
        end = values[index] if index < len(values) else None
        targets = [*outputs, *([end] if end is not None and end not in outputs else [])]
        part = _part(model, made, targets, place.keys() - {*targets})
        more = [
            states[name]
            for name in sorted(part.read & states.keys())
            if states[name] not in outputs
            and not _part(model, made, [states[name]], place.keys()).read & place.keys()
        ]
        part = _part(model, made, [*targets, *more], place.keys() - {*targets})
        later = [name for name in part.read if place.get(name, -1) >= index]
        if later:
            raise UnsupportedModelError(
                f"The value {end or outputs[0]} is computed from {later[0]}, which follows it: the "
                "graph cannot be cut there."
            )
        segments.append(_segment(model, part, (*outputs, *more), end, place))
    return segments


def rest(
    segment: Segment,
    targets: Sequence[str],
    known: Mapping[str, NDArray],
    states: Mapping[str, str],
) -> Segment:
    """Return the part of a segment that computes values from others that were computed before.

    Args:
        segment: is not changed.
        targets: names of values that it computes.
        known: values inside it that begin the part, where the targets read them, by name; any of
            their type and rank, without which ONNX Runtime does not prepare a Scan.
        states: see ``cut``.

    Returns:
        A segment that gives the targets, and what continues the states that it reads.
    """
    made = {name: i for i, node in enumerate(segment.model.graph.node) for name in node.output}
    stops = {*known, *segment.begins} - {*targets}
    continued: set[str] = set()
    while True:
        part = _part(segment.model, made, [*targets, *continued], stops)
        more = {states[name] for name in part.read & states.keys()} & made.keys()
        if more <= continued:
            break
        continued |= more
    place = {name: i for i, name in enumerate([*segment.begins, *known])}
    outputs = tuple(dict.fromkeys([*sorted(continued), *targets]))
    found = _segment(segment.model, part, outputs, None, place)
    for given in found.model.graph.input:
        value = known.get(given.name)
        if value is not None:
            dtype, rank = helper.np_dtype_to_tensor_dtype(value.dtype), value.ndim
            given.CopyFrom(helper.make_tensor_value_info(given.name, dtype, [None] * rank))
    return replace(found, model=with_outputs(found.model, outputs), outputs=outputs)


def stand_in(initial: NDArray, axis: int | None, length: int) -> NDArray:
    """Return zeros for a state of another part, of which only the length is read.

    Args:
        initial: the state before the first token.
        axis: along which it grows; None: it does not.
        length: tokens before.
    """
    if axis is None:
        return initial
    shape = (*initial.shape[:axis], length, *initial.shape[axis + 1 :])
    return np.zeros(shape, initial.dtype)


def _part(
    model: onnx.ModelProto, made: dict[str, int], targets: Iterable[str], stops: Collection[str]
) -> _Part:
    """Return the nodes that compute the target values from the stops."""
    nodes: set[int] = set()
    read: set[str] = set()
    left = list(targets)
    while left:
        name = left.pop()
        if name in stops or name not in made:
            read.add(name)
        elif made[name] not in nodes:
            nodes.add(made[name])
            left.extend(reads(model.graph.node[made[name]]))
    return _Part(frozenset(nodes), frozenset(read))


def _segment(
    model: onnx.ModelProto,
    part: _Part,
    outputs: tuple[str, ...],
    end: str | None,
    place: dict[str, int],
) -> Segment:
    graph = model.graph
    begins = tuple(sorted((name for name in part.read if name in place), key=place.__getitem__))
    known = {found.name: found for found in [*graph.input, *graph.value_info, *graph.output]}
    made = onnx.ModelProto(ir_version=model.ir_version)
    made.opset_import.extend(model.opset_import)
    made.functions.extend(model.functions)
    made.graph.name = graph.name
    made.graph.node.extend(graph.node[i] for i in sorted(part.nodes))
    made.graph.initializer.extend(t for t in graph.initializer if t.name in part.read)
    others = {*begins, *(t.name for t in graph.initializer)}
    own = [i for i in graph.input if i.name in part.read and i.name not in others]
    made.graph.input.extend([*own, *(value_info(name, known) for name in begins)])
    made.graph.output.extend(o for o in graph.output if o.name in outputs)
    if end is not None and end not in outputs:
        made.graph.output.append(value_info(end, known))
    return Segment(made, tuple(i.name for i in own), begins, end, outputs)
