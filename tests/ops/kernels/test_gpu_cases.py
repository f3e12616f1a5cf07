"""The cases of the checks on a GPU: plans, inputs and NumPy oracles, by the kernels themselves."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from linexport.models.feature_maps import find_map
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.run import run
from tests.support import ROOT

LARGEST = 1e-5


def tool(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module(f"gpu.{name}")


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    return tool("cases")


@pytest.fixture(scope="module")
def described() -> ModuleType:
    return tool("described")


def shrunk(case: Any) -> Any:
    """A case the interpreter takes, with its heads shared as they were."""
    heads = {"heads": 4}
    if getattr(case, "shared", None):
        heads["shared"] = 2 if case.shared > 1 else 1
    if getattr(case, "queries", None):
        heads = {"heads": 2, "queries": 4}
    if getattr(case, "value_width", None):
        heads["value_width"] = 4
    length = min(case.length, 40)
    return replace(case, batch=2, length=length, width=8, dtype="float32", **heads)


def test_every_case_has_a_plan_everywhere(cases: ModuleType, described: ModuleType) -> None:
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names) and not any("/" in name for name in names)
    for case in cases.CASES:
        for sm in ARCHITECTURES:
            assert described.plan(case, sm).kernels()


@pytest.mark.services
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_the_kernels_give_what_every_case_wants(
    cases: ModuleType, described: ModuleType, part: int
) -> None:
    """In Triton's interpreter, in float32; cases that are the same when small are run once."""
    seen = []
    for case in map(shrunk, cases.CASES[part::3]):
        if (same := replace(case, name="", target=None, peer="")) in seen:
            continue
        seen.append(same)
        given = case.inputs()
        wanted = case.wanted(given)
        tensors = {name: torch.from_numpy(x) for name, x in given.items()}
        found = {n: torch.full(x.shape, float("nan")) for n, x in wanted.items()}
        chosen = described.plan(case, 90, "ieee")
        run(chosen, {**tensors, **found}, case.batch, case.length, 132)
        for name, want in wanted.items():
            error = np.linalg.norm(found[name].numpy() - want) / (np.linalg.norm(want) or 1.0)
            assert error <= LARGEST, (case.name, name, error)
    assert len(seen) > 8


@pytest.mark.parametrize("kind", ["relu", "elu1", "exp", "taylor2", "quadratic", "favor+"])
def test_the_maps_are_those_of_the_models(kind: str) -> None:
    maps = tool("maps")
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(3, 5, 8)), rng.normal(size=(8, 8))
    frozen = [torch.from_numpy(w)] if kind == "favor+" else []
    wanted = find_map(kind).phi(torch.from_numpy(x), *frozen).numpy()
    found = maps.phi(kind, x, w)
    assert found.shape[-1] == maps.features(kind, 8)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_floors_are_bytes_over_bandwidth(cases: ModuleType) -> None:
    """B = 8, H = 16, T = 8192, d = 128 in bfloat16: four sequences, and a state in and out."""
    case = cases.CASES[0]
    assert case.bytes() == 4 * 8 * 8192 * 16 * 128 * 2 + 2 * 8 * 16 * 128 * 128 * 4
    assert {c.target for c in cases.CASES if c.target} == {1.6, 2.0, 1.3}


def test_a_large_tensor_is_drawn_in_part(cases: ModuleType) -> None:
    case = cases.CASES[0]
    found = case.inputs(most=2**16)
    assert found["query"].shape == (1, 32, 2048) and found["query"].dtype.itemsize == 2
    assert np.isfinite(np.float32(found["key"])).all()
