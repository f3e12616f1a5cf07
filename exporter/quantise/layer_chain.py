"""The float32 layers of a language model, one after another on all sequences.

    for each layer k:   for each sequence:   h_k = layer_k(h_{k-1})

Every layer is opened once, from a temporary file, and runs its sequences in pieces with the states
it carries. What it hands on is in memory-mapped files; its weights leave when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run
from linexport.graph.segments import Segment, cut, stand_in
from linexport.quantise.opened import FloatModel
from linexport.system import memory

PIECE = 256
"""Tokens of a call: logits of long sequences, and scores of softmax layers, are large."""

Window = NDArray[np.int64]
See = Callable[[str, NDArray], None]


class LayerChain:
    """Layers of a float32 model, and what they give for some sequences.

    Args:
        model: the whole model.
        values: of its graph, that the layers give, in order.
        calibration: sequences of tokens that values are measured on.
        compared: sequences of which the logits are wanted afterwards.

    Attributes:
        segments: the layers; the last one gives the logits.
    """

    def __init__(
        self,
        model: FloatModel,
        values: Sequence[str],
        calibration: Sequence[Window],
        compared: Sequence[Window],
    ) -> None:
        artifact = model.artifact
        states = {s.past: s.present for s in artifact.manifest.states}
        self.segments = cut(model.graph, values, states)
        self._model, self._pasts = model, {present: past for past, present in states.items()}
        self._growing = {s.past: s.grows for s in artifact.manifest.states if s.grows is not None}
        self._measured, self._compared = len(calibration), compared
        self._sequences = [*calibration, *compared]
        self._held: list[dict[str, NDArray]] = [{} for _ in self._sequences]
        self._states: list[dict[str, NDArray]] = [{} for _ in self._sequences]
        self._head: Run | None = None

    def computes(self, index: int) -> set[str]:
        """Return the names of the values that a layer computes."""
        return {name for node in self.segments[index].model.graph.node for name in node.output}

    def run_layer(self, index: int, names: Collection[str], see: See) -> None:
        """Run a layer on all sequences; must be called for every layer in order.

        Args:
            index: of the layer.
            names: values in it that are shown to ``see``, of the sequences to measure on.
            see: called with the name and a part of the values, (1, t, ...).
        """
        segment = self.segments[index]
        if segment.ends is None:  # logits are computed when they are asked for
            if names:
                run = self._open(segment, names, ())
                for number in range(self._measured):
                    self._run(segment, run, number, names, see)
            return
        run = self._open(segment, names, (segment.ends, *segment.outputs))
        for number in range(len(self._sequences)):
            parts = self._run(segment, run, number, names if number < self._measured else (), see)
            [self._held[number][segment.ends]] = memory.memory_mapped([np.concatenate(parts, 1)])
        later = {name for part in self.segments[index + 1 :] for name in part.begins}
        for held in self._held:
            for past in held.keys() - later:
                del held[past]
        memory.trim_memory()

    def outputs(self, window: Window) -> Iterator[dict[str, NDArray]]:
        """Yield the model's outputs for one of the compared sequences, a piece of it at a time.

        States are those of the whole sequence, with the last piece.
        """
        number = self._measured + next(i for i, w in enumerate(self._compared) if w is window)
        segment = self.segments[-1]
        if self._head is None:
            self._head = self._open(segment, (), segment.outputs)
        state: dict[str, NDArray] = {}
        for start in range(0, len(window), PIECE):
            given = self._feeds(segment, number, start, state)
            outputs = self._head(given)
            state = self._carried(outputs)
            yield {**self._states[number], **outputs}

    def _run(
        self, segment: Segment, run: Run, number: int, names: Collection[str], see: See
    ) -> list[NDArray]:
        """Run one sequence in pieces; returns what the layer hands on of each."""
        parts: list[NDArray] = []
        state: dict[str, NDArray] = {}
        for start in range(0, len(self._sequences[number]), PIECE):
            outputs = run(self._feeds(segment, number, start, state))
            state = self._carried(outputs)
            for name in names:
                see(name, outputs[name])
            if segment.ends is not None:
                parts.append(outputs[segment.ends])
        if number >= self._measured:
            kept = memory.memory_mapped(list(state.values()))
            presents = {past: present for present, past in self._pasts.items()}
            self._states[number] |= {presents[n]: x for n, x in zip(state, kept, strict=True)}
        return parts

    def _carried(self, outputs: Arrays) -> dict[str, NDArray]:
        return {self._pasts[name]: value for name, value in outputs.items() if name in self._pasts}

    def _feeds(self, segment: Segment, number: int, start: int, state: Arrays) -> Arrays:
        piece = self._sequences[number][None, start : start + PIECE]
        given = {**self._model.artifact.feeds(piece), **state}
        for other in self._growing.keys() - state.keys() if start else ():
            given[other] = stand_in(given[other], self._growing[other], start)
        held = self._held[number]
        begins = {name: held[name][:, start : start + PIECE] for name in segment.begins}
        return {**{name: given[name] for name in segment.inputs}, **begins}

    def _open(self, segment: Segment, names: Collection[str], outputs: Sequence[str]) -> Run:
        """Open a layer with these outputs, and these values as further ones."""
        model = onnx.ModelProto()
        model.CopyFrom(segment.model)
        known = {o.name: o for o in model.graph.output}
        own = [known.get(name) or _value(name) for name in dict.fromkeys((*outputs, *names))]
        del model.graph.output[:]
        model.graph.output.extend(own)
        run = self._model.run(model)
        given = set(segment.inputs) | set(segment.begins)
        return lambda feeds: run({name: feeds[name] for name in given})


def _value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def outputs_of(artifact: Artifact, run: Run) -> Callable[[Window], Iterator[Arrays]]:
    """Return a function that yields a model's outputs for a sequence, a piece of it at a time.

    A model without states is run on the whole sequence.

    Args:
        artifact: names inputs and states.
        run: the model.
    """
    pasts = {s.present: s.past for s in artifact.manifest.states}

    def pieces(window: Window) -> Iterator[Arrays]:
        state: dict[str, NDArray] = {}
        size = PIECE if pasts else len(window)
        for start in range(0, len(window), size):
            outputs = run({**artifact.feeds(window[None, start : start + size]), **state})
            state = {past: outputs[present] for present, past in pasts.items()}
            yield outputs

    return pieces


def whole_outputs(
    artifact: Artifact, run: Run, logits: str
) -> Callable[[Window], Iterator[Arrays]]:
    """Return the same for a model that carries no states: it is run once, and its logits are cut.

    Args:
        artifact: see ``outputs_of``; says whether the other model is run in pieces.
        run: the model.
        logits: name of the output.
    """

    def pieces(window: Window) -> Iterator[Arrays]:
        found = run(artifact.feeds(window[None]))[logits]
        size = PIECE if artifact.manifest.states else len(window)
        for start in range(0, len(window), size):
            yield {logits: found[:, start : start + size]}

    return pieces
