"""Inputs are drawn like those of the example: of its kind, within its range where it has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from linexport.conversion.context import Checks
from linexport.conversion.pipeline import convert_checked
from linexport.manifest import ConvertOptions
from linexport.parity.cases import Case, ChosenSizes, draw_inputs, unbounded
from linexport.parity.input_kinds import draw_like
from linexport.sources.bounds import bounds_of
from linexport.sources.factory import load_module
from linexport.targets.base import OrtSession

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH_SEQ = ("batch", "seq")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def like(example: Tensor, *shape: int, seed: int = 0) -> Tensor | None:
    dims = (*BATCH_SEQ, *example.shape[2:])[: example.dim()]
    return draw_like(example, dims, shape, generator(seed))


def drawn(example: Tensor, *shape: int) -> Tensor:
    found = like(example, *shape)
    assert found is not None and tuple(found.shape) == shape and found.dtype == example.dtype
    return found


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), length=st.integers(1, 60), low=st.sampled_from((0.0, 0.5, -1.0))
)
def test_bounded_values_stay_within_the_range_of_the_example(
    seed: int, length: int, low: float
) -> None:
    example = low + (1 - low) * torch.rand(2, 12, generator=generator(seed))
    found = like(example, 3, length, seed=seed)
    assert found is not None
    assert float(found.min()) >= float(example.min()) - 1e-6
    assert float(found.max()) <= float(example.max()) + 1e-6


def test_normal_values_have_no_kind() -> None:
    assert like(torch.randn(2, 12, 16), 2, 5, 16) is None
    assert like(torch.randn(2, 12), 2, 5) is None
    assert like(torch.zeros(2, 12), 2, 5) is None
    assert like(torch.randint(0, 9, (2, 12)), 2, 5) is None


def test_few_values_are_of_no_kind_by_chance() -> None:
    assert bounds_of(torch.tensor([[0.5, 0.2], [0.3, 0.9]])) is None
    assert like(torch.tensor([[0.1, 0.2, 1.3]]), 2, 5) is None


def test_values_that_are_not_finite_have_no_kind() -> None:
    assert like(torch.full((2, 12), -torch.inf).tril(), 2, 5) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_times_are_sorted_along_the_tokens(sign: int) -> None:
    example = sign * (torch.rand(2, 12) + 0.1).cumsum(1)
    steps = sign * drawn(example, 3, 40).diff(dim=1)
    assert float(steps.min()) >= 0.1 - 1e-5 and float(steps.max()) <= 1.1 + 1e-5
    assert float(drawn(example, 3, 40).abs().max()) > float(example.abs().max())  # time goes on


def test_positions_are_sorted_integers_of_the_range() -> None:
    example = torch.arange(12).expand(2, -1)
    found = drawn(example, 3, 40)
    assert bool((found.diff(dim=1) >= 0).all())
    assert int(found.min()) >= 0 and int(found.max()) <= 11


def test_probabilities_sum_to_one_and_choices_are_single() -> None:
    found = drawn(torch.randn(2, 12, 4).softmax(-1), 3, 5, 4)
    assert bool((found > 0).all())
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 5))
    chosen = drawn(torch.eye(4)[torch.randint(4, (2, 12))], 3, 5, 4)
    assert set(chosen.unique().tolist()) == {0.0, 1.0} and bool((chosen.sum(-1) == 1).all())


@pytest.mark.parametrize("flipped", [False, True])
def test_masks_of_padding_are_true_from_one_end(flipped: bool) -> None:
    example = torch.arange(12) < torch.tensor([[12], [7]])
    example = example.flip(1) if flipped else example
    found = drawn(example, 6, 40)
    found = found.flip(1) if flipped else found
    assert bool((found.int().diff(dim=1) <= 0).all()) and bool(found[:, 0].all())
    assert not bool(found.all())


def test_flags_are_as_rare_as_those_of_the_example() -> None:
    resets = torch.zeros(2, 40).bool()
    resets[0, 7] = resets[1, 20] = True
    assert 0.05 < float(drawn(resets, 8, 100).float().mean()) < 0.4
    assert float(drawn(~resets, 8, 100).float().mean()) > 0.6


def test_ids_are_those_that_the_table_has() -> None:
    """Not only those of the example; and no other."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    loaded = load_module((Words(), (torch.zeros(2, 12, dtype=torch.int64),)), "words:make")
    case = Case("random", {"batch": 4, "seq": 400}, 0)
    (ids,), _ = draw_inputs(loaded, [BATCH_SEQ], case)
    assert isinstance(ids, Tensor)
    assert int(ids.min()) >= 0 and int(ids.max()) < 50 and len(ids.unique()) > 40


def test_values_beyond_the_bounds_are_tried_once() -> None:
    x, g = torch.randn(2, 12, 8), torch.rand(2, 12)
    loaded = load_module((Fade(), (x, g)), "fade:make")
    plan = [Case("random", {"batch": 3, "seq": 30}, 5)]
    (beyond,) = unbounded(loaded, plan)
    (_, decay), _ = draw_inputs(loaded, [(*BATCH_SEQ, 8), BATCH_SEQ], beyond)
    assert isinstance(decay, Tensor) and float(decay.min()) < 0
    assert unbounded(load_module((nn.Linear(8, 8), (x,)), "linear:make"), plan) == []


class Fade(nn.Module):
    """Decays that are given, by their logarithms."""

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """(B, T, 8) and (B, T)."""
        c = g.log().cumsum(1)
        return ((x @ x.mT) * torch.exp(c[:, :, None] - c[:, None, :])).tril() @ x


class Products(nn.Module):
    """The same by a quotient of products."""

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """(B, T, 8) and (B, T)."""
        c = g.cumprod(1)
        return ((x @ x.mT) * (c[:, :, None] / c[:, None, :])).tril() @ x


@pytest.mark.parametrize(("kind", "beyond"), [(Fade, 1), (Products, 0)])
def test_a_decay_that_is_an_input_is_fused(
    kind: Callable[[], nn.Module], beyond: int, tmp_path: Path
) -> None:
    """It was drawn negative, so that its logarithm was not a number, and the match withdrawn."""
    result = (kind(), (torch.randn(2, 12, 8), torch.rand(2, 12) * 0.5 + 0.5))
    manifest = convert_checked(
        load_module(result, "own:make"),
        tmp_path / "out",
        ConvertOptions(bench=False, threads=1),
        Checks(ChosenSizes((1, 12, 37), (1, 3))),
    )
    assert manifest.status == "ok" and manifest.fused["LinearAttention"]
    assert not [c for c in manifest.parity.cases if c.nan.got and c.name == "random"]
    said = [w for w in manifest.warnings if w.startswith("On inputs beyond the bounds")]
    assert len(said) == beyond


class Scaled(nn.Module):
    """Takes numbers of any sign."""

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        """(B, T, 8) and (B, T)."""
        return ((x @ x.mT).tril() @ x) * g[..., None]


@pytest.mark.parametrize(("wrong", "status"), [(np.nan, "ok"), (1.1, "parity_failed")])
def test_numbers_beyond_the_bounds_are_right_or_none(
    wrong: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact that gives no numbers there is for the range of the example, which it says."""
    run = OrtSession.run

    def changed(self: OrtSession, inputs: Any) -> dict[str, np.ndarray]:
        beyond = "g" in inputs and bool((inputs["g"] < 0).any())
        return {n: x * wrong if beyond else x for n, x in run(self, inputs).items()}

    monkeypatch.setattr(OrtSession, "run", changed)
    manifest = convert_checked(
        load_module((Scaled(), (torch.randn(2, 12, 8), torch.rand(2, 12))), "own:make"),
        tmp_path / "out",
        ConvertOptions(bench=False, threads=1),
        Checks(ChosenSizes((1, 12), (1,))),
    )
    assert manifest.status == status
    said = [w for w in manifest.warnings if "the artifact NaN or infinite values" in w]
    assert bool(said) is (status == "ok")


def test_a_file_in_onnx_has_no_example_of_a_user(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    from linexport.sources import load_model

    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", "seq", 4]) for n in ("x", "y")
    )
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
    loaded: Any = load_model(tmp_path / "m.onnx")
    assert unbounded(loaded, [Case("random", {}, 0)]) == []
    assert isinstance(np.asarray(loaded.args[0]), np.ndarray)
