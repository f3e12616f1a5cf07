"""Asking the original: in float64 as well, unless that takes long."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from linexport.conversion.model_under_test import tolerance_of
from linexport.manifest.records import TensorRecord
from linexport.parity.cases import Case
from linexport.parity.reference import outputs as original
from linexport.parity.tolerances import TOLERANCES


def reference(dtype: torch.dtype) -> Any:
    def run(inputs: Any) -> list[np.ndarray]:
        time.sleep(0.01)
        return [np.ones(3)]

    named = SimpleNamespace(dtype=dtype, name=str(dtype).removeprefix("torch."), denominator=None)
    return type("Fake", (), {**vars(named), "__call__": staticmethod(run)})()


@pytest.mark.parametrize(("patience", "asked"), [(60.0, 2), (0.0, 1)])
def test_what_takes_long_is_asked_once_and_said(patience: float, asked: int) -> None:
    references = [reference(torch.float32), reference(torch.float64)]
    notes: list[str] = []
    case = Case("random", {"seq": 4097}, 0)
    given = (references, case, ((), {}), TOLERANCES["float32"], notes)
    found = original.run_reference(*given, patience=patience)
    assert [a.name for a in found] == ["float32", "float64"][:asked]
    assert len(references) == 2
    assert [("not run in float64" in n, "4097" in n) for n in notes] == [(True, True)] * (2 - asked)


@pytest.mark.parametrize(("magnitude", "compared"), [(1.0, 1), (0.0, 1), (100.0, 0)])
def test_large_inputs_are_not_compared_without_float64(magnitude: float, compared: int) -> None:
    notes: list[str] = []
    case = Case("large", {"seq": 100}, 0, magnitude)
    single = [reference(torch.float32)]
    found = original.run_reference(single, case, ((), {}), TOLERANCES["float32"], notes)
    assert len(found) == compared
    said = "on the large inputs at seq 100: there nothing is compared"
    assert [said in n for n in notes] == [True] * (1 - compared)


@pytest.mark.parametrize(("magnitude", "compared"), [(1.0, ["float64"]), (100.0, [])])
def test_what_overflows_on_large_inputs_is_not_compared(
    magnitude: float, compared: list[str]
) -> None:
    """On usual ones it is: there, NaN is a defect that an artifact may not have."""
    single, double = reference(torch.float32), reference(torch.float64)
    type(single).__call__ = staticmethod(lambda inputs: [np.array([1.0, np.inf, 1.0])])
    notes: list[str] = []
    case = Case("large", {"seq": 100}, 0, magnitude)
    found = original.run_reference([single, double], case, ((), {}), TOLERANCES["float32"], notes)
    assert [a.name for a in found] == compared
    assert ("nothing is compared" in notes[-1]) == (not compared)
    assert "overflows in float32 on the large inputs at seq 100 (1 values" in notes[-1]


def test_what_overflows_in_a_part_that_is_half_precision_is_named_with_its_sizes() -> None:
    half = reference(torch.float16)
    type(half).__call__ = staticmethod(lambda inputs: [np.array([1.0, np.inf, 1.0])])
    notes: list[str] = []
    case = Case("large", {"seq": 100}, 0, 100.0)
    tolerance = replace(TOLERANCES["float16"], whole=False)
    both = [half, reference(torch.float64)]
    assert not original.run_reference(both, case, ((), {}), tolerance, notes)
    assert notes[-1].endswith("the large inputs at seq 100: there nothing is compared.")


@pytest.mark.parametrize(
    ("precision", "outputs", "expected"),
    [
        ("fp32", ["float32", "int64"], "float32"),
        ("fp32", ["float32", "float16"], "float16"),
        ("bf16", ["float16"], "bfloat16"),
    ],
)
def test_a_model_in_half_precision_is_held_to_its_own(
    precision: str, outputs: list[str], expected: str
) -> None:
    records = [TensorRecord("output", kind, ()) for kind in outputs]
    assert tolerance_of(precision, records) == TOLERANCES[expected]
