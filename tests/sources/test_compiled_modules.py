"""What ``torch.compile`` made is taken off before a module is run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linexport.sources.factory import load_factory
from linexport.sources.objects import load_object
from linexport.system.torch_internals.compiled import (
    functions_uncompiled,
    original_of,
    uncompiled,
)

compiled = list[str]()
"""Names of what was compiled."""


def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
    """Note that something is compiled, and run it as it is."""
    compiled.append("graph")
    return graph.forward


@torch.compile(backend=backend)
def features(x: Tensor) -> Tensor:
    return F.elu(x) + 1


class Parts(nn.Module):
    """A part that was compiled, under two names, one in place, and a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.compile(nn.Linear(4, 4), backend=backend)
        self.again = self.first
        self.parts = nn.ModuleList([torch.compile(nn.Linear(4, 4), backend=backend)])
        self.second = nn.Linear(4, 4)
        self.second.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 4)."""
        return self.second(self.parts[0](self.again(features(x))))


def expected(module: Parts, x: Tensor) -> Tensor:
    x = F.elu(x) + 1
    for part in (original_of(module.first), original_of(module.parts[0]), module.second):
        x = F.linear(x, part.weight, part.bias)
    return x


def whole() -> nn.Module:
    return torch.compile(Parts(), backend=backend)


def build() -> tuple[nn.Module, tuple[Tensor]]:
    return whole(), (torch.ones(2, 4),)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    compiled.clear()


class Doubled(nn.Linear):
    """A layer whose forward may be exchanged."""

    def twice(self, x: Tensor) -> Tensor:
        """(B, 4)."""
        return 2 * super().forward(x)


@pytest.mark.parametrize("method", ["forward", "twice"])
def test_a_forward_that_was_compiled_by_itself_runs_the_weights_of_its_module(method: str) -> None:
    module = nn.Sequential(Doubled(4, 4))
    module[0].forward = torch.compile(getattr(module[0], method), backend=backend)
    loaded = load_object((module, (torch.ones(2, 4),))).module.double()
    x = torch.randn(3, 4, dtype=torch.float64)
    exact = F.linear(x, loaded[0].weight, loaded[0].bias) * (2 if method == "twice" else 1)
    torch.testing.assert_close(loaded(x), exact)
    assert not compiled
    module(torch.ones(2, 4))
    assert compiled


def test_nothing_is_compiled_while_a_model_is_loaded() -> None:
    x = torch.randn(3, 4)
    for loaded in (load_factory(f"{__name__}:build", seed=0), load_object(build())):
        assert not compiled and type(loaded.module).__name__ == "Parts"
        assert loaded.module.first is loaded.module.again
        assert type(loaded.module.parts[0]) is nn.Linear
        with functions_uncompiled():
            torch.testing.assert_close(loaded.module(x), expected(loaded.module, x))
        assert not compiled


def test_the_object_that_was_given_is_compiled_as_before() -> None:
    module = Parts()
    load_object((module, (torch.ones(2, 4),)))
    assert not compiled and type(module.first) is not nn.Linear
    torch.testing.assert_close(module(torch.ones(2, 4)), expected(module, torch.ones(2, 4)))
    assert compiled


def test_modules_without_compiled_parts_are_left_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert uncompiled(module) is original_of(module) is module
    assert uncompiled(torch.compile(module, backend=backend)) is module


@pytest.mark.parametrize("wrapped", [True, False])
def test_weights_of_compiled_modules_are_read_by_the_names_of_their_originals(
    wrapped: bool, tmp_path: Path
) -> None:
    given = whole() if wrapped else Parts()
    with torch.no_grad():
        for weight in given.parameters():
            weight.fill_(0.5)
    assert any("_orig_mod" in name for name in given.state_dict())
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    loaded = load_factory(
        f"{__name__}:whole",
        seed=0,
        state_dict=tmp_path / "weights.pt",
        inputs=["x=float32[2,4]"],
    )
    assert all(bool((w == 0.5).all()) for w in loaded.module.parameters())
