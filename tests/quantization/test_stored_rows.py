"""Weights of a model found among those of its checkpoint, by the numbers of their rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.errors import UnsupportedModelError
from linexport.quantization.keep import KeptIntegers, check_checkpoint, keep_integers
from linexport.quantization.quantisable import Use, Weight
from linexport.quantization.stored_rows import StoredRows
from linexport.sources.packed import StoredWeights
from linexport.sources.packed.record import PackedTensor, StoredTensor, blocks

INPUTS = 48


def tensor(name: str, outputs: int, seed: int, size: int = 16, top: int = 16) -> StoredTensor:
    """Draw a weight in few bits, with a row of zeros in the middle."""
    drawn = np.random.default_rng(seed)
    columns = blocks(INPUTS, size)
    groups = int(columns[-1]) + 1
    codes = torch.from_numpy(drawn.integers(0, top, (outputs, INPUTS)))
    zeros = torch.from_numpy(drawn.integers(0, top, (outputs, groups)))
    codes[outputs // 2] = zeros[outputs // 2][columns]
    scales = torch.from_numpy(drawn.standard_normal((outputs, groups)).astype(np.float32))
    packed = PackedTensor(codes, scales, torch.arange(outputs), columns, zeros)
    return StoredTensor(name, (outputs, INPUTS), lambda: packed, frozenset())


def weight(name: str, outputs: int) -> Weight:
    """Return a product's weight that is stored with one row an output."""
    return Weight(name, (Use(0, name, False, "x"),), outputs, INPUTS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_any_rows_of_any_weights_are_found(outputs: list[int], seed: int) -> None:
    drawn = np.random.default_rng(seed)
    tensors = [tensor(f"t{k}", rows, seed + k) for k, rows in enumerate(outputs)]
    every = np.concatenate([t.read().numpy() for t in tensors])
    matrix = every[drawn.integers(0, len(every), 2 * len(every))]
    found = np.full(matrix.shape, np.nan, np.float32)
    for piece in StoredRows(tensors, {INPUTS}).match(matrix):
        found[piece.places] = piece.tensor.read().numpy()[piece.rows]
    np.testing.assert_array_equal(found, matrix)


def test_a_weight_with_one_other_number_is_not_found() -> None:
    stored = tensor("t", 9, 0)
    matrix, rows = stored.read().numpy(), StoredRows([stored], {INPUTS})
    assert len(rows.match(matrix)) == 1
    matrix[3, 7] = np.nextafter(matrix[3, 7], np.float32(2))
    assert rows.match(matrix) == []
    assert StoredRows([], {INPUTS}).match(matrix) == []


def test_rows_of_several_grids_are_kept_on_one() -> None:
    """Groups of 16 with 8 bits and of 48 with 4: the integers are the same in blocks of 16."""
    few, many = tensor("few", 5, 1, 48), tensor("many", 4, 2, 16, 256)
    matrix = np.concatenate([many.read().numpy(), few.read().numpy()[::-1]])
    stored = StoredWeights((), {"few": few, "many": many}, "a format")
    found = keep_integers(stored, [[weight("w", 9)]], {"w": matrix}, False, lambda *_: None)
    [chosen] = found.chosen
    grid, values = chosen.quantised.grid, chosen.quantised.values.reshape(9, -1)
    assert (grid.bits, grid.block, grid.symmetric) == (8, 16, False)
    both = [many.packed(), few.packed()]
    assert both[0] is not None and both[1] is not None
    codes = torch.cat([both[0].codes, both[1].codes.flip(0)])
    np.testing.assert_array_equal(values, codes.numpy())
    np.testing.assert_array_equal(chosen.quantised.matrix(), matrix)


def test_joined_weights_are_kept_where_their_inputs_are_in_one_order() -> None:
    order, other = (np.random.default_rng(seed).permutation(INPUTS) for seed in (5, 6))

    def joined(*orders: np.ndarray) -> KeptIntegers:
        tensors = {}
        for k, own in enumerate(orders):
            packed = tensor("t", 5, k).packed()
            assert packed is not None
            moved = replace(packed, codes=packed.codes[:, own], columns=packed.columns[own])
            name = f"t{k}"
            tensors[name] = StoredTensor(name, (5, INPUTS), lambda moved=moved: moved, frozenset())
        matrix = np.concatenate([t.read().numpy() for t in tensors.values()])
        stored = StoredWeights((), tensors, "a format")
        return keep_integers(
            stored, [[weight("w", len(matrix))]], {"w": matrix}, False, lambda *_: None
        )

    [chosen] = joined(order, order).chosen
    assert chosen.quantised.order is not None
    for orders in ((order, other), (order, np.arange(INPUTS))):
        [left] = joined(*orders).left
        assert "it joins have their inputs in different orders" in left.reason


def test_integers_that_mean_other_numbers_are_not_kept() -> None:
    """The weights of a checkpoint are compared, and not only looked for."""
    stored = tensor("t", 9, 0)
    right = stored.packed()
    assert right is not None
    codes = right.codes.clone()
    codes[4, 5] ^= 1
    wrong = replace(stored, load_packed=lambda: replace(right, codes=codes))
    matrix = stored.read().numpy()
    for one, count in ((stored, 1), (wrong, 0)):
        given_weights = StoredWeights((), {"t": one}, "a format")
        found = keep_integers(
            given_weights, [[weight("w", 9)]], {"w": matrix}, False, lambda *_: None
        )
        assert len(found.chosen) == count
    [left] = found.left
    assert "mean other float32 numbers" in left.reason


def test_weights_that_go_together_are_kept_together() -> None:
    up, down = tensor("up", 6, 0), tensor("down", 6, 1)
    stored = StoredWeights((), {"up": up}, "a format")
    values = {"up": up.read().numpy(), "down": down.read().numpy()}
    pair = [weight("up", 6), weight("down", 6)]
    found = keep_integers(stored, [pair], values, False, lambda *_: None)
    assert not found.chosen
    reasons = {one.name: one.reason for one in found.left}
    assert reasons["up"] == "down, which goes with it, is not kept"
    assert reasons["down"].startswith("no weights of the checkpoint have its numbers")


def test_a_weight_whose_parts_do_not_fit_is_refused_in_one_sentence() -> None:
    right = tensor("t", 9, 0)
    packed = right.packed()
    assert packed is not None
    wrong = replace(right, load=lambda: replace(packed, scales=packed.scales[:, :1]))
    with pytest.raises(UnsupportedModelError, match="the weight t, which cannot be read") as caught:
        check_checkpoint(StoredWeights((), {"t": wrong}, "a format"), "folder")
    assert "\n" not in str(caught.value)
    empty = replace(right, shape=(0, INPUTS))
    check_checkpoint(StoredWeights((), {"empty": empty, "t": right}, "a format"), "folder")
