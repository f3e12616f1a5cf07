"""What parity says of denominators, of non-finite output, and of the original's own rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linexport import models, parity
from linexport.graph.dims import DimRange
from linexport.manifest import Manifest
from linexport.models.functional import linear_attention
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.reference.outputs import VANISHED
from linexport.parity.tolerances import MAX_EXCUSED_SHARE, ROUNDING, TOLERANCES
from linexport.plugins.ops.linear_attention.chunk_torch import watch_denominators
from linexport.report.verdict import parity_check, verdict
from linexport.sources import LoadedModel, Source

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32 = TOLERANCES["float32"]


class Same:
    """A session that runs the original, with something done to its output."""

    def __init__(self, module: torch.nn.Module, change: Any = lambda y: y) -> None:
        self.module, self.change = module, change

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            output = self.module(*(torch.from_numpy(x) for x in inputs.values()))
        return {"output": self.change(output.numpy())}


def checked(module: Any, change: Any = lambda y: y) -> parity.Parity:
    """Parity of a layer of three inputs with what ``change`` makes of it."""
    example = module.example_inputs(2, 16, 0)
    tested = ModelUnderTest(
        LoadedModel(module, example, {}, None, Source("factory", "here", None, "a layer")),
        lambda: Same(module, change),
        ["query", "key", "value"],
        [["batch", "seq", t.shape[2]] for t in example],
        ["output"],
        [["batch", "seq", None]],
        [],
        {"batch": DimRange(batch=True), "seq": DimRange(1, 16, 60)},
        {"batch": 2, "seq": 16},
    )
    return parity.check(tested)


def layer(**settings: Any) -> Any:
    made = {"num_heads": 2, "head_dim": 4, **settings}
    return models.build("linear_attention_layer", made).eval()


def test_the_smallest_denominator_is_watched() -> None:
    q = torch.tensor([[[1.0], [2.0], [0.5]]])
    settings = {"q_num_heads": 1, "kv_num_heads": 1, "normalize": True, "eps": 0.25}
    with watch_denominators() as seen:
        linear_attention(q, q, q, **settings)
        linear_attention(q, q, q, **{**settings, "normalize": False})
        linear_attention(-q, q, q, **settings)
    # 1, 2 (1 + 2) and 0.5 (1 + 2 + 0.5), and the same with the other sign.
    assert [float(x) for x in seen] == [1.25, 0.75]
    linear_attention(q, q, q, **settings)
    assert len(seen) == 2


def test_the_record_says_the_smallest_denominator(sample_manifest: Manifest) -> None:
    found = checked(layer(feature_map="relu")).record()
    smallest = found.smallest_denominator
    assert smallest.denominator == pytest.approx(1e-6)
    line = parity_check(replace(sample_manifest, parity=found)).detail
    assert f"smallest |denominator| 1.0e-06 ({smallest.name}, " in line
    plain = checked(layer(normalize=False)).record()
    assert plain.smallest_denominator is None
    assert "denominator" not in parity_check(replace(sample_manifest, parity=plain)).detail


def test_a_vanished_denominator_is_a_failure_with_its_reason(
    sample_manifest: Manifest,
) -> None:
    """Even though the original gives NaN in the same places."""
    found = checked(layer(feature_map="relu", eps=0.0))
    assert not found.passed
    failed = [c for c in found.cases if not c.passed]
    assert {c.reason for c in failed} == {VANISHED}
    assert "zeros" in {c.name for c in failed}
    assert found.record().smallest_denominator.denominator == 0
    assert any("The original itself gives" in note for note in found.notes)
    manifest = replace(sample_manifest, status="parity_failed", parity=found.record())
    assert "a denominator of linear attention is 0" in verdict(manifest).sentence


def test_values_finite_on_one_side_only_are_a_reason() -> None:
    expected = np.ones(4)
    got = np.array([1.0, np.nan, np.inf, 1.0])
    assert compare_arrays(expected, got, FLOAT32).reason == (
        "2 values are NaN or infinite on one side only"
    )
    found = checked(layer(), lambda y: np.where(y == y.max(), np.nan, y))
    assert not found.passed
    assert all("on one side only" in c.reason for c in found.cases)


def test_rounding_of_the_original_widens_the_limit_only_where_it_is_larger() -> None:
    expected = np.array([1.0, -2.0])
    limit = FLOAT32.limit(2.0)
    assert FLOAT32.limit(2.0, limit / ROUNDING / 2) == limit
    assert FLOAT32.limit(2.0, limit) == ROUNDING * limit
    off = expected + 2 * limit
    assert not compare_arrays(expected, off, FLOAT32).passed
    assert compare_arrays(expected, off, FLOAT32, rounding=limit).passed
    assert not compare_arrays(expected, expected + 5 * limit, FLOAT32, rounding=limit).passed


def test_an_original_that_is_mostly_rounding_proves_nothing() -> None:
    expected = np.array([1.0, -2.0])
    assert FLOAT32.limit(2.0, 1.0) == MAX_EXCUSED_SHARE * 2.0
    assert compare_arrays(
        expected, expected + 0.9 * MAX_EXCUSED_SHARE * 2, FLOAT32, rounding=1.0
    ).passed
    found = compare_arrays(expected, expected + 1.1 * MAX_EXCUSED_SHARE * 2, FLOAT32, rounding=1.0)
    assert not found.passed
    assert "the original itself loses 5e-01 of its largest value" in str(found.reason)


class Cancels(torch.nn.Module):
    """Loses its digits in float32."""

    def example_inputs(self, batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(batch, length, 2, generator=generator) for _ in "qkv")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + 1e5) - 1e5 + 0 * k + 0 * v


def test_what_the_original_loses_is_said() -> None:
    found = checked(Cancels())
    assert found.passed
    notes = [n for n in found.notes if "rounding of float32" in n]
    assert notes and "off by 4 times that" in notes[0]
    worst = max(c.rounding for c in found.cases)
    assert 1e-3 < worst < 1e-2
    assert not checked(Cancels(), lambda y: y + 10 * worst).passed
    assert not [n for n in checked(layer()).notes if "rounding of float32" in n]


def test_not_a_number_wins() -> None:
    """min over calls does not step over a NaN."""
    q = torch.ones(1, 1, 1)
    settings = {"q_num_heads": 1, "kv_num_heads": 1, "normalize": True}
    with watch_denominators() as seen:
        linear_attention(q, q, q, **settings)
        linear_attention(q * math.nan, q, q, **settings)
    assert math.isnan(torch.stack(seen).min())
