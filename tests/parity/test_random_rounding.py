"""Tokens that rounding moves far: how far an artifact may be off there, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linexport import parity
from linexport.graph.dims import DimRange
from linexport.parity.cases import Case, ChosenSizes
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_rows
from linexport.parity.noise import own_rounding, random_rounding
from linexport.parity.noise.float32_error import apart_by_row
from linexport.parity.noise.own_rounding import compare_runs
from linexport.parity.noise.random_rounding import RandomRounding, draw, rounding_of_rows
from linexport.parity.tolerances import TOLERANCES
from linexport.sources.loaded_model import LanguageFacts, LoadedModel, Source

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = TOLERANCES["float32"]
VOCABULARY, HEADS, WIDTH = 32, 2, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_go_to_one_of_their_neighbours_and_stay_in_the_mean(dtype: torch.dtype) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x += 0.01 * x.sign()  # float16 has fewer digits of what is smaller
    with RandomRounding(dtype, 1):
        rounded = x * 1.0
    assert torch.equal(rounded, rounded.to(dtype).double())
    shares = (rounded - x) / (x.abs().log2().floor().exp2() * torch.finfo(dtype).eps)
    most = 1.0 if dtype == torch.float32 else 0.625
    assert -most < shares.min() < 0.01 - most and most - 0.01 < shares.max() < most
    # A share has a variance of 1/6 at most: its mean is beyond 5 deviations once in 2 million.
    assert shares.mean().abs() < 5 * (1 / 6 / len(x)) ** 0.5


def test_what_the_precision_has_stays_and_views_are_left_alone() -> None:
    held = torch.tensor([[1.5, -0.0, torch.inf], [torch.nan, 2.0**-140, -3e38]]).double()
    whole = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    with RandomRounding(torch.float32, 0):
        moved = torch.cat([held, held.flip(0)]).t().contiguous()
        view = whole.view(3, 2)
        whole[0].mul_(1.0)  # in place, and through a view
    assert moved[:, :2].t().equal(held) or torch.allclose(moved[:, :2].t(), held, equal_nan=True)
    assert view[0, 0] == whole[0, 0] == np.float32(whole[0, 0]) and whole[1, 0] == 1 / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_distributed_as_those_of_a_run_in_that_precision(dtype: torch.dtype) -> None:
    """In the median of 2,000 rows of a network with a norm, within a factor of two."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32), nn.RMSNorm(32, eps=1e-6)),
        *(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)),
    )
    x = torch.randn(2000, 32)
    with torch.no_grad():
        narrow, x = layers.to(dtype), x.to(dtype)
        own = narrow(x).double().numpy()
        wide, x = layers.double(), x.double()
        exact = wide(x).numpy()
        with RandomRounding(dtype, 0):
            drawn = wide(x).numpy()
    ratio = np.median(apart_by_row(own, exact)) / np.median(apart_by_row(drawn, exact))
    assert 0.5 < ratio < 2


def test_a_loss_that_is_not_finite_allows_nothing() -> None:
    single = np.array([[1.0, np.nan], [np.inf, 2.0]])
    assert apart_by_row(single, np.array([[1.5, 1.0], [1.0, 2.25]])).tolist() == [0.5, 0.25]


def test_choices_are_not_left_to_roundings() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)

    def run(deciding: Any) -> np.ndarray:
        with deciding:
            values, places = (x * 1.1).topk(2)
        return (values * (1 + places)).numpy()

    assert draw(run, "float32", 0) is None
    choices = [(-x).topk(2).indices.numpy()]
    drawn = draw(run, "float32", 0, choices)
    expected = 1.1 * x.numpy() * (1 + np.arange(6))
    assert drawn is not None
    np.testing.assert_allclose(drawn, np.take_along_axis(expected, choices[0], 1), rtol=1e-6)


def test_draws_end_where_no_row_is_off() -> None:
    exact, drawn = np.zeros((3, 2)), []

    def run(seed: int) -> np.ndarray:
        drawn.append(seed)
        return np.full((3, 2), 1.0 + seed)

    known = np.array([5.0, 0.5, 0.25])
    found = rounding_of_rows(known, exact, run, lambda rounding: rounding < [1, 3, 0])
    assert found.tolist() == [5.0, 3.0, 0.25] and drawn == [0, 1, 2]
    assert known.tolist() == [5.0, 0.5, 0.25]


def test_rows_are_compared_by_roundings_of_their_own() -> None:
    expected = np.ones((2, 3, 4), np.float32)
    got = expected.copy()
    got[1, 2, 3] += 1e-3
    rounding = np.zeros(6)
    found = compare_rows(expected, got, TOLERANCE, rounding)
    assert not found.passed and "1 of 6 tokens" in str(found.reason)
    assert "[1, 2]" in str(found.reason)
    rounding[5] = 3e-4
    assert compare_rows(expected, got, TOLERANCE, rounding).passed
    assert not compare_rows(expected, got, TOLERANCE, rounding[::-1]).passed
    got[0, 0, 0] = np.nan
    assert not compare_rows(expected, got, TOLERANCE, rounding).passed


class Difference(nn.Module):
    """The norm of the difference of two heads whose decays are nearly the same.

    Of a sequence's first tokens nearly nothing is left in it: ill-conditioned by construction, from
    6 of the largest value's digits at late tokens to 3 at the second.

        y_h[t] = sum_{s <= t} a_h^(t - s) (q_t . k_s) v_s      y = y_0 - y_1
        logits = W y / sqrt(mean(y^2) + eps)

    ``pairs`` says whether all pairs of tokens are made, as in the original, or a state. Decays have
    few digits, so that the state does not differ by their rounding at every token alike.
    """

    def __init__(self, pairs: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, generator=generator), requires_grad=False)

        self.qkv, self.out = drawn(3, VOCABULARY, WIDTH), drawn(WIDTH, VOCABULARY)
        decays = torch.tensor([1 - 2.0**-5, 1 - 2.0**-5 - 2.0**-12])
        self.decays = nn.Parameter(decays, requires_grad=False)
        self.pairs, self.eps, self.masks, self.late = pairs, 1e-8, True, 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv[:, input_ids]
        if self.masks:
            v = v * attention_mask[..., None]
        heads = (self._pairs if self.pairs else self._state)(q, k, v)
        return self.normed(heads[0] - heads[1]) @ self.out

    def normed(self, y: Tensor) -> Tensor:
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)

    def _pairs(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        places = torch.arange(q.shape[1])
        apart = (places[:, None] - places).clamp(min=0).to(q.dtype)
        return [(q @ k.mT * (a**apart).tril()) @ v for a in self.decays]

    def _state(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        heads = []
        for a in self.decays:
            state, outputs = torch.zeros(len(q), WIDTH, WIDTH), []
            for t in range(q.shape[1]):
                after = a * state + k[:, t, :, None] * v[:, t, None]
                outputs.append(torch.einsum("bk,bkv->bv", q[:, t], state if self.late else after))
                state = after
            heads.append(torch.stack(outputs, 1))
        return heads


class AtFewTokens(Difference):
    """Another function where the difference is small, the same at all other tokens."""

    def normed(self, y: Tensor) -> Tensor:
        small = y.pow(2).mean(-1, keepdim=True) < 1e-4
        return super().normed(torch.where(small, y.roll(1, -1), y))


def checked(original: nn.Module, artifact: nn.Module, seed: int = 0) -> parity.Parity:
    """Outcome for an artifact that is a module in float32."""

    def run(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = (torch.from_numpy(given[name]) for name in ("input_ids", "attention_mask"))
        with torch.no_grad():
            return {"logits": artifact(*tensors).numpy()}

    tested: Any = SimpleNamespace(
        packed=False,
        loaded=SimpleNamespace(
            module=original,
            language=LanguageFacts(VOCABULARY, None, (), "base"),
            vision=None,
            given=None,
        ),
        open=lambda: SimpleNamespace(run=run),
        open_changed=None,
        dims={"batch": DimRange(batch=True), "seq": DimRange()},
        states=(),
        output_names=["logits"],
        tolerance=TOLERANCE,
        initial_state=lambda batch: {},
        complete=dict,
        chosen=ChosenSizes((1, 2, 7, 65, 150), (1, 3)),
        behind_at_once=0,
    )
    return parity.check_language(tested, seed)


def test_a_state_in_place_of_pairs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of both have a distribution; nothing of it is in the first run of each."""
    for seed in range(4, 7):
        found = checked(Difference(), Difference(pairs=False), seed)
        assert found.passed
        assert found.record().max_relative_error > TOLERANCE.relative
    assert any("Random roundings of float32" in note for note in found.notes)
    monkeypatch.setattr(random_rounding, "DRAWS", 0)
    assert not checked(Difference(), Difference(pairs=False), seed).passed


def _eps(artifact: Difference) -> None:
    artifact.eps = 0.0


def _mask(artifact: Difference) -> None:
    artifact.masks = False


def _swapped(artifact: Difference) -> None:
    artifact.decays.data = artifact.decays.flip(0)


def _late(artifact: Difference) -> None:
    artifact.late = 1


def _decay(artifact: Difference) -> None:
    artifact.decays.data = artifact.decays * torch.tensor([1 + 1e-4, 1.0])


def _decays(artifact: Difference) -> None:
    artifact.decays.data = artifact.decays * (1 + 1e-4)


@pytest.mark.parametrize("fault", [_eps, _mask, _swapped, _late, _decay, _decays])
def test_a_fault_of_an_ill_conditioned_model_is_found(
    fault: Callable[[Difference], None],
) -> None:
    artifact = Difference(pairs=False)
    fault(artifact)
    assert not checked(Difference(), artifact).passed


def test_a_fault_at_ill_conditioned_tokens_alone_is_found() -> None:
    assert not checked(Difference(), AtFewTokens(pairs=False)).passed


class Cancelling(nn.Module):
    """The sign, but for nearly equal numbers, of a difference between two channels of attention."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 2) to (B, T, 1)."""
        q = nn.functional.silu(x)
        return self.sign((q @ q.mT).tril() @ x)

    @staticmethod
    def sign(out: Tensor) -> Tensor:
        difference = out[..., :1] - out[..., 1:]
        return difference * torch.rsqrt(difference * difference + 1e-7)

    def in_chunks(self, x: Tensor) -> Tensor:
        """What an artifact computes: chunks of 16 tokens with a state."""
        state, found = x.new_zeros(len(x), 2, 2), []
        for part in x.split(16, 1):
            q = nn.functional.silu(part)
            found.append((q @ q.mT).tril() @ part + q @ state)
            state = state + q.mT @ part
        return self.sign(torch.cat(found, 1))


def test_two_runs_may_differ_where_the_original_was_right_by_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces, or by the library: four times the loss of one run of the original is too little.

    Elsewhere nothing more is allowed.
    """
    module = Cancelling()

    def is_off(x: Tensor) -> bool:
        whole, exact = module(x).numpy(), module(x.double()).numpy()
        limit = TOLERANCE.limit(np.abs(whole).max(), np.abs(whole - exact).max())
        return bool(np.abs(whole - module.in_chunks(x).numpy()).max() > limit)

    seeds = (torch.Generator().manual_seed(n) for n in (350, 267, *range(1_000)))
    x = next(filter(is_off, (torch.randn(2, 150, 2, generator=seed) for seed in seeds)))
    monkeypatch.setattr(own_rounding, "draw_inputs", lambda *_: ((x,), {}))
    tested: Any = SimpleNamespace(
        packed=False,
        loaded=SimpleNamespace(module=module, given=None),
        input_shapes=(),
        output_names=("y",),
        tolerance=TOLERANCE,
        open_changed=None,
    )
    case = Case("stream", {"seq": 150}, 0)
    whole, pieces = module(x).numpy(), module.in_chunks(x).numpy()

    def compare(second: np.ndarray) -> bool:
        found = compare_runs(tested, case, {"y": whole}, {"y": second}, lambda _: None)
        return found["y"].passed

    assert compare(pieces)
    steady = int(np.abs(whole - pieces)[0].argmin())
    wrong = pieces.copy()
    wrong[0, steady] += 1e-4
    assert not compare(wrong)


class Lucky(nn.Module):
    """Loses nothing in float32: it computes in float64, where others have 1e-7 of large angles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(3 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        return (x.double() @ self.w.double()).sin().to(x.dtype)


def stretched(stretch: float) -> parity.Parity:
    """Parity of a program in float32 that has other angles, by that factor."""
    module = Lucky()
    weight = module.w.detach().numpy() * np.float32(stretch)
    example = (torch.randn(2, 16, WIDTH),)
    tested = ModelUnderTest(
        LoadedModel(module, example, {}, None, Source("factory", "here", None, "a layer")),
        lambda: SimpleNamespace(run=lambda given: {"y": np.sin(given["x"] @ weight)}),
        ["x"],
        [["batch", "seq", WIDTH]],
        ["y"],
        [["batch", "seq", WIDTH]],
        [],
        {"batch": DimRange(batch=True), "seq": DimRange(1, 16, 60)},
        {"batch": 2, "seq": 16},
    )
    return parity.check(tested)


def test_at_large_inputs_an_original_that_was_right_by_chance_fails_nothing() -> None:
    found = stretched(1.0)
    [note] = [n for n in found.notes if "lost less by chance" in n]
    assert found.passed and "on the large inputs at batch 3" in note
    wrong = stretched(1 + 1e-6)
    assert {case.name for case in wrong.cases if not case.passed} == {"large"}
