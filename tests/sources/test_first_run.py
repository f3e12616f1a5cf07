"""A model is run once as its user gave it; where that fails, the error is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.errors import UnsupportedModelError
from linexport.sources.factory import load_module
from linexport.sources.first_run import buffers_kept

MODULE = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 8)

    def forward(self, ids):
        return self.looked_up(ids).cumsum(1)

    def looked_up(self, ids):
        return self.table(ids)


def outside():
    return Words(), (torch.randint(100, 200, (2, 16)),)


def misshapen():
    return nn.Linear(4, 3), (torch.ones(2, 5),)
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"first_{abs(hash(request.node.name))}"
    Path(f"{name}.py").write_text(MODULE)
    return name


def test_ids_outside_the_table_are_an_error_of_the_model_with_its_line(
    source: str, cli: Callable[..., Any]
) -> None:
    done = cli("convert", f"{source}:outside", "--output", "out", "--no-bench", "--json")
    message = done.json()["message"]
    assert done.code == 4 and not Path("out").exists()
    assert "IndexError: index out of range" in message
    assert f"{source}.py:15 (return self.table(ids))" in message
    assert "ids (2, 16) int64 from 1" in message and "0 of 0" not in message


def test_an_example_of_the_wrong_shape_is_the_same(source: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"itself fails: .*\(2, 5\) float32"):
        linexport.convert(f"{source}:misshapen", "out", bench=False)


def test_an_exported_program_that_fails_is_the_same(source: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids)

    program = torch.export.export(Words().eval(), (torch.randint(100, 200, (2, 16)),))
    torch.export.save(program, "words.pt2")
    with pytest.raises(UnsupportedModelError, match=r"words.pt2: the model itself fails"):
        linexport.convert("words.pt2", "out", bench=False)


class Counter(nn.Module):
    """Writes its buffers in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("last", torch.ones(4))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.last = self.last * 2
        return x + self.count + self.last


def test_running_a_model_leaves_its_buffers_as_they_were() -> None:
    module, x = Counter(), torch.zeros(2, 4)
    last, count = module.last, module.count
    with buffers_kept(module):
        module(x)
        assert float(module.count[0]) == 1 and float(module.last[0]) == 2
    assert module.last is last and module.count is count and module.none is None
    assert not count.any() and bool((last == 1).all())


def test_loading_a_model_leaves_its_buffers_as_they_were() -> None:
    module = Counter()
    load_module((module, (torch.zeros(2, 4),)), "counter:make")
    assert not module.count.any() and bool((module.last == 1).all())


def test_code_that_is_not_written_is_named() -> None:
    class Unwritten(nn.Module):
        def step(self, x: Tensor) -> Tensor:
            raise NotImplementedError

        def forward(self, x: Tensor) -> Tensor:
            return self.step(x)

    said = r"step in test_first_run\.py:\d+ raises NotImplementedError.*such as another mode"
    with pytest.raises(UnsupportedModelError, match=said):
        load_module((Unwritten(), (torch.ones(1, 2),)), "unwritten")
