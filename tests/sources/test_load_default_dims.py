"""Which dims of examples vary when the factory does not say."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.export import Dim

from linexport.errors import UnsupportedModelError
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


def test_where_running_does_not_tell_the_reason_is_the_error() -> None:
    """A model of whole chunks of 64 takes no other length that is tried."""

    class Chunks(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            assert x.shape[1] == 8
            return x * times[..., None]

    loaded = load_module((Chunks(), (zeros(2, 8, 8), zeros(2, 8))), "chunks:make")
    with pytest.raises(UnsupportedModelError) as refused:
        trace(loaded)
    assert "(batch, 8) is constant: 8 is a width as well as a length" in str(refused.value)
    assert "Python loop" not in str(refused.value)
    assert "test_load_default_dims.py" in str(refused.value)
