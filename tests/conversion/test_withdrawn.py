"""A match that parity refutes is withdrawn, and the rest of the model is converted all the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.conversion.bisect_matches import TRIALS, blamed
from linexport.manifest import Manifest
from linexport.match.forms import functions
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import Node
from linexport.targets.lowering import kernels

pytestmark = pytest.mark.usefixtures("one_thread")


class Attempts:
    """A conversion that passes once all of some sets of matches have lost a member."""

    def __init__(self, *wrong: set[str]) -> None:
        self.wrong, self.asked = wrong, 0

    def __call__(self, left_out: frozenset[str]) -> bool:
        self.asked += 1
        return all(group & left_out for group in self.wrong)


NAMES = [f"attention_{i}" for i in range(12)]


@pytest.mark.parametrize("culprits", [[0], [11], [5], [2, 9], [3, 4], [0, 6, 11]])
def test_those_to_blame_are_found_and_no_others(culprits: Sequence[int]) -> None:
    wrong = {NAMES[i] for i in culprits}
    attempts = Attempts(*({name} for name in wrong))
    assert blamed(NAMES, attempts) == wrong
    assert attempts.asked <= TRIALS + 2


def test_nobody_is_blamed_for_what_fails_without_matches() -> None:
    assert blamed(NAMES, lambda _: False) == frozenset()
    assert blamed([], lambda _: pytest.fail("nothing to leave out")) == frozenset()


def test_of_two_that_are_wrong_together_one_is_left_out() -> None:
    assert len(blamed(NAMES, Attempts({NAMES[1], NAMES[8]}))) == 1


def test_where_everything_is_wrong_the_number_of_trials_is_limited() -> None:
    many = [str(i) for i in range(200)]
    attempts = Attempts(*({name} for name in many))
    assert blamed(many, attempts) == set(many)
    assert attempts.asked <= TRIALS + 20


class Two(nn.Module):
    """Two causal attentions, the second with a map that is bounded."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        y = self.attend(torch.nn.functional.elu(x) + 1, x)
        return self.attend(torch.relu(x).clamp(max=100), y)

    @staticmethod
    def attend(x: Tensor, value: Tensor) -> Tensor:
        return (x @ x.mT).tril() @ value / ((x @ x.mT).tril().sum(-1, keepdim=True) + 1e-6)


def two() -> tuple[nn.Module, tuple[Tensor]]:
    return Two(), (torch.randn(2, 16, 8),)


def convert(place: Path) -> Manifest:
    """For short sequences: parity at thousands of tokens takes longest."""
    options = {"dims": ("seq=1:16:200",), "bench": False, "threads": 1}
    return linexport.convert(f"{__name__}:two", place / "out", **options)


def test_a_bounded_map_is_converted(tmp_path: Path) -> None:
    manifest = convert(tmp_path)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 2
    assert not manifest.rejected


def test_what_parity_refutes_is_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map's bound is overlooked, as by a mistake of recognition that the proof cannot see."""
    right = functions.kind_of

    def mistaken(function: functions.Function) -> str | None:
        bounded = any(op in str(function) for op in ("Clip", "Min"))
        return "relu" if bounded else right(function)

    monkeypatch.setattr(functions, "kind_of", mistaken)
    manifest = convert(tmp_path)
    assert manifest.status == "ok" and manifest.parity is not None and manifest.parity.passed
    assert manifest.fused["LinearAttention"] == 1
    (withdrawn,) = manifest.rejected
    assert withdrawn.reason.startswith("withdrawn: with it the artifact differs from the original")
    assert any(withdrawn.where in warning for warning in manifest.warnings)
    assert "withdrawn" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


class RunningSum(nn.Module):
    """A signed sum as a denominator, which is an attention of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        scores = (x @ x.flip(-1).mT).tril()
        return scores @ x / scores.sum(-1, keepdim=True).abs().clamp(min=1)


def running_sum() -> tuple[nn.Module, tuple[Tensor]]:
    return RunningSum(), (torch.randn(2, 16, 8),)


def test_what_only_a_kernel_spoils_is_computed_by_standard_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernels.running_sum

    def spoiled(node: Node) -> tuple[Body, list[str]]:
        return right(replace(node, attributes={**node.attributes, "scale": 1.01}))

    monkeypatch.setattr(kernels, "running_sum", spoiled)
    options = {"dims": ("seq=1:16:200",), "bench": False, "threads": 1}
    manifest = linexport.convert(f"{__name__}:running_sum", tmp_path / "out", **options)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 2
    assert manifest.streaming is not None and manifest.streaming.passed
    assert not manifest.rejected
    lowered = {record.lowering: record for record in manifest.lowerings}
    assert set(lowered) == {"native_padded", "portable"}
    said = r"lowered as running_sum the artifact differs .* by standard operators the two are equal"
    assert re.search(said, lowered["portable"].reason)
    assert any(re.search(said, warning) for warning in manifest.warnings)


class Falling(nn.Module):
    """A delta rule in a loop whose rates are stored, of both signs: they have no logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([0.5, -0.5] * 4))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        key, read = (nn.functional.normalize(z, dim=-1) for z in (x, x.flip(-1)))
        rate, state, out = self.rate + 0 * x, x.new_zeros(x.shape[0], 8, 8), []
        for t in range(x.shape[1]):
            found = (state * read[:, t, :, None]).sum(1)
            state = rate[:, t, :, None] * state + key[:, t, :, None] * (x[:, t] - found)[:, None]
            out.append((x[:, t, None] @ state)[:, 0])
        return torch.stack(out, 1)


def falling() -> tuple[nn.Module, tuple[Tensor], object]:
    return Falling(), (torch.randn(2, 16, 8),), ({0: Dim.DYNAMIC, 1: Dim("seq")},)


def test_a_loop_that_parity_refutes_stays_a_loop(tmp_path: Path) -> None:
    options = {"dims": ("seq=1:16:200",), "bench": False, "threads": 1}
    manifest = linexport.convert(f"{__name__}:falling", tmp_path / "out", **options)
    assert manifest.status == "ok" and not manifest.fused and manifest.streaming.passed
    assert ["withdrawn" in r.reason for r in manifest.rejected] == [True]
