"""The layers of a language model, one after another on all sequences.

    for each layer k:   for each sequence:   h_k = layer_k(h_{k-1})

A layer runs its sequences in pieces with the states it carries, opened from a temporary file. What
it hands on is in memory-mapped files; its weights leave when it is done. Values inside it that were
measured are in such files until then: what follows from them is computed from them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from linexport.artifact.temporary import Arrays, Run
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.graph.segments import Segment, cut, rest, stand_in
from linexport.quantization.opened import FloatModel
from linexport.quantization.window_pieces import Window, WindowPiece, cut_logits, in_pieces
from linexport.system import memory

PIECE = 512
"""Tokens of a call of a layer: scores of softmax layers are large."""


class LayerChain:
    """Layers of a model, and what they give for some sequences.

    Args:
        model: the whole model.
        language: names its logits.
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
        language: LanguageInterface,
        values: Sequence[str],
        calibration: Sequence[Window],
        compared: Sequence[Window] = (),
    ) -> None:
        artifact = model.artifact
        self._presents = {s.past: s.present for s in artifact.manifest.states}
        self.segments = cut(model.graph, values, self._presents)
        self._model, self._language = replace(model, values=dict(model.values)), language
        self._pasts = {present: past for past, present in self._presents.items()}
        self._growing = {s.past: s.grows for s in artifact.manifest.states if s.grows is not None}
        self._measured, self._compared = len(calibration), compared
        self._sequences = [*calibration, *compared]
        # A model without states is run on whole sequences.
        longest = max(map(len, self._sequences))
        self._piece = PIECE if self._pasts else longest
        self._held: list[dict[str, NDArray]] = [{} for _ in self._sequences]
        self._states: list[dict[str, NDArray]] = [{} for _ in self._sequences]
        self._inside = self._nothing()
        self._head: Run | None = None

    def replace(self, values: Mapping[str, NDArray]) -> None:
        """Give weights, by initializer, other values in runs that are begun afterwards."""
        self._model.values.update(values)

    def computes(self, index: int) -> set[str]:
        """Return the names of the values that a layer computes."""
        return {name for node in self.segments[index].model.graph.node for name in node.output}

    def values(self, index: int, names: Collection[str]) -> list[Arrays]:
        """Return values that a layer computes, (1, t, ...), of the sequences to measure on.

        Weights before them must have their last values: what follows is computed from these.

        Args:
            index: of the layer, whose predecessor was left.
            names: of the values.

        Returns:
            Memory-mapped, by name, of each piece of each sequence.
        """
        left = [name for name in names if name not in self._inside[0][0]]
        if left:
            part = self._rest(index, left)
            run = self._open(part)
            for number, inside in enumerate(self._inside):
                for values, outputs in zip(inside, self._pieces(part, run, number), strict=True):
                    kept = memory.memory_mapped([outputs[name] for name in left])
                    values |= zip(left, kept, strict=True)
        pieces = [values for inside in self._inside for values in inside]
        return [{name: values[name] for name in names} for values in pieces]

    def leave(self, index: int) -> None:
        """Run a layer on all sequences, for the next one; must be called in order."""
        segment = self.segments[index]
        if segment.ends is None:  # logits are computed on request
            return
        self._run_to_the_end(segment, self._rest(index, [segment.ends]), range(self._measured))
        self._inside = self._nothing()
        compared = range(self._measured, len(self._sequences))
        if compared:
            self._run_to_the_end(segment, segment, compared)
        later = {name for part in self.segments[index + 1 :] for name in part.begins}
        for held in self._held:
            for past in held.keys() - later:
                del held[past]
        memory.trim_memory()

    def _run_to_the_end(self, segment: Segment, part: Segment, numbers: Iterable[int]) -> None:
        """Run the part of a layer that is left on sequences, and hold what it hands on."""
        end = segment.ends
        assert end is not None
        run = self._open(part)
        for number in numbers:
            parts, outputs = [], {}
            for outputs in self._pieces(part, run, number):
                parts.append(outputs[end])
            [self._held[number][end]] = memory.memory_mapped([np.concatenate(parts, 1)])
            if number >= self._measured:
                last = {n: x for n, x in outputs.items() if n in self._pasts}
                kept = memory.memory_mapped(list(last.values()))
                self._states[number] |= dict(zip(last, kept, strict=True))

    def outputs(self, window: Window) -> Iterator[Arrays]:
        """Return the model's outputs for one of the compared sequences, a piece of it at a time.

        States are those of the whole sequence, with the last piece.
        """
        number = self._measured + next(i for i, w in enumerate(self._compared) if w is window)
        segment = self.segments[-1]
        head = self._head = self._head or self._open(segment, self._language.logits)

        def call(piece: WindowPiece, state: Arrays) -> tuple[Arrays, Arrays]:
            feeds = self._feeds(segment, number, piece.start, piece.end - piece.start, state)
            outputs = head({**feeds, **piece.feeds})
            return {**self._states[number], **outputs}, self._carried(outputs)

        if self._pasts:
            return in_pieces(window, self._language, call)
        whole = head(self._feeds(segment, number, 0, self._piece, {}))
        return cut_logits(window, self._language, whole)

    def _nothing(self) -> list[list[dict[str, NDArray]]]:
        """Return room for values inside a layer, of each piece of each sequence to measure on."""
        measured = self._sequences[: self._measured]
        return [[{} for _ in range(0, len(ids), self._piece)] for ids in measured]

    def _rest(self, index: int, names: Sequence[str]) -> Segment:
        """Return the part of a layer that computes values from those that were measured."""
        return rest(self.segments[index], names, self._inside[0][0], self._presents)

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
        inside = self._inside[number][start // size] if number < self._measured else {}
        begins = {
            name: inside[name] if name in inside else self._held[number][name][:, start:end]
            for name in segment.begins
        }
        return {**{name: given[name] for name in segment.inputs}, **begins}

    def _open(self, segment: Segment, logits: str | None = None) -> Run:
        """Open a part of the model; ``logits`` as of ``open_written``."""
        return self._model.run(segment.model, logits)
