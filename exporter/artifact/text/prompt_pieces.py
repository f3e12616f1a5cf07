"""Long prompts in several calls: as many tokens in each as the values inside of it have memory for.

    bytes of a call of T tokens, the states that grow holding all of the prompt    at most LARGEST

They are known from shapes before the call. Softmax attention in standard operators has scores of
all its keys for each token: of 32,768 tokens with as many keys 4 GiB a head, and several of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx
from onnx import numpy_helper

from linexport.graph.footprint import Footprint
from linexport.graph.states import State, rows_dim
from linexport.manifest import Manifest
from linexport.manifest.records import TOKENS
from linexport.targets.lowering.kept_logits import with_kept_logits
from linexport.targets.runtime.options import LOGITS_FROM

log = logging.getLogger(__name__)

LARGEST = 2**30
"""Bytes that the values inside a call may take."""

WHOLE = 512
"""Tokens of a prompt that is not cut: what it would take is not counted, which takes time."""

LEAST = 64
"""Tokens of a piece at least."""

STEP = 256
"""Prompts are counted as if they had a multiple of so many tokens: one count serves many."""


class PromptPieces:
    """Lengths of the pieces of prompts.

    Args:
        manifest: of the model.
        states: of it.
        tokens: name of the dimension of its tokens.
        graph: of it; is not changed.
        logits: name of the logits, of which those of the last token alone are computed; None where
            those of all are.
    """

    def __init__(
        self,
        manifest: Manifest,
        states: Sequence[State],
        tokens: str,
        graph: onnx.ModelProto,
        logits: str | None,
    ) -> None:
        self._footprint = Footprint(graph if logits is None else _with_last_logits(graph, logits))
        self._tokens, self._rows = tokens, rows_dim(states, manifest.dims)
        shapes = {i.name: i.shape for i in manifest.inputs}
        growing = [(shapes[s.past], s.growing_axis) for s in states]
        self._held = {shape[axis] for shape, axis in growing if axis is not None}
        self._packed = manifest.packed is not None
        self._counted = cache(self.bytes)

    def bytes(self, tokens: int, rows: int, held: int) -> int:
        """Return the bytes of values inside a call.

        Args:
            tokens: of each row.
            rows: of the batch.
            held: tokens that states which grow hold before it.
        """
        sizes = dict.fromkeys(map(str, self._held), held)
        sizes |= {str(self._rows): rows, self._tokens: tokens}
        return self._footprint.at(sizes | ({TOKENS: rows * tokens} if self._packed else {}))

    def longest(self, tokens: int, rows: int, held: int) -> int:
        """Return how many tokens each call of a prompt takes: all of them, or a power of two.

        Args:
            tokens: of the prompt.
            rows: of the batch.
            held: tokens before it.
        """
        if tokens <= WHOLE:
            return tokens
        piece, rounded = tokens, -(-tokens // STEP) * STEP
        try:
            whole = needed = self._counted(rounded, rows, held)
            while needed > LARGEST and piece > LEAST:
                piece = 1 << (piece - 1).bit_length() - 1
                needed = self._counted(piece, rows, held + rounded - piece)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            log.warning("The memory of calls is not known, and prompts are not cut: %s", error)
            return tokens
        if piece < tokens:
            log.info(
                "The prompt of %s tokens is computed %s at a time: a call of all would take %.1f "
                "GiB for the values in it, one of these takes %.1f.",
                *(f"{tokens:,}", f"{piece:,}", whole / 2**30, needed / 2**30),
            )
        return piece


def _with_last_logits(graph: onnx.ModelProto, logits: str) -> onnx.ModelProto:
    """Return a graph that computes the logits of the last token, where its head can be told to."""
    made = with_kept_logits(graph, logits)
    if made is not graph:
        kept = [i for i in made.graph.input if i.name != LOGITS_FROM]
        del made.graph.input[:]
        made.graph.input.extend(kept)
        made.graph.initializer.append(numpy_helper.from_array(np.array([-1]), LOGITS_FROM))
    return made
