"""A language model whose own rounding is more than the tolerance, and one whose is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linexport import parity
from linexport.graph.dims import DimRange
from linexport.parity.cases import DEFAULT_SIZES
from linexport.parity.noise import random_rounding
from linexport.parity.tolerances import TOLERANCES, Tolerance
from linexport.sources.loaded_model import LanguageFacts

VOCABULARY, CONTEXT = 16, 100

ERROR = 3e-4
"""Error that the artifact adds to a logit of about 4: 8e-5 of it."""


class Table(nn.Module):
    """Logits by token, to which a large number is added and subtracted again.

    float32 has 2^-10 beside 2^13, so that the sums lose up to 5e-4.
    """

    def __init__(self, large: float) -> None:
        super().__init__()
        drawn = np.random.default_rng(0).standard_normal((VOCABULARY, VOCABULARY))
        self.table = nn.Parameter(torch.from_numpy(np.float32(drawn)), requires_grad=False)
        self.large = large

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.table[input_ids] + self.large) - self.large


class Single(Table):
    """A model that float64 cannot be had of."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.table.dtype != torch.float32:
            raise TypeError("only float32 here")
        return super().forward(input_ids, attention_mask)


class NamesFloat32(Table):
    """A model that names the precision it computes in."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.table[input_ids].float() + self.large) - self.large


class Lucky(Table):
    """A model that loses nothing of a sequence of seven tokens."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.table[input_ids]
        return logits if logits.shape[1] == 7 else (logits + self.large) - self.large


class LuckyInHalf(Table):
    """A model that loses nothing in half precision, where others that round as it does would."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        half = self.table.dtype == torch.bfloat16
        return self.table[input_ids] if half else super().forward(input_ids, attention_mask)


class Running(Table):
    """A model whose logits are those of all tokens so far, added up."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (super().forward(input_ids, attention_mask) * attention_mask.unsqueeze(-1)).cumsum(1)


def check(
    module: Table, error: float, tolerance: Tolerance = TOLERANCES["float32"]
) -> parity.Parity:
    """Of an artifact without any rounding, but with that error in every logit."""
    table = module.table.numpy() + np.float32(error)

    def run(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = table[given["input_ids"]]
        if isinstance(module, Running):
            logits = np.cumsum(logits * given["attention_mask"][..., None], 1, np.float32)
        return {"logits": logits}

    tested: Any = SimpleNamespace(
        packed=False,
        loaded=SimpleNamespace(
            module=module, language=LanguageFacts(VOCABULARY, CONTEXT, ()), vision=None, given=None
        ),
        open=lambda: SimpleNamespace(run=run),
        open_changed=None,
        dims={"batch": DimRange(batch=True), "seq": DimRange()},
        states=(),
        output_names=["logits"],
        tolerance=tolerance,
        initial_state=lambda batch: {},
        complete=dict,
        chosen=DEFAULT_SIZES,
        behind_at_once=0,
    )
    return parity.check_language(tested)


def test_what_the_original_loses_to_rounding_is_allowed_for_and_said() -> None:
    found = check(Table(2.0**13), 0.0)
    assert found.passed and found.failed is None
    cases = found.record().cases
    allowed = [c for c in cases if c.rounding]
    assert {c.reference for c in allowed} == {"float32", "float64"}
    for case in allowed:
        assert case.reference == "float64" or case.max_relative_error > 5e-5
        assert case.max_absolute_error <= 4 * case.rounding
    exact = [c.max_relative_error for c in cases if c.reference == "float64"]
    assert max(exact) == 0.0
    assert any("loses" in note and "4 times that" in note for note in found.notes)


def test_an_artifact_without_states_writes_from_the_first_token_on() -> None:
    """Its next token follows from all before, which no state has for it."""
    found = check(Running(0.0), 0.0)
    assert found.passed
    assert found.greedy is not None and found.greedy.passed and found.greedy.different == 0


def test_the_reference_is_in_float64_where_the_model_names_float32() -> None:
    found = check(NamesFloat32(2.0**13), 0.0)
    assert found.passed
    exact = [c for c in found.record().cases if c.reference == "float64"]
    assert exact and all(c.max_relative_error == 0.0 < c.rounding for c in exact)


def test_what_one_case_loses_excuses_no_other_and_every_case_is_judged() -> None:
    """One length fails, and those behind it that rounding explains do not."""
    found = check(Lucky(2.0**13), ERROR)
    assert not found.passed and found.failed is not None
    assert found.failed.sizes == {"batch": 1, "seq": 7}
    cases = found.record().cases
    assert {case.length for case in cases if not case.passed} == {7}
    assert {case.passed for case in cases if case.length > 7} == {True}
    second = [case for case in cases if case.reference == "float64"]
    assert {case.batch for case in second} == {1, 3} and all(c.rounding is not None for c in second)
    [reason, *_] = (case.reason for case in cases if not case.passed)
    assert "tokens are off by more than rounding of the original explains" in str(reason)


@pytest.mark.parametrize(
    ("large", "error"),
    [
        pytest.param(2.0**13, 100 * ERROR, id="more than four times its rounding"),
        pytest.param(0.0, ERROR, id="an original without rounding"),
    ],
)
def test_what_rounding_does_not_explain_fails(large: float, error: float) -> None:
    found = check(Table(large), error)
    assert not found.passed
    assert found.failed is not None and found.failed.sizes == {"batch": 1, "seq": 1}
    assert not found.notes


def test_an_original_without_digits_is_named_where_it_fails_the_artifact() -> None:
    """2^-2 is left beside 2^21, and the logits are about 2."""
    found = check(Table(2.0**21), 0.0)
    worst = max(found.cases, key=lambda case: case.max_relative_error or 0.0)
    assert not found.passed and not worst.passed
    assert "the original itself loses 6e-02 of its largest value" in str(worst.reason)
    assert not check(Table(0.0), 1000 * ERROR).cases[0].reason


def test_without_float64_nothing_is_allowed_for() -> None:
    found = check(Single(2.0**13), 0.0)
    assert not found.passed and found.failed is not None
    assert any(note.startswith("No float64 reference: only float32") for note in found.notes)


def test_half_precision_has_a_tolerance_of_its_own() -> None:
    found = check(Table(0.0), 10 * ERROR, TOLERANCES["float16"])
    assert found.passed and found.tolerance.dtype == "float16"
    assert not check(Table(0.0), 100 * ERROR, TOLERANCES["float16"]).passed


def test_half_precision_is_judged_by_that_of_the_original() -> None:
    """bfloat16 has 2^-1 beside 64, so that the original itself is off by up to 0.25 of about 3."""
    half = TOLERANCES["bfloat16"]
    found = check(Table(64.0), 0.2, half)
    assert found.passed
    cases = found.record().cases
    theirs = [c for c in cases if c.reference == "bfloat16"]
    assert theirs and all(c.rounding > 0.1 for c in theirs)
    own = [c for c in cases if c.reference == "float32" and c.rounding]
    assert own and all(c.max_absolute_error > half.limit(4.0) for c in own)
    assert any("loses" in note and "rounding of bfloat16" in note for note in found.notes)


def test_half_precision_worse_than_that_of_the_original_fails() -> None:
    assert not check(Table(64.0), 0.4, TOLERANCES["bfloat16"]).passed
    assert not check(Table(0.0), 0.2, TOLERANCES["bfloat16"]).passed


def test_half_precision_is_judged_by_random_roundings_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = check(LuckyInHalf(64.0), 0.15, TOLERANCES["bfloat16"])
    assert found.passed
    assert any("Random roundings of bfloat16" in note for note in found.notes)
    assert not check(LuckyInHalf(64.0), 0.5, TOLERANCES["bfloat16"]).passed
    monkeypatch.setattr(random_rounding, "DRAWS", 0)
    assert not check(LuckyInHalf(64.0), 0.15, TOLERANCES["bfloat16"]).passed
