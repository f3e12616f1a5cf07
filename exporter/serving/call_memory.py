"""Bytes that values inside the graph take in a call, known before it is made.

    rows x bytes of one row of so many tokens

They are counted at powers of two, each once. Between two of them lies a line in logarithms, which a
sum of powers of the length does not exceed: scores of all pairs of tokens, for example.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import log2

import numpy as np
import onnx

from linexport.graph.footprint import Footprint
from linexport.manifest import Manifest
from linexport.manifest.records import TOKENS, InputRecord

log = logging.getLogger(__name__)


class CallMemory:
    """The memory of calls of a model of an artifact.

    Args:
        inputs: of the model.
        batch: names of the dimensions that are rows.
        graph: of the model.
        inner: names of dimensions that the graph alone has, as long as the tokens of all rows.
    """

    def __init__(
        self,
        inputs: Sequence[InputRecord],
        batch: Collection[str],
        graph: onnx.ModelProto,
        inner: Collection[str] = (),
    ) -> None:
        self._shapes = {i.name: i.shape for i in inputs}
        self._batch, self._inner = batch, inner
        self._footprint = Footprint(graph)
        self._row = cache(self._counted)

    @classmethod
    def of_model(cls, manifest: Manifest, graph: onnx.ModelProto) -> CallMemory:
        """Return that of the model of an artifact, whose manifest and graph are given."""
        batch = {name for name, dim in manifest.dims.items() if dim.batch}
        return cls(manifest.inputs, batch, graph, (TOKENS,) if manifest.packed is not None else ())

    def bytes(self, feeds: Mapping[str, np.ndarray]) -> int:
        """Return the bytes of a call with these inputs."""
        rows, tokens = [1], [1]
        for name, values in feeds.items():
            shape = self._shapes.get(name, ())
            if len(shape) == values.ndim:
                for dim, size in zip(shape, values.shape, strict=True):
                    if isinstance(dim, str):
                        (rows if dim in self._batch else tokens).append(size)
        return max(rows) * self.row(max(tokens))

    def row(self, tokens: int) -> int:
        """Return the bytes of one row, all of whose dynamic dimensions are so large."""
        below = 1 << (tokens.bit_length() - 1)
        least = self._row(below)
        if below == tokens:
            return least
        growth = log2(max(1, self._row(2 * below)) / max(1, least))
        return round(least * (tokens / below) ** growth)

    def _counted(self, tokens: int) -> int:
        dims = {d for shape in self._shapes.values() for d in shape if isinstance(d, str)}
        sizes = {dim: 1 if dim in self._batch else tokens for dim in dims}
        sizes |= dict.fromkeys(self._inner, tokens)
        try:
            return self._footprint.at(sizes)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            log.warning("What calls of the model take inside is not counted: %s", error)
            return 0
