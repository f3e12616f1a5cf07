"""Choices that an artifact makes by scores, as a router does of its experts: read and replaced.

A choice is a node of the graph that gives places along an axis, TopK or ArgMax, or whole numbers in
place of others, Round. A copy of the graph gives them as outputs, or takes them as inputs:

    values, places = TopK(scores, k)    ->    values = GatherElements(scores, places)
    numbers = Round(values)             ->    numbers is an input

Choices are arrays (..., k) here, whatever their axis is in the graph: places are integers, numbers
are floating.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from linexport.parity.reference.extra_outputs import OpenChanged, outputs_of
from linexport.plugins.ops.op import attribute_value

log = logging.getLogger(__name__)

ROUND = "Round"
CHOOSING = ("ArgMax", "ArgMin", "TopK", ROUND)

Arrays = Mapping[str, np.ndarray]
"""By name."""


@dataclass(frozen=True)
class Made:
    """A choice as a program makes it, and one that is taken in its stead.

    Attributes:
        scores: (rows, n).
        own: places that the program chooses, (rows, k).
        taken: places that are taken, (rows, k).
        largest: the largest scores are chosen, else the smallest.
        ordered: places are in the order of the scores.
    """

    scores: np.ndarray
    own: np.ndarray
    taken: np.ndarray
    largest: bool
    ordered: bool

    @property
    def count(self) -> int:
        """Return the number of choices."""
        return len(self.own)


@dataclass(frozen=True)
class Rounded:
    """Values that a program rounds to whole numbers, and numbers that are taken in their stead.

    Attributes:
        scores: the values, (rows, n).
        own: numbers of the program, (rows, n).
        taken: numbers that are taken, (rows, n).
    """

    scores: np.ndarray
    own: np.ndarray
    taken: np.ndarray

    @property
    def count(self) -> int:
        """Return the number of choices."""
        return self.own.size


Choice = Made | Rounded


class _NoChoicesError(Exception):
    """There is nothing to record."""


class RecordingSession:
    """An artifact that keeps what it chooses, call by call.

    Args:
        open_changed: opens it with its graph changed.
        values: further values of the graph that it gives as outputs.

    Raises:
        Exception: it makes no choices, or cannot be opened so; see ``recording``.
    """

    def __init__(self, open_changed: OpenChanged, values: Collection[str] = ()) -> None:
        self._nodes: dict[str, onnx.NodeProto] = {}
        self._calls: list[dict[str, np.ndarray]] = []

        def expose(model: onnx.ModelProto) -> None:
            self._nodes = _choosing(model)
            if not self._nodes:
                raise _NoChoicesError
            model.graph.output.extend(outputs_of(model, {*self._nodes, *values}))

        self._session = open_changed(expose)

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name, without the choices."""
        outputs = self._session.run(inputs)
        made = {name: _axis_last(node, outputs[name]) for name, node in self._nodes.items()}
        self._calls.append(made)
        return {name: value for name, value in outputs.items() if name not in made}

    def choices(self, batch: int) -> dict[str, np.ndarray]:
        """Return what was chosen since the last call, by value, in the order of the nodes.

        Calls are joined to one, as pieces of ``batch`` sequences: (batch, tokens, k). What is not
        chosen of so many sequences is left out then.
        """
        calls, self._calls = self._calls, []
        if len(calls) == 1:
            return calls[0]
        parts = {name: [call[name] for call in calls] for name in self._nodes}
        return {
            name: np.concatenate([x.reshape(batch, -1, x.shape[-1]) for x in found], 1)
            for name, found in parts.items()
            if len({x.shape[-1] for x in found}) == 1
            and all(x.size % (batch * x.shape[-1]) == 0 for x in found)
        }


def recording(
    open_changed: OpenChanged | None, values: Collection[str] = ()
) -> RecordingSession | None:
    """Return a session; None where the artifact cannot be opened so, or makes no choices."""
    if open_changed is None:
        return None
    try:
        return RecordingSession(open_changed, values)
    except _NoChoicesError:
        return None
    except Exception as error:  # ONNX Runtime has no class for its own
        log.info("what the artifact chooses is not known: %s", error)
        return None


def choices_of(open_changed: OpenChanged | None, inputs: Arrays, batch: int) -> Arrays:
    """Return what an artifact chooses in one call, by value; nothing where that is not known."""
    session = recording(open_changed)
    if session is None:
        return {}
    session.run(inputs)
    return session.choices(batch)


def run_with(
    open_changed: OpenChanged, inputs: Arrays, choices: Arrays, values: Collection[str] = ()
) -> tuple[dict[str, np.ndarray], list[Choice]]:
    """Run an artifact with choices taken as they are given.

    Args:
        open_changed: opens it with its graph changed.
        inputs: of one call.
        choices: for this call, by value.
        values: further values of the graph to give as outputs.

    Returns:
        Its outputs, and the choices with the scores they were made by.
    """
    nodes: dict[str, onnx.NodeProto] = {}

    def replace(model: onnx.ModelProto) -> None:
        nodes.update((n, node) for n, node in _choosing(model).items() if n in choices)
        scores = [node.input[0] for node in nodes.values()]
        model.graph.output.extend(outputs_of(model, {*scores, *values}))
        left = [_without_choice(n) if _places(n) in nodes else n for n in model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(node for node in left if node is not None)
        for name in nodes:
            kind = helper.np_dtype_to_tensor_dtype(choices[name].dtype)
            model.graph.input.append(helper.make_tensor_value_info(name, kind, None))

    session = open_changed(replace)
    taken = {name: _axis_back(node, choices[name]) for name, node in nodes.items()}
    outputs = session.run({**inputs, **taken})
    made = [_made(node, outputs[node.input[0]], choices[n]) for n, node in nodes.items()]
    return outputs, made


def _choosing(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Return copies of the nodes that choose by the name of what they choose, which all have."""
    found = {}
    for node in model.graph.node:
        if node.op_type in CHOOSING and not node.domain:
            if node.op_type == "TopK" and not _places(node):
                del node.output[1:]
                node.output.append(f"{node.output[0]}__places")
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            found[_places(node)] = copy
    return found


def _places(node: onnx.NodeProto) -> str:
    """Return the name of the places that a node gives last; "" where it does not."""
    names = node.output if node.op_type != "TopK" else node.output[1:]
    return names[0] if names and node.op_type in CHOOSING else ""


def _without_choice(node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the node that takes scores at given places; None where nothing reads them."""
    if node.op_type != "TopK" or not node.output[0]:
        return None
    return helper.make_node(
        "GatherElements",
        [node.input[0], node.output[1]],
        node.output[:1],
        axis=_option(node, "axis"),
    )


def _option(node: onnx.NodeProto, name: str) -> int:
    defaults = {"axis": -1 if node.op_type in ("TopK", ROUND) else 0, "keepdims": 1}
    given = {a.name: attribute_value(a) for a in node.attribute}
    return int(given.get(name, defaults.get(name, 1)))


def _is_squeezed(node: onnx.NodeProto) -> bool:
    return node.op_type != "TopK" and not _option(node, "keepdims")


def _axis_last(node: onnx.NodeProto, places: np.ndarray) -> np.ndarray:
    if not places.ndim:  # a number that is rounded
        return places[None]
    axis = _option(node, "axis")
    places = np.expand_dims(places, axis) if _is_squeezed(node) else places
    return np.moveaxis(places, axis, -1)


def _axis_back(node: onnx.NodeProto, places: np.ndarray) -> np.ndarray:
    axis = _option(node, "axis")
    found = np.ascontiguousarray(np.moveaxis(places, -1, axis))
    return found.squeeze(axis) if _is_squeezed(node) else found


def _made(node: onnx.NodeProto, scores: np.ndarray, taken: np.ndarray) -> Choice:
    scores = np.moveaxis(scores, _option(node, "axis"), -1)
    scores, taken = (x.reshape(-1, x.shape[-1]) for x in (scores, taken))
    if node.op_type == ROUND:
        return Rounded(scores, np.rint(scores), taken)
    largest = node.op_type == "ArgMax" or (
        node.op_type == "TopK" and bool(_option(node, "largest"))
    )
    own = np.argsort(-scores if largest else scores, -1, kind="stable")[:, : taken.shape[-1]]
    return Made(scores, own, taken, largest, bool(_option(node, "sorted")))
