"""Routers whose experts have nearly the same score: rounding decides, in the original as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linexport import parity
from linexport.graph.dims import DimRange
from linexport.loaders.loaded_model import LanguageFacts, LoadedModel, Source
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.near_ties import RoundedOtherwise, settled
from linexport.parity.own_rounding import compare_runs
from linexport.parity.tolerances import TOLERANCES

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, WIDTH, TIE = 256, 8, 3
FLOAT32 = TOLERANCES["float32"]


class Routed(nn.Module):
    """Logits of one of two experts by scores, which for one token are nearly the same."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        embedding, router = (
            random.standard_normal((VOCABULARY, WIDTH)),
            random.standard_normal(WIDTH),
        )
        apart = random.standard_normal(WIDTH)
        embedding[TIE] -= apart * (embedding[TIE] @ apart) / (apart @ apart)
        scores = np.stack([router, router + apart], 1)
        experts = random.standard_normal((2, VOCABULARY, VOCABULARY))
        for name, value in {"embedding": embedding, "router": scores, "experts": experts}.items():
            held = nn.Parameter(torch.from_numpy(np.float32(value)), requires_grad=False)
            self.register_parameter(name, held)

    def choices(self) -> np.ndarray:
        """The expert of each token, in float64."""
        scores: Tensor = self.embedding.double() @ self.router.double()
        margins = (scores[:, 1] - scores[:, 0]).abs()
        assert margins[TIE] < 2e-7 and margins.sort().values[1] > 1e-3
        return scores.argmax(1).numpy()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        chosen = (self.embedding[input_ids] @ self.router).topk(1).indices[..., 0]
        found: Tensor = self.experts[chosen, input_ids]
        return found


def checked(changed: int | None, error: float = 0.0) -> parity.Parity:
    """Parity of an artifact with the other expert for one token, and an error in its logits."""
    module = Routed()
    choices = module.choices()
    if changed is not None:
        choices[changed] = 1 - choices[changed]
    table = module.experts.numpy()[choices, np.arange(VOCABULARY)]
    table[TIE] += np.float32(error)
    tested: Any = SimpleNamespace(
        loaded=SimpleNamespace(
            module=module, language=LanguageFacts(VOCABULARY, 100, ()), vision=None
        ),
        open=lambda: SimpleNamespace(run=lambda given: {"logits": table[given["input_ids"]]}),
        dims={"batch": DimRange(batch=True), "seq": DimRange()},
        states=(),
        output_names=["logits"],
        tolerance=FLOAT32,
        initial_state=lambda batch: {},
        complete=dict,
        chosen=parity.cases.USUAL,
    )
    return parity.check_language(tested)


def test_an_artifact_may_decide_a_near_tie_either_way() -> None:
    notes = [len(found.notes) for found in (checked(None), checked(TIE)) if found.passed]
    # float32 decides it one way: the artifact that has the other is settled, and that is said.
    assert len(notes) == 2 and sum(notes) > 0


def test_a_choice_that_rounding_does_not_decide_is_wrong() -> None:
    assert not checked(TIE + 1).passed


def test_what_the_other_expert_gives_is_compared_within_the_tolerance() -> None:
    assert not checked(TIE, 3e-3).passed and not checked(None, 3e-3).passed


class Layer(Routed):
    """x or 2 x by the scores of x, but of token 5, where they are nearly the same."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        given = x.clone()
        given[:, 5:6] = self.embedding[TIE]
        chosen = (given @ self.router).topk(1).indices
        return torch.where(chosen == 0, x, 2 * x)


def under_test(session: Any) -> ModelUnderTest:
    shape = ["batch", "seq", WIDTH]
    source = Source("factory", "tests", None, "")
    loaded = LoadedModel(Layer(), (torch.randn(1, 16, WIDTH),), {}, None, source)
    dims = {"batch": DimRange(batch=True), "seq": DimRange()}
    sizes = {"batch": 1, "seq": 16}
    return ModelUnderTest(loaded, lambda: session, ["x"], [shape], ["y"], [shape], [], dims, sizes)


@pytest.mark.parametrize(("token", "passed"), [(5, True), (6, False)])
def test_of_a_layer_as_well_and_it_is_said(token: int, passed: bool) -> None:
    def run(given: Any) -> dict[str, np.ndarray]:
        x = torch.from_numpy(given["x"])
        y = Layer()(x)
        if 16 <= x.shape[1] <= 100:
            y[0, token] = 3 * x[0, token] - y[0, token]  # the other of x and 2 x
        return {"y": y.numpy()}

    found = parity.check(under_test(SimpleNamespace(run=run)))
    assert found.passed is passed
    assert any("rounding decides a choice" in note for note in found.notes) or not passed


def test_two_runs_of_an_artifact_may_decide_a_near_tie_otherwise() -> None:
    tested = under_test(None)
    loaded, sizes = tested.loaded, {"batch": 1, "seq": 16}
    case = Case("stream", sizes, 0)
    [x], _ = draw_inputs(loaded, tested.input_shapes, case)
    first = loaded.module(x).numpy()
    for token, passed in ((5, True), (6, False)):
        second = first.copy()
        given = x[0, token].numpy()
        second[0, token] = 3 * given - first[0, token]  # the other of x and 2 x
        assert compare_runs(tested, case, "y", first, second).passed is passed


def test_an_original_without_choices_is_run_once_more_and_no_further() -> None:
    weight = torch.randn(4, 4)
    ran = []

    def run() -> np.ndarray:
        ran.append(1)
        return (torch.ones(3, 4) @ weight).numpy()

    expected = run()
    assert settled(expected, expected + 1, FLOAT32, 0.0, run) is expected
    assert len(ran) == 2


def test_an_original_that_cannot_be_run_so_has_no_near_ties() -> None:
    def run() -> np.ndarray:
        raise RuntimeError("no dispatch modes here")

    expected = np.ones((3, 4), np.float32)
    assert settled(expected, expected + 1, FLOAT32, 0.0, run) is expected


def test_products_are_off_by_some_roundings() -> None:
    x, w = torch.randn(50, 64), torch.randn(64, 30)
    with RoundedOtherwise(0):
        first, batched = x @ w, x.expand(2, 50, 64) @ w
    for found in (first, batched):
        exact = x @ w
        error = float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())
        assert 0.8 * 2**-21 < error < 1.3 * 2**-21
    with RoundedOtherwise(0):
        assert torch.equal(first, x @ w)
        double = x.double() @ w.double()
    assert torch.equal(double, x.double() @ w.double())
