"""Which dims of examples vary when the factory does not say."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

import linexport
from linexport.sources.default_dims import default_dims
from linexport.sources.factory import load_module
from linexport.trace import trace

BATCH = {0: Dim.DYNAMIC}
BOTH = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (zeros(2, 5, dtype=torch.int64), BOTH),
        (zeros(2, 5, dtype=torch.int32), BOTH),
        (zeros(2, 5, dtype=torch.bool), BOTH),
        (zeros(2, 5, 8), BOTH),
        (zeros(2, 5, 8, dtype=torch.float16), BOTH),
        (zeros(2, 5), BATCH),
        (zeros(2), BATCH),
        (zeros(2, dtype=torch.int64), BATCH),
        (zeros(2, 5, 8, dtype=torch.int64), BATCH),
        (zeros(2, 3, 8, 8), BATCH),
        (zeros(), None),
    ],
)
def test_rank_and_dtype_decide(tensor: torch.Tensor, expected: Any) -> None:
    chosen = default_dims((tensor,))
    assert chosen.dynamic_shapes == (expected,)
    assert chosen.warnings == ()
    assert chosen.args[0] is tensor


def test_an_image_of_each_step_has_the_size_of_the_sequence() -> None:
    observed = {"image": zeros(2, 6, 3, 8, 8), "state": zeros(2, 6, 7)}
    (chosen,) = default_dims((observed,)).dynamic_shapes
    assert chosen == {"image": {0: Dim.DYNAMIC, 1: Dim.AUTO}, "state": BOTH}
    assert default_dims((zeros(2, 3, 5, 8, 8), zeros(2, 6, 7))).dynamic_shapes == (BATCH, BOTH)


def test_a_stack_of_states_has_its_batch_behind_the_layers() -> None:
    x, states = zeros(3, 5, 8), zeros(2, 3, 4, 8, 8)
    assert default_dims((x, states)).dynamic_shapes == (BOTH, {1: Dim.DYNAMIC})
    assert default_dims((x, zeros(2, 3, 8))).dynamic_shapes == (BOTH, {1: Dim.DYNAMIC})
    one = default_dims((zeros(1, 5, 8), zeros(2, 1, 4, 8, 8)))
    assert [tuple(t.shape) for t in one.args] == [(2, 5, 8), (2, 2, 4, 8, 8)]


def test_a_tensor_without_a_batch_is_constant_where_others_take_more_rows() -> None:
    examples = (zeros(3, 5, 8), zeros(4, 8, 8))
    chosen = default_dims(examples, lambda args: [] if args[1].shape == (4, 8, 8) else None)
    assert chosen.dynamic_shapes == (BOTH, None)
    assert "(4, 8, 8) are constant" in chosen.warnings[-1]
    assert default_dims(examples, lambda args: None).dynamic_shapes == (None, None)


@pytest.mark.parametrize("place", [0, 1])
def test_as_many_layers_as_rows_are_told_apart_by_running(place: int) -> None:
    def runs(examples: Any) -> list[torch.Tensor] | None:
        x, states = examples
        same = states.shape[place] == x.shape[0] and states.shape[1 - place] == 2
        return [] if same else None

    chosen = default_dims((zeros(2, 5, 8), zeros(2, 2, 4, 8)), runs)
    assert chosen.dynamic_shapes == (BOTH, {place: Dim.DYNAMIC})


def test_nested_and_constant_arguments() -> None:
    pair = namedtuple("pair", "a b")
    x, flag = zeros(2, 5, 8), 3
    chosen = default_dims((x, [x, None], {"k": (x, flag)}, "text", pair(x, 1.5)))
    assert chosen.dynamic_shapes == (BOTH, [BOTH, None], {"k": (BOTH, None)}, None, (BOTH, None))
    assert chosen.args[1:4] == ([x, None], {"k": (x, 3)}, "text")
    assert isinstance(chosen.args[4], pair)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ((zeros(2, 5, 8), zeros(3, 5, 8)), "different first dims (2, 3)"),
        ((zeros(4), zeros(7)), "different first dims (4, 7)"),
        ((zeros(0, 5, 8),), "a batch of 0"),
    ],
)
def test_batches_that_cannot_vary_stay_constant(args: Any, match: str) -> None:
    chosen = default_dims(args)
    assert chosen.dynamic_shapes == (None,) * len(args)
    assert chosen.args == args
    (warning,) = chosen.warnings
    assert match in warning


def test_a_batch_of_one_is_repeated_with_its_values() -> None:
    x, mask, scalar = torch.randn(1, 5, 8), torch.rand(1, 5) > 0.5, torch.tensor(3.0)
    chosen = default_dims((x, mask, scalar))
    assert [tuple(t.shape) for t in chosen.args] == [(2, 5, 8), (2, 5), ()]
    assert torch.equal(chosen.args[0], torch.cat([x, x]))
    assert chosen.args[1].dtype == torch.bool
    (warning,) = chosen.warnings
    assert "batch of 1 was repeated to 2" in warning


def test_a_sequence_of_one_is_repeated() -> None:
    chosen = default_dims((torch.tensor([[4], [7]]),))
    assert chosen.args[0].tolist() == [[4, 4], [7, 7]]
    assert chosen.dynamic_shapes == (BOTH,)
    assert "sequence of 1 was repeated" in chosen.warnings[0]


def test_both_of_one_are_repeated() -> None:
    chosen = default_dims((zeros(1, 1, 8),))
    assert chosen.args[0].shape == (2, 2, 8)
    assert len(chosen.warnings) == 2


def test_a_one_among_longer_sequences_is_a_broadcast_and_stays() -> None:
    chosen = default_dims((zeros(2, 5, 8), zeros(2, 1, dtype=torch.bool)))
    assert chosen.dynamic_shapes == (BOTH, BATCH)
    assert chosen.args[1].shape == (2, 1)
    assert chosen.warnings == ("dim 1 of the inputs where it is 1 is constant",)


def test_numbers_of_each_token_vary_with_the_sequence_where_torch_lets_them() -> None:
    numbers = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.AUTO}
    heads = zeros(2, 5, 3, dtype=torch.bool)
    chosen = default_dims((zeros(2, 5, 8), zeros(2, 5), zeros(2, 8), heads, zeros(2, 5, 8, 8)))
    assert chosen.dynamic_shapes == (BOTH, numbers, BATCH, numbers, BATCH)
    assert chosen.warnings == ()
    chosen = default_dims((zeros(2, 8, 8), zeros(2, 8)))
    assert chosen.dynamic_shapes == (BOTH, BATCH)
    assert "8 is a width as well as a length" in chosen.warnings[0]


class LastRows(torch.nn.Module):
    """Takes rows in front of the tokens, and more of them, and returns the last three."""

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([seen, x], 1)
        return rows[:, : x.shape[1]].cumsum(1), rows[:, -3:]


class Memory(torch.nn.Module):
    """Reads a memory of any length, and returns nothing of its size."""

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return x + memory.mean(1, keepdim=True)


def test_rows_that_are_returned_as_many_as_they_are_given_are_a_state() -> None:
    args = zeros(2, 12, 8), zeros(2, 3, 8)
    assert load_module((LastRows(), args), "a:m").dynamic_shapes == (BOTH, BATCH)
    assert load_module((Memory(), args), "a:m").dynamic_shapes == (BOTH, BOTH)


def test_an_empty_sequence_stays_constant() -> None:
    chosen = default_dims((zeros(2, 0, 8),))
    assert chosen.dynamic_shapes == (BATCH,)
    assert chosen.warnings == ("dim 1 of the inputs where it is 0 is constant",)


def test_torch_accepts_what_was_chosen() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: Any, pair: Any, flag: bool) -> torch.Tensor:
            return x * pair["mask"][..., None] if flag else x

    chosen = default_dims((zeros(1, 1, 8), {"mask": zeros(1, 1, dtype=torch.bool)}, True))
    exported = torch.export.export(Masked(), chosen.args, dynamic_shapes=chosen.dynamic_shapes)
    other = (torch.randn(3, 7, 8), {"mask": torch.rand(3, 7) > 0.5}, True)
    torch.testing.assert_close(exported.module()(*other), Masked()(*other))


class Stamped(torch.nn.Module):
    """Takes a number of each token, of each channel, and a state."""

    def forward(
        self, x: torch.Tensor, times: torch.Tensor, width: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        late = torch.exp(times[:, :1] - times)[..., None]
        return x * late + width[:, None, :] + x @ state


@pytest.mark.parametrize("length", [8, 5, 1])
def test_where_sizes_do_not_tell_the_module_is_run_with_longer_ones(length: int) -> None:
    """Tokens as many as channels: times vary with them, and neither the width nor the state do."""
    examples = (zeros(2, length, 8), zeros(2, length), zeros(2, 8), zeros(2, 8, 8))
    loaded = load_module((Stamped(), examples), "stamped:make")
    times = loaded.dynamic_shapes[1]
    assert loaded.dynamic_shapes == (BOTH, times, BATCH, BATCH)
    assert loaded.unclear_dims == ()
    if length > 1:
        assert times == {0: Dim.DYNAMIC, 1: Dim.AUTO}
        trace(loaded)


def test_two_sequences_of_their_own_vary_both() -> None:
    class Cross(torch.nn.Module):
        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            return x @ memory.mT @ memory

    for lengths in ((8, 8), (5, 7)):
        x, memory = (zeros(2, n, 8) for n in lengths)
        assert load_module((Cross(), (x, memory)), "c:m").dynamic_shapes == (BOTH, BOTH)


def test_a_model_of_one_length_is_taken_as_that() -> None:
    """Tokens as many as channels, and no other number of them runs."""

    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            assert x.shape[1] == 8
            return x * times[..., None]

    loaded = load_module((Fixed(), (zeros(2, 8, 8), zeros(2, 8))), "fixed:make")
    assert loaded.dynamic_shapes == (BATCH, BATCH)
    assert "dim 1 of the inputs where it is 8 is constant" in loaded.warnings
    trace(loaded)


def test_a_model_at_its_longest_takes_shorter_ones() -> None:
    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return (x + self.table[: x.shape[1]]) * scale[:, None]

    loaded = load_module((Positions(), (zeros(2, 8, 8), zeros(2, 8))), "positions:make")
    assert loaded.dynamic_shapes == (BOTH, BATCH)


class Rows(torch.nn.Module):
    """RWKV-4's state: rows that are read by number, and returned."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums, last = state[:, 0], state[:, 1]
        late = torch.cat([last[:, None], x[:, :-1]], 1)
        sums = sums[:, None] + (x * late).cumsum(1)
        return sums, torch.stack([sums[:, -1], x[:, -1]], 1)


def test_rows_of_a_state_that_are_read_by_number_do_not_vary() -> None:
    for examples in ((zeros(2, 5, 8), zeros(2, 2, 8)), (torch.randn(2, 9, 2), zeros(2, 2, 2))):
        assert load_module((Rows(), examples), "rows:make").dynamic_shapes == (BOTH, BATCH)


class Step(torch.nn.Module):
    """One step of Mamba's recurrence, as ``mamba_ssm`` writes it: caches are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.taps, self.rate = torch.nn.Parameter(torch.rand(8, 4)), torch.nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, conv: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.squeeze(1)
        conv.copy_(torch.roll(conv, shifts=-1, dims=-1))
        conv[:, :, -1] = x
        x = (conv * self.taps).sum(-1)
        state.copy_(state * self.rate(x).sigmoid()[..., None] + x[..., None])
        return state.sum(-1, keepdim=True).mT, conv, state


def test_a_step_that_changes_its_caches_converts(tmp_path: Path) -> None:
    """The caller's tensors are what they were, in each run of the comparison."""
    torch.manual_seed(0)
    module, caches = Step().eval(), (torch.randn(2, 8, 4), torch.randn(2, 8, 3))
    before = [c.clone() for c in caches]
    loaded = load_module((module, (torch.randn(2, 1, 8), *caches)), "step:make")
    assert loaded.dynamic_shapes == (BATCH, BATCH, BATCH)
    assert any("writes to tensors that it is given" in text for text in loaded.warnings)
    manifest = linexport.convert(loaded, tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok"
    assert all(torch.equal(*pair) for pair in zip(before, caches, strict=True))
    given = [torch.randn(3, *shape) for shape in ((1, 8), (8, 4), (8, 3))]
    with torch.no_grad():
        expected = module(*(x.clone() for x in given))
    found = linexport.load(tmp_path / "a").run(*(x.numpy() for x in given))
    for one, exact in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(one, exact.numpy(), rtol=1e-5, atol=1e-5)


def test_caches_of_several_layers_are_tried_by_their_sizes() -> None:
    """Token ids beside a list of pairs, whose dim 1 has channels."""

    class Layers(torch.nn.Module):
        def forward(self, ids: torch.Tensor, caches: Any) -> Any:
            x, new = ids[..., None] + torch.zeros(6), []
            for conv, sums in caches:
                long = torch.cat([conv, x.mT], -1)
                x = long[..., :-2].mT + sums[:, None].mean(-1) + x
                new.append((long[..., -2:], sums + x.sum(1)[..., None]))
            return x, new

    caches = [(zeros(2, 6, 2), zeros(2, 6, 4)) for _ in range(3)]
    loaded = load_module((Layers(), (zeros(2, 9, dtype=torch.int64), caches)), "layers:make")
    assert loaded.dynamic_shapes == (BOTH, [(BATCH, BATCH)] * 3)
