"""Divergence of a language model when one weight alone is quantised.

All candidate weights are inputs of one opened graph, so that each can be tried without opening
another. The error of 8 bits is that of 4 divided by 2^8: the step is 2^4 times finer, and the
divergence is quadratic in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from linexport.artifact.temporary import Arrays
from linexport.quantization.block_quantisation import Matrix
from linexport.quantization.divergence import ComparedLogits, compare
from linexport.quantization.opened import FloatModel
from linexport.quantization.quantisable import Weight

WINDOWS = 4
"""Windows of calibration text that every weight is tried on."""


def divergences(
    model: FloatModel,
    weights: Sequence[Weight],
    tried: Callable[[Weight], Matrix],
    windows: Sequence[NDArray[np.int64]],
    logits: str,
    advance: Callable[[int, str], None],
) -> dict[str, float]:
    """Measure the mean divergence, in nats, that each weight causes alone.

    Args:
        model: the float32 model.
        weights: those to try.
        tried: gives the quantised matrix (N, K) of a weight.
        windows: token ids, (T,) each.
        logits: name of the output.
        advance: shown the number of weights done, and the name of the last.
    """
    names = sorted({use.weight for weight in weights for use in weight.uses})
    run = model.run(model.fed(names))
    feeds = [model.artifact.feeds(ids[None]) for ids in windows[:WINDOWS]]
    originals: Arrays = {name: model.values[name] for name in names}
    expected = [run({**given, **originals})[logits][0] for given in feeds]
    found = {}
    for done, weight in enumerate(weights, 1):
        changed = {**originals, **stored(weight, tried(weight), model.values)}
        got = [run({**given, **changed})[logits][0] for given in feeds]
        both = zip(windows, expected, got, strict=False)
        found[weight.name] = compare(
            (ids, [ComparedLogits(np.arange(len(p)), p, q)]) for ids, p, q in both
        ).mean
        advance(done, weight.name)
    return found


def stored(weight: Weight, matrix: Matrix, values: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return the matrix in the orientation of each initializer of the weight."""
    if weight.experts is not None and weight.experts.side_by_side:
        by_expert = matrix.reshape(len(matrix), weight.experts.count, -1).swapaxes(0, 1)
        name = weight.uses[0].weight
        return {name: np.ascontiguousarray(by_expert, values[name].dtype)}
    return {
        use.weight: np.ascontiguousarray(
            matrix.T if use.rows_are_inputs else matrix, values[use.weight].dtype
        ).reshape(values[use.weight].shape)
        for use in weight.uses
    }
