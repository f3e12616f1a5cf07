"""The inputs and outputs of a language model, changed to what another decoder feeds and carries.

- rename: a state gets another name.
- pack: several states become one, end to end, at the price of a copy at every step.
- count: rows of width 0 are added, for a decoder that reads the number of tokens off them.
- mask: one mask over all tokens so far, in place of one of new tokens and one of past ones.
- end at last tokens: what keeps the last inputs keeps those before padding on the right.

The nodes that compute this are put before and after those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.errors import UsageError
from linexport.graph.states import State
from linexport.graph.walk import rename_values
from linexport.manifest.records import KEY_VALUES

MASK, MASK_STATE, COUNT_STATE = "attention_mask", "past_mask", "past_count"
"""Names of the input of a mask, and of the states that a mask over all tokens so far tells."""

ROWS = re.compile(r"past_(key|value)_(0|[1-9]\d{0,4})", re.ASCII)
"""Names of the states that are rows of attention, with the layer."""

CONVOLUTION = "CausalConvWithState"

LAST_INPUTS = (CONVOLUTION, "Window", KEY_VALUES)
"""Ops of states that are the last inputs of something."""

NUMBERED = re.compile(r"past_[a-z]+_(0|[1-9]\d{0,4})", re.ASCII)


def rows(state: State) -> tuple[str, int] | None:
    """Return ``key`` or ``value`` and the layer of rows (B, H, T, d); None for other states."""
    name = ROWS.fullmatch(state.past)
    if name is None or len(state.shape) != 4 or state.growing_axis != 2:
        return None
    return name[1], int(name[2])


def layer(state: State) -> int:
    """Return the layer that the name of a state ends with; 0 where it ends with none."""
    name = NUMBERED.fullmatch(state.past)
    return 0 if name is None else int(name[1])


def recurrent(states: Sequence[State]) -> list[State]:
    """Return the states that do not grow with the tokens, except those computed from the mask."""
    from_mask = (MASK_STATE, COUNT_STATE)
    return [s for s in states if s.growing_axis is None and s.past not in from_mask]


def pairs(states: Sequence[State]) -> list[tuple[State, State]] | None:
    """Return convolution and recurrent state of each layer, if that is what the states are."""
    fixed = recurrent(states)
    firsts, seconds = fixed[::2], fixed[1::2]
    alike = all(
        len({(s.shape[1:], s.dtype) for s in side}) == 1 and len(side[0].shape) == rank
        for side, rank in ((firsts, 3), (seconds, 4))
        if side
    )
    if not fixed or len(fixed) % 2 or not alike:
        return None
    return list(zip(firsts, seconds, strict=True))


class Rewiring:
    """Changes the inputs and outputs of a model in place; ``finish`` ends it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self._before: list[onnx.NodeProto] = []
        self._after: list[onnx.NodeProto] = []

    def finish(self) -> None:
        """Put the nodes that were added where they are computed in order."""
        nodes = [*self._before, *self.graph.node, *self._after]
        del self.graph.node[:]
        self.graph.node.extend(nodes)

    def rename(self, state: State, past: str, present: str) -> None:
        """Give a state other names."""
        self.call(state.past, past)
        self.call(state.present, present)

    def call(self, old: str, new: str) -> None:
        """Call an input or an output by another name everywhere."""
        next(i for i in (*self.graph.input, *self.graph.output) if i.name == old).name = new
        rename_values(self.graph, {old: new})

    def pack(self, states: Sequence[State], past: str, present: str, ones: int = 0) -> None:
        """Make one state of several: (B, 1, ..., N), with ``ones`` dimensions of 1 between.

        Raises:
            UsageError: they are not all float32.
        """
        if {s.dtype for s in states} != {"float32"}:
            raise UsageError("States that are not all float32 cannot be packed for this runtime.")
        axis, filled = ones + 1, [1] * ones
        sizes = [prod(int(str(d)) for d in s.shape[1:]) for s in states]
        self._replace_states(states, past, present, [*filled, sum(sizes)])
        flat = [f"{s.past}/flat" for s in states]
        split = self._constant("pack/sizes", sizes)
        self._before.append(helper.make_node("Split", [past, split], flat, axis=axis))
        for state, piece in zip(states, flat, strict=True):
            shape = self._constant(f"{state.past}/shape", [0, *state.shape[1:]])
            self._before.append(helper.make_node("Reshape", [piece, shape], [state.past]))
        row = self._constant("pack/row", [0, *filled, -1])
        rows = [f"{s.present}/flat" for s in states]
        for state, piece in zip(states, rows, strict=True):
            self._after.append(helper.make_node("Reshape", [state.present, row], [piece]))
        self._after.append(helper.make_node("Concat", rows, [present], axis=axis))

    def end_at_last_tokens(self, states: Sequence[State]) -> list[State]:
        """Let states that are the last inputs be those of each row's last tokens.

            present = joined[..., T - n : T - n + kept, ...],    joined = [past, new]

        with T tokens in a call, of which the last n of a row are padding. Called before states are
        renamed; to be left out for a model without a mask.

        Returns:
            The states that cannot be changed so.
        """
        kept = [s for s in recurrent(states) if s.op in LAST_INPUTS]
        producer = {name: node for node in self.graph.node for name in node.output}
        found = [(state, self._joined(state, producer)) for state in kept]
        if any(joined for _, joined in found):
            self._count_to_last_tokens()
        for state, joined in found:
            if joined is not None:
                self._gather(state, producer[state.present], joined)
        return [state for state, joined in found if joined is None]

    def _joined(self, state: State, producer: Mapping[str, onnx.NodeProto]) -> str | None:
        """Return the value that a state is the end of, (B, ., kept + T, ...); None if unknown."""
        node = producer[state.present]
        if node.op_type == CONVOLUTION:
            joined = f"{state.past}/joined"
            inputs = [state.past, node.input[0]]
            self.graph.node.append(helper.make_node("Concat", inputs, [joined], axis=2))
            return joined
        source = producer.get(node.input[0]) if node.op_type == "Slice" else None
        if source is None or source.op_type != "Concat" or source.input[0] != state.past:
            return None
        axis = next(a.i for a in source.attribute if a.name == "axis")
        return source.output[0] if axis in (2, 2 - len(state.shape)) else None

    def _count_to_last_tokens(self) -> None:
        """Compute how many tokens of a call end with the last of each row, (B, 1)."""
        nodes, one = self.graph.node, self._constant("ends/one", [1])
        self.graph.initializer.append(numpy_helper.from_array(np.array(1), "ends/first"))
        nodes.append(helper.make_node("Shape", [MASK], ["ends/length"], start=1, end=2))
        nodes.append(helper.make_node("Add", ["ends/length", one], ["ends/after"]))
        nodes.append(helper.make_node("Squeeze", ["ends/after", "ends/axis"], ["ends/stop"]))
        self._constant("ends/axis", [0])
        numbers = ["ends/first", "ends/stop", "ends/first"]
        nodes.append(helper.make_node("Range", numbers, ["ends/places"]))
        nodes.append(helper.make_node("Mul", [MASK, "ends/places"], ["ends/of_tokens"]))
        nodes.append(helper.make_node("ReduceMax", ["ends/of_tokens", one], ["ends/last"]))
        nodes.append(helper.make_node("Equal", ["ends/last", "ends/length"], ["ends/whole"]))

    def _gather(self, state: State, node: onnx.NodeProto, joined: str) -> None:
        """Take a state from the places before each row's padding."""
        name, nodes = state.present, self.graph.node
        whole = f"{name}/whole"
        node.output[:] = [whole if output == name else output for output in node.output]
        axes = self._constant(f"{name}/axes", [1, *range(3, len(state.shape))])
        self._constant(f"{name}/offsets", [[*range(int(str(state.shape[2])))]])
        steps = (
            ("Add", ["ends/last", f"{name}/offsets"], f"{name}/places"),
            ("Unsqueeze", [f"{name}/places", axes], f"{name}/index"),
            ("Shape", [whole], f"{name}/shape"),
            ("Expand", [f"{name}/index", f"{name}/shape"], f"{name}/everywhere"),
            ("Unsqueeze", ["ends/whole", axes], f"{name}/is_whole"),
        )
        nodes.extend(helper.make_node(op, inputs, [output]) for op, inputs, output in steps)
        gathered, places = f"{name}/gathered", [joined, f"{name}/everywhere"]
        nodes.append(helper.make_node("GatherElements", places, [gathered], axis=2))
        # Also where nothing is padded, it waits until the past was read, whose memory it may take.
        choice = [f"{name}/is_whole", whole, gathered]
        nodes.append(helper.make_node("Where", choice, [name]))

    def pass_through(self, past: str, present: str, sizes: Sequence[int]) -> None:
        """Add a state (B, *sizes) that nothing reads."""
        self._replace_states([], past, present, sizes)
        self._after.append(helper.make_node("Identity", [past], [present]))

    def count_tokens(self, tokens: str, past: str, present: str) -> None:
        """Add rows of width 0, (B, 1, T, 0), whose number is that of the tokens so far.

        Args:
            tokens: name of the input of token ids, (B, T).
            past: name of the rows before.
            present: name of the rows after.
        """
        self._replace_states([], past, present, [1, "past", 0])
        axes, zero = self._constant("count/axes", [1, 3]), self._constant("count/zero", [0])
        last = self._constant("count/last", [3])
        self._after += [
            helper.make_node("Unsqueeze", [tokens, axes], ["count/ids"]),
            helper.make_node("Cast", ["count/ids"], ["count/floats"], to=TensorProto.FLOAT),
            helper.make_node("Slice", ["count/floats", zero, zero, last], ["count/new"]),
            helper.make_node("Concat", [past, "count/new"], [present], axis=2),
        ]

    def _replace_states(
        self, states: Sequence[State], past: str, present: str, sizes: Sequence[int | str]
    ) -> None:
        """Declare one input and one output, (B, *sizes) float32, in the place of some states."""
        gone = {name for s in states for name in (s.past, s.present)}
        for infos, name in ((self.graph.input, past), (self.graph.output, present)):
            new = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *sizes])
            _keep(infos, [i for i in infos if i.name not in gone] + [new])

    def mask(self, tokens: str, states: Sequence[State]) -> None:
        """Read the masks of past and of new tokens from one of all, where the model has a mask.

        Args:
            tokens: name of the input of token ids.
            states: of the model.
        """
        found = next((i for i in self.graph.input if i.name == MASK), None)
        if found is None:
            return
        found.type.tensor_type.shape.dim[1].dim_param = "total"
        total = f"{MASK}/total"
        rename_values(self.graph, {MASK: f"{MASK}/new"})
        axis = self._constant("mask/axis", [1])
        self._before += [
            helper.make_node("Shape", [tokens], ["mask/length"], start=1, end=2),
            helper.make_node("Shape", [MASK], [total], start=1, end=2),
            helper.make_node("Sub", [total, "mask/length"], ["mask/start"]),
            helper.make_node("Slice", [MASK, "mask/start", total, axis], [f"{MASK}/new"]),
        ]
        from_mask = [s for s in states if s.past in (MASK_STATE, COUNT_STATE)]
        if from_mask:
            self._constant("mask/zero", [0])
        for state in from_mask:
            self._read_from_mask(state)
            for infos in (self.graph.input, self.graph.output):
                _keep(infos, [i for i in infos if i.name not in (state.past, state.present)])

    def _read_from_mask(self, state: State) -> None:
        """Compute the mask of past tokens, all or the last ones, or their number."""
        before = ["mask/zero", "mask/start", "mask/axis"]
        if state.growing_axis is not None:
            self._before.append(helper.make_node("Slice", [MASK, *before], [state.past]))
            return
        past, count = f"{state.past}/all", f"{state.past}/count"
        counted = state.past if state.past == COUNT_STATE else count
        self._before += [
            helper.make_node("Slice", [MASK, *before], [past]),
            helper.make_node("ReduceSum", [past, "mask/axis"], [counted], keepdims=1),
        ]
        if state.past == COUNT_STATE:
            return
        # A window ends with tokens; one that is not full yet begins with padding.
        places = [[*range(int(str(state.shape[1])), 0, -1)]]
        filled = [count, self._constant(f"{state.past}/places", places)]
        self._before += [
            helper.make_node("GreaterOrEqual", filled, [f"{state.past}/filled"]),
            helper.make_node("Cast", [f"{state.past}/filled"], [state.past], to=TensorProto.INT64),
        ]

    def _constant(self, name: str, values: Sequence[object]) -> str:
        array = np.asarray(values, np.int64)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


def _keep(infos: Any, kept: Sequence[onnx.ValueInfoProto]) -> None:
    copied = [onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in kept]
    del infos[:]
    infos.extend(copied)
