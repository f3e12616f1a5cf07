"""The inputs and outputs of a language model, changed to what another decoder feeds and carries.

- rename: a state gets another name.
- pack: several states become one, end to end, at the price of a copy at every step.
- count: rows of width 0 are added, for a decoder that asks rows for the number of tokens.
- mask: one mask over all tokens so far, in place of one of new tokens and one of past ones.

The nodes that compute this are put before and after those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.errors import UsageError
from linexport.graph.states import State
from linexport.graph.walk import rename_values

MASK, MASK_STATE, COUNT_STATE = "attention_mask", "past_mask", "past_count"
"""Names of the input of a mask, and of the states that a mask over all tokens so far tells."""

ROWS = re.compile(r"past_(key|value)_(0|[1-9]\d{0,4})", re.ASCII)
"""Names of the states that are rows of attention, with the layer."""

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
    """Return the states that do not grow with the tokens, except those that a mask tells."""
    told = (MASK_STATE, COUNT_STATE)
    return [s for s in states if s.growing_axis is None and s.past not in told]


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
        told = [s for s in states if s.past in (MASK_STATE, COUNT_STATE)]
        if told:
            self._constant("mask/zero", [0])
        for state in told:
            self._read_from_mask(state)
            for infos in (self.graph.input, self.graph.output):
                _keep(infos, [i for i in infos if i.name not in (state.past, state.present)])

    def _read_from_mask(self, state: State) -> None:
        """Compute the mask of past tokens, all or the last ones, or their number."""
        before = ["mask/zero", "mask/start", "mask/axis"]
        if state.growing_axis is not None:
            self._before.append(helper.make_node("Slice", [MASK, *before], [state.past]))
            return
        # A window that is not full yet begins with padding.
        kept, padded = int(str(state.shape[1])), f"{state.past}/padded"
        pads = self._constant(f"{state.past}/pads", [0, kept, 0, 0])
        self._before += [
            helper.make_node("Slice", [MASK, *before], [f"{state.past}/all"]),
            helper.make_node("Pad", [f"{state.past}/all", pads], [padded]),
        ]
        if state.past == COUNT_STATE:
            node = helper.make_node("ReduceSum", [padded, "mask/axis"], [state.past], keepdims=1)
        else:
            first = self._constant(f"{state.past}/first", [-kept])
            last = self._constant(f"{state.past}/last", [np.iinfo(np.int64).max])
            node = helper.make_node("Slice", [padded, first, last, "mask/axis"], [state.past])
        self._before.append(node)

    def _constant(self, name: str, values: Sequence[Any]) -> str:
        array = np.asarray(values, np.int64)
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


def _keep(infos: Any, kept: Sequence[onnx.ValueInfoProto]) -> None:
    copied = [onnx.ValueInfoProto.FromString(i.SerializeToString()) for i in kept]
    del infos[:]
    infos.extend(copied)
