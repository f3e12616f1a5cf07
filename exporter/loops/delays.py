"""States of a Scan that are tokens of the step before -> tokens one later, in front of the loop.

    Scan over x: h' = a h + x - p; p' = x    ->    P = Pad(X, 1 in front, -1 behind)
                                                   Scan over x, p: h' = a h + x - p

An output that is a token as the loop reads it is taken from in front of the loop as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import index_of, is_read, original_of
from linexport.graph.partial_eval import Values
from linexport.graph.scan_body import has_directions, is_linear_scan
from linexport.graph.tensors import known_shape
from linexport.loops.state_components import read_groups
from linexport.loops.step_nodes import keep_outputs, output_axes, scanned_axes
from linexport.loops.vectorize_over_time import ScannedTokens


class Delay(NamedTuple):
    """A state of the token before.

    Attributes:
        place: of the state.
        tokens: all of them, and their axis.
    """

    place: int
    tokens: ScannedTokens


def delayed_states(values: Values, alone: bool, graph: gs.Graph, scan: gs.Node) -> Delay | None:
    """Return the first state of a linear Scan that is the token before; None where none is.

    Args:
        values: of the graph.
        alone: whether the Scan may have no other recurrence: it is a part of a Scan that had one.
        graph: that the Scan is in.
        scan: the loop.
    """
    if not is_linear_scan(scan):
        return None
    known = read_groups(scan, values)
    if not alone and not (known and any(map(known.is_recurrence, known.groups))):
        return None
    tokens = _tokens(scan)
    count = len(scan.inputs) - len(tokens)
    for place in range(count):
        found = tokens.get(original_of(scan.attrs["body"].outputs[place]).name)
        zero = values.is_zero(scan.inputs[place])
        # x_{t-1} with 0 before the first token is x padded by one zero in front. The last state,
        # x_T, is not in the padded tokens: nothing may read it.
        if found is None or not zero or is_read(graph, scan.outputs[place]):
            continue
        # Such shifts have a state of their own in an artifact that streams.
        if len(known_shape(found.tensor)) == 3 and found.tensor.dtype in (np.float32, np.float16):
            return Delay(place, found)
    return None


def shift_tokens(graph: gs.Graph, scan: gs.Node, delay: Delay) -> None:
    """Let the Scan read the tokens one later in the place of the state."""
    body, axes, (given, axis) = scan.attrs["body"], scanned_axes(scan), delay.tokens
    stem = f"{scan.name or scan.outputs[0].name}/{body.inputs[delay.place].name}"
    nodes: list[gs.Node] = []
    if not axis:
        # The batch is first where shifts of tokens get a state.
        shape = [known_shape(given)[i] for i in (1, 0, 2)]
        turned = gs.Variable(f"{stem}/tokens", given.dtype, shape)
        nodes.append(gs.Node("Transpose", turned.name, {"perm": [1, 0, 2]}, [given], [turned]))
        given, axis = turned, 1
    pads = np.zeros((2, 3), np.int64)
    # One zero in front and the last token off: row t is then token t - 1.
    pads[:, axis] = 1, -1
    amounts = gs.Constant(f"{stem}/pads", pads.flatten())
    before = gs.Variable(f"{stem}/before", given.dtype, list(known_shape(given)))
    nodes.append(gs.Node("Pad", before.name, {}, [given, amounts], [before]))
    place = index_of(graph, scan)
    graph.nodes[place:place] = nodes
    state = body.inputs[delay.place]
    body.inputs = [*(t for t in body.inputs if t is not state), state]
    body.outputs = [t for i, t in enumerate(body.outputs) if i != delay.place]
    scan.inputs = [*(t for i, t in enumerate(scan.inputs) if i != delay.place), before]
    scan.outputs = [t for i, t in enumerate(scan.outputs) if i != delay.place]
    scan.attrs["scan_input_axes"] = [*axes, axis]
    scan.attrs["num_scan_inputs"] = len(axes) + 1


def given_tokens(graph: gs.Graph, scan: gs.Node) -> list[tuple[int, ScannedTokens]] | None:
    """Return the outputs of a Scan that are tokens it reads, by their places; None without any."""
    if scan.op != "Scan" or has_directions(scan):
        return None
    tokens = _tokens(scan)
    count = len(scan.inputs) - len(tokens)
    outputs = scan.attrs["body"].outputs
    named = [(i, tokens.get(original_of(outputs[i]).name)) for i in range(count, len(outputs))]
    return [(i, found) for i, found in named if found is not None] or None


def give_tokens(graph: gs.Graph, scan: gs.Node, given: list[tuple[int, ScannedTokens]]) -> None:
    """Let what reads such outputs read the tokens."""
    axes, nodes = output_axes(scan), []
    count = len(scan.outputs) - len(axes)
    for place, (tensor, axis) in given:
        output, rank = scan.outputs[place], len(known_shape(tensor))
        # Stacked outputs have their steps along an axis of the Scan's choice.
        order = [i for i in range(rank) if i != axis]
        order.insert(axes[place - count], axis)
        nodes.append(
            gs.Node("Transpose", f"{output.name}/tokens", {"perm": order}, [tensor], [output])
        )
    gone = {place for place, _ in given}
    keep_outputs(scan, [i for i in range(len(scan.outputs)) if i not in gone])
    place = index_of(graph, scan)
    graph.nodes[place + 1 : place + 1] = nodes


def _tokens(scan: gs.Node) -> dict[str, ScannedTokens]:
    """Return the tokens of a Scan by the names that they have in a step."""
    axes = scanned_axes(scan)
    inner, outer = (inputs[-len(axes) :] for inputs in (scan.attrs["body"].inputs, scan.inputs))
    found = zip(inner, outer, axes, strict=True)
    return {own.name: ScannedTokens(tensor, axis) for own, tensor, axis in found}
