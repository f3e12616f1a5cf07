"""Integers of a quantised checkpoint for the weights of a float32 artifact.

    initializer (N, K) -> rows of weights of the checkpoint that mean the same float32 numbers
                       -> their integers, scales and zero points, in blocks
                       -> kept if what the blocks mean equals the initializer, number by number

Weights are found by their numbers, not by names, which tracing changes. So a weight that the model
multiplies or merges with an adapter is not found, and is left in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from linexport.errors import LinexportError, UsageError
from linexport.quantization.block_quantisation import Grid, Matrix, Quantised
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.input_order import Order
from linexport.quantization.quantisable import TABLE_BITS, KeptWeight, Weight
from linexport.quantization.stored_integers import BITS, NotExactError, as_blocks, on_grid
from linexport.quantization.stored_rows import MatchedRows, StoredRows, parts
from linexport.sources.files import first_line, refuse
from linexport.sources.packed import StoredWeights
from linexport.sources.packed.record import StoredTensor
from linexport.system import memory
from linexport.system.progress import Advance

METHOD = "checkpoint"
"""How values of kept integers were rounded: by whoever made the checkpoint."""

_FLOATS = "the checkpoint has it in floats"
_CHANGED = (
    "no weights of the checkpoint have its numbers: the model changes what is stored, or an "
    "adapter does"
)
_OTHER_NUMBERS = (
    "its integers in blocks mean other float32 numbers than in the checkpoint, whose format rounds "
    "them more than once"
)

_ORDER_OF_OTHERS = (
    "its groups are of inputs in another order (g_idx), and only inputs of a single product are "
    "gathered in that order, neither those of experts nor rows of a table"
)
_ORDERS = "the projections that it joins have their inputs in different orders (g_idx)"


@dataclass(frozen=True)
class KeptIntegers:
    """Weights whose integers are those of the checkpoint, and the others, with reasons."""

    chosen: tuple[Chosen, ...]
    left: tuple[KeptWeight, ...]


def check_checkpoint(stored: StoredWeights, name: str) -> None:
    """Look for a weight whose integers can be kept, before work is spent on the model.

    Raises:
        UsageError: there is none.
        UnsupportedModelError: a weight cannot be read.
    """
    reason = "all of its weights are floats"
    for tensor in stored.tensors.values() if stored.title else ():
        if len(tensor.shape) < 2 or not tensor.size:
            continue
        try:
            if _is_held(tensor):
                return
        except NotExactError as error:
            reason = f"{tensor.name}: {error}"
        except LinexportError:
            raise
        except Exception as error:  # of any kind, as parts of a weight may have any type and size
            raise refuse(
                Path(name),
                f"the weight {tensor.name}, which cannot be read ({first_line(error)})",
                "download it again",
            ) from error
    raise UsageError(
        f"--weights keep stores the integers of a quantised checkpoint, and {name} has none that "
        f"can be kept ({reason}). Pass --weights int8 or int4, which quantise float32 weights."
    )


def _is_held(tensor: StoredTensor) -> bool:
    """Return whether a weight is in few bits, as integers that blocks hold.

    Raises:
        NotExactError: it is in few bits, and no blocks hold it.
    """
    packed = tensor.packed()
    if packed is not None:
        as_blocks(packed)
    return packed is not None


def keep_integers(
    stored: StoredWeights,
    groups: Sequence[Sequence[Weight]],
    values: Mapping[str, NDArray],
    portable: bool,
    advance: Advance,
) -> KeptIntegers:
    """Find the weights of a model in its checkpoint, and keep the integers of those that equal.

    Args:
        stored: the checkpoint.
        groups: weights of the model; those of a group are kept together or not at all.
        values: float32 values of its initializers.
        portable: standard operators must hold them.
        advance: shown the number of weights done, and the name of the last.
    """
    rows = StoredRows(stored.tensors.values(), {w.inputs for group in groups for w in group})
    chosen: list[Chosen] = []
    left: list[KeptWeight] = []
    for group in groups:
        made: list[Chosen] = []
        try:
            for weight in group:
                matrix = weight.matrix(values[weight.name])
                found = _mapped(_kept(weight, matrix, rows, portable))
                made.append(Chosen(weight, found, METHOD))
        except NotExactError as error:
            others = f"{weight.name}, which goes with it, is not kept"
            left += [KeptWeight(w.name, str(error) if w is weight else others) for w in group]
        else:
            chosen += _alike(made)
        memory.trim_memory()
        advance(len(chosen) + len(left), group[-1].name)
    return KeptIntegers(tuple(chosen), tuple(left))


def _kept(weight: Weight, matrix: Matrix, rows: StoredRows, portable: bool) -> Quantised:
    """Return the integers of a weight, whose meaning equals the matrix.

    Raises:
        NotExactError: it has none, or they cannot be held.
    """
    found = rows.match(matrix)
    if not found:
        raise NotExactError(_CHANGED)
    made = _joined(found, len(matrix))
    bits, product_alone = made.grid.bits, not weight.is_table and weight.experts is None
    if made.order is not None and not product_alone:
        raise NotExactError(_ORDER_OF_OTHERS)
    if weight.is_table and portable:
        bits = max(bits, TABLE_BITS)  # the standard Gather has no type of 4
    symmetric = made.grid.symmetric and product_alone and bits == min(BITS)
    made = on_grid(made, Grid(bits, made.grid.block, symmetric))
    if not _equal(made, matrix):
        raise NotExactError(_OTHER_NUMBERS)
    return made


def _joined(pieces: Sequence[MatchedRows], outputs: int) -> Quantised:
    """Return the integers of all rows of a matrix, on the coarsest grid that holds them.

    Raises:
        NotExactError: a stored weight is of floats, or no blocks hold it.
    """
    made = [_rows(piece) for piece in pieces]
    if len(made) == 1 and np.array_equal(pieces[0].places, np.arange(outputs)):
        return made[0]
    grid = Grid(
        max(one.grid.bits for one in made),
        min(one.grid.block for one in made),
        all(one.grid.symmetric for one in made),
    )
    inputs, order = made[0].inputs, made[0].order
    if not all(_same(one.order, order) for one in made):
        raise NotExactError(_ORDERS)
    count = grid.blocks(inputs)
    values = np.empty((outputs, count, grid.block), np.uint8)
    scales, zeros = np.empty((outputs, count), np.float32), np.empty((outputs, count), np.uint8)
    for piece, one in zip(pieces, made, strict=True):
        same = on_grid(one, grid)
        values[piece.places] = same.values
        scales[piece.places], zeros[piece.places] = same.scales, same.zeros
    return Quantised(grid, inputs, values, scales, zeros, order)


def _same(left: Order | None, right: Order | None) -> bool:
    if left is None or right is None:
        return left is right
    return np.array_equal(left, right)


def _rows(piece: MatchedRows) -> Quantised:
    """Return some rows of a stored weight in blocks.

    Raises:
        NotExactError: it is of floats, or no blocks hold it.
    """
    packed = piece.tensor.packed()
    if packed is None:
        raise NotExactError(_FLOATS)
    made, rows = as_blocks(packed), piece.rows
    if np.array_equal(rows, np.arange(len(made.values))):
        return made
    return replace(made, values=made.values[rows], scales=made.scales[rows], zeros=made.zeros[rows])


def _equal(made: Quantised, matrix: Matrix) -> bool:
    """Return whether every number that integers mean is that of the matrix."""
    start = 0
    for part in parts(matrix):
        own = slice(start, start + len(part))
        start += len(part)
        some = replace(
            made, values=made.values[own], scales=made.scales[own], zeros=made.zeros[own]
        )
        if not np.array_equal(some.matrix(), part):
            return False
    return True


def _mapped(made: Quantised) -> Quantised:
    values, scales, zeros = memory.memory_mapped([made.values, made.scales, made.zeros])
    return replace(made, values=values, scales=scales, zeros=zeros)


def _alike(made: Sequence[Chosen]) -> Sequence[Chosen]:
    """Return weights of experts on one grid, whose blocks divide the inputs of both."""
    if len(made) == 1 or not all(one.weight.experts and one.weight.experts.fused for one in made):
        return made
    bits = max(one.quantised.grid.bits for one in made)
    block = min(one.quantised.grid.block for one in made)
    while any(one.weight.inputs % block for one in made):
        block //= 2
    grid = Grid(bits, block)
    return [replace(one, quantised=on_grid(one.quantised, grid)) for one in made]
