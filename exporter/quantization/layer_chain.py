"""The layers of a language model, one after another on all sequences.

    for each layer k:   for each sequence:   h_k = layer_k(h_{k-1})

Every layer is opened once, from a temporary file, and runs its sequences in pieces with the states
it carries. What it hands on is in memory-mapped files; its weights leave when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run
from linexport.graph.outputs import with_outputs
from linexport.graph.segments import Segment, cut, stand_in
from linexport.quantization.opened import FloatModel
from linexport.system import memory

PIECE = 256
"""Tokens of a call of a layer: scores of softmax layers are large."""

LOGITS_PIECE = 128
"""Tokens of a call that gives logits, which two models have at once where they are compared."""

Window = NDArray[np.int64]


class LayerChain:
    """Layers of a model, and what they give for some sequences.

    Args:
        model: the whole model.
        values: of its graph, that the layers give, in order.
        calibration: sequences of tokens that values are measured on.
        compared: sequences whose logits are read afterwards.

    Raises:
        UnsupportedModelError: the graph cannot be cut at these values.

    Attributes:
        segments: the layers; the last one gives the logits.
    """

    def __init__(
        self,
        model: FloatModel,
        values: Sequence[str],
        calibration: Sequence[Window],
        compared: Sequence[Window] = (),
    ) -> None:
        artifact = model.artifact
        states = {s.past: s.present for s in artifact.manifest.states}
        self.segments = cut(model.graph, values, states)
        self._model = replace(model, values=dict(model.values))
        self._pasts = {present: past for past, present in states.items()}
        self._growing = {s.past: s.grows for s in artifact.manifest.states if s.grows is not None}
        self._measured, self._compared = len(calibration), compared
        self._sequences = [*calibration, *compared]
        # A model without states is run on whole sequences.
        longest = max(map(len, self._sequences))
        self._piece, self._logits_piece = (PIECE, LOGITS_PIECE) if states else (longest, longest)
        self._held: list[dict[str, NDArray]] = [{} for _ in self._sequences]
        self._states: list[dict[str, NDArray]] = [{} for _ in self._sequences]
        self._head: Run | None = None

    def replace(self, values: Mapping[str, NDArray]) -> None:
        """Give weights, by initializer, other values in runs that are begun afterwards."""
        self._model.values.update(values)

    def computes(self, index: int) -> set[str]:
        """Return the names of the values that a layer computes."""
        return {name for node in self.segments[index].model.graph.node for name in node.output}

    def values(self, index: int, names: Collection[str]) -> Iterator[Arrays]:
        """Yield values that a layer computes, (1, t, ...), of the sequences to measure on.

        Args:
            index: of the layer, whose predecessor was left.
            names: of the values.
        """
        segment = self.segments[index]
        continued = (name for name in segment.outputs if name in self._pasts)
        run = self._open(segment, (*continued, *names))
        for number in range(self._measured):
            for outputs in self._pieces(segment, run, number):
                yield {name: outputs[name] for name in names}

    def leave(self, index: int) -> None:
        """Run a layer on all sequences, for the next one; must be called in order."""
        segment = self.segments[index]
        if segment.ends is None:  # logits are computed on request
            return
        run = self._open(segment, (segment.ends, *segment.outputs))
        for number in range(len(self._sequences)):
            parts, outputs = [], {}
            for outputs in self._pieces(segment, run, number):
                parts.append(outputs[segment.ends])
            [self._held[number][segment.ends]] = memory.memory_mapped([np.concatenate(parts, 1)])
            if number >= self._measured:
                last = {n: x for n, x in outputs.items() if n in self._pasts}
                kept = memory.memory_mapped(list(last.values()))
                self._states[number] |= dict(zip(last, kept, strict=True))
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
            self._head = self._open(segment, segment.outputs)
        state: dict[str, NDArray] = {}
        for start in range(0, len(window), self._logits_piece):
            given = self._feeds(segment, number, start, self._logits_piece, state)
            outputs = self._head(given)
            state = self._carried(outputs)
            yield {**self._states[number], **outputs}

    def _pieces(self, segment: Segment, run: Run, number: int) -> Iterator[dict[str, NDArray]]:
        """Run a layer on one sequence in pieces; yields its outputs of each."""
        state: dict[str, NDArray] = {}
        for start in range(0, len(self._sequences[number]), self._piece):
            outputs = run(self._feeds(segment, number, start, self._piece, state))
            state = self._carried(outputs)
            yield outputs

    def _carried(self, outputs: Arrays) -> dict[str, NDArray]:
        return {self._pasts[name]: value for name, value in outputs.items() if name in self._pasts}

    def _feeds(self, segment: Segment, number: int, start: int, size: int, state: Arrays) -> Arrays:
        end = start + size
        piece = self._sequences[number][None, start:end]
        given = {**self._model.artifact.feeds(piece), **state}
        for other in self._growing.keys() - state.keys() if start else ():
            given[other] = stand_in(given[other], self._growing[other], start)
        held = self._held[number]
        begins = {name: held[name][:, start:end] for name in segment.begins}
        return {**{name: given[name] for name in segment.inputs}, **begins}

    def _open(self, segment: Segment, names: Iterable[str]) -> Run:
        """Open a layer with these values as its outputs."""
        run = self._model.run(with_outputs(segment.model, dict.fromkeys(names)))
        given = set(segment.inputs) | set(segment.begins)
        return lambda feeds: run({name: feeds[name] for name in given})


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
        size = LOGITS_PIECE if pasts else len(window)
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
        size = LOGITS_PIECE if artifact.manifest.states else len(window)
        for start in range(0, len(window), size):
            yield {logits: found[:, start : start + size]}

    return pieces
