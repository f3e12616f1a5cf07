"""Integers of a quantised checkpoint for the weights of a float32 artifact.

    initializer (N, K) -> the weight of the checkpoint that means the same float32 numbers
                       -> its integers, scales and zero points, in blocks
                       -> kept if what the blocks mean equals the initializer, number by number

Weights are found by their numbers, not by names, which tracing changes. So a weight that the model
multiplies, merges with an adapter or joins with another one is not found, and stays in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from linexport.errors import UsageError
from linexport.quantization.block_quantisation import Matrix, Quantised
from linexport.quantization.choose_bits import TABLE_BITS, Chosen
from linexport.quantization.quantisable import KeptWeight, Weight
from linexport.quantization.stored_integers import NotExactError, as_blocks
from linexport.sources.packed import StoredWeights
from linexport.sources.packed.record import StoredTensor
from linexport.system import memory
from linexport.system.progress import Advance

METHOD = "checkpoint"
"""How values of kept integers were rounded: by whoever made the checkpoint."""

_FLOATS = "the checkpoint has it in floats"
_CHANGED = (
    "no weight of the checkpoint has its numbers: the model changes or joins what is stored, or "
    "an adapter does"
)
_EXPERTS = "it is of experts, whose integers are not kept"


@dataclass(frozen=True)
class KeptIntegers:
    """Weights whose integers are those of the checkpoint, and the others, with reasons."""

    chosen: tuple[Chosen, ...]
    left: tuple[KeptWeight, ...]


def check_checkpoint(stored: StoredWeights, name: str) -> None:
    """Look for a weight whose integers can be kept, before work is spent on the model.

    Raises:
        UsageError: there is none.
    """
    reason = "all of its weights are floats"
    for tensor in stored.tensors.values():
        if len(tensor.shape) != 2 or (packed := tensor.packed()) is None:
            continue
        try:
            as_blocks(packed)
        except NotExactError as error:
            reason = f"{tensor.name}: {error}"
        else:
            return
    raise UsageError(
        f"--weights keep stores the integers of a quantised checkpoint, and {name} has none that "
        f"can be kept ({reason}). Pass --weights int8 or int4, which quantise float32 weights."
    )


def keep_integers(
    stored: StoredWeights,
    weights: Sequence[Weight],
    values: Mapping[str, NDArray],
    portable: bool,
    advance: Advance,
) -> KeptIntegers:
    """Find the weights of a model in its checkpoint, and keep the integers of those that equal.

    Args:
        stored: the checkpoint.
        weights: of the model.
        values: float32 values of its initializers.
        portable: standard operators must hold them.
        advance: shown the number of weights done, and the name of the last.
    """
    found = _by_numbers(stored, {(w.outputs, w.inputs) for w in weights if w.experts is None})
    chosen: list[Chosen] = []
    left: list[KeptWeight] = []
    for done, weight in enumerate(weights, 1):
        try:
            quantised = _kept(weight, weight.matrix(values[weight.name]), found, portable)
            chosen.append(Chosen(weight, quantised, METHOD))
        except NotExactError as error:
            left.append(KeptWeight(weight.name, str(error)))
        memory.trim_memory()
        advance(done, weight.name)
    return KeptIntegers(tuple(chosen), tuple(left))


def _by_numbers(
    stored: StoredWeights, shapes: Iterable[tuple[int, int]]
) -> dict[bytes, StoredTensor]:
    """Return weights of these shapes by a digest of the float32 numbers that they mean."""
    return {_digest(matrix): tensor for tensor, matrix in _matrices(stored, set(shapes))}


def _matrices(
    stored: StoredWeights, shapes: set[tuple[int, int]]
) -> Iterator[tuple[StoredTensor, Matrix]]:
    for tensor in stored.tensors.values():
        if tensor.shape in shapes:
            yield tensor, tensor.read().float().numpy()
            memory.trim_memory()


def _digest(matrix: Matrix) -> bytes:
    """Return a digest of the numbers of a matrix, which has no negative zeros afterwards."""
    numbers = np.ascontiguousarray(matrix + np.float32(0))
    return hashlib.blake2b(numbers.data, digest_size=16, key=repr(matrix.shape).encode()).digest()


def _kept(
    weight: Weight, matrix: Matrix, found: Mapping[bytes, StoredTensor], portable: bool
) -> Quantised:
    """Return the integers of a weight, whose meaning equals the matrix.

    Raises:
        NotExactError: it has none, or they cannot be held.
    """
    if weight.experts is not None:
        raise NotExactError(_EXPERTS)
    tensor = found.get(_digest(matrix))
    if tensor is None:
        raise NotExactError(_CHANGED)
    packed = tensor.packed()
    if packed is None:
        raise NotExactError(_FLOATS)
    least = TABLE_BITS if weight.is_table and portable else 4  # the standard Gather has no 4 bits
    made = as_blocks(packed, least, product_alone=not weight.is_table)
    if not np.array_equal(made.matrix(), matrix):
        raise NotExactError(
            "its integers in blocks mean other float32 numbers than the checkpoint, which rounds "
            "them more than once"
        )
    values, scales, zeros = memory.memory_mapped([made.values, made.scales, made.zeros])
    return replace(made, values=values, scales=scales, zeros=zeros)
