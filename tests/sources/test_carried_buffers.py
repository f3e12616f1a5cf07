"""Buffers that forward writes become states: each call equals a call of the module itself.

The oracle is the user's module in float64, called on the same pieces one after another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.conversion.context import Checks
from linexport.conversion.pipeline import convert_checked
from linexport.debugging import debug
from linexport.errors import NonFiniteError, UnsupportedModelError, UsageError
from linexport.manifest import ConvertOptions, Manifest
from linexport.parity.cases import ChosenSizes
from linexport.sources.factory import load_module
from linexport.targets.base import OrtSession
from linexport.trace import trace
from tests.support.independent import Independent

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = ChosenSizes((1, 12, 37), (1, 3))

ROWS_AND_TOKENS = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


class Memory(nn.Module):
    """One memory for all rows, written in place, before attention of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(8, 24)
        self.register_buffer("memory", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        q, k, v = self.p(x + self.memory).chunk(3, -1)
        y = (q.exp() @ k.exp().mT).tril() @ v
        self.memory.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return y


class Convolved(nn.Module):
    """A delay line by assignment, a counter of rank 0 in place, and a first value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv1d(8, 8, 4)
        self.register_buffer("line", torch.zeros(1, 8, 3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("h", torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        line = self.line if self.line.shape[0] == x.shape[0] else self.line.expand(len(x), -1, -1)
        joined = torch.cat([line, x.mT], -1)
        self.line = joined[..., -3:]
        y = self.c(joined)
        self.h = torch.tanh(self.h + y.mean(-1))
        self.count += x.shape[1]
        return (y + self.h[..., None] + 0.01 * self.count).mT


class Cell(nn.Module):
    """A loop over tokens with its state in a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.register_buffer("state", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        h = self.state if self.state.shape[0] == x.shape[0] else self.state.expand(len(x), -1)
        found = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            found.append(h)
        self.state = h
        return torch.stack(found, 1)


class Nested(nn.Module):
    """The same buffer in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Cell(), Cell()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        return self.last(self.first(x))


class Ring(nn.Module):
    """Rows of keys and values of a fixed capacity, written where a counter says."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(8, 24)
        self.register_buffer("keys", torch.zeros(1, 256, 8))
        self.register_buffer("values", torch.zeros(1, 256, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def _rows(self, rows: Tensor, x: Tensor) -> Tensor:
        return rows if rows.shape[0] == x.shape[0] else rows.expand(x.shape[0], -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        q, k, v = self.p(x).chunk(3, -1)
        place = self.at + torch.arange(x.shape[1])
        keys, values = self._rows(self.keys, x), self._rows(self.values, x)
        self.keys = keys.index_copy(1, place, k)
        self.values = values.index_copy(1, place, v)
        seen = torch.arange(256) <= place[:, None]
        scores = (q @ self.keys.mT).masked_fill(~seen, -1e4)
        self.at = self.at + x.shape[1]
        return scores.softmax(-1) @ self.values


class Maximum(nn.Module):
    """A running maximum, which begins with minus infinity, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.full((1, 8), -torch.inf))
        self.register_buffer("begun", torch.zeros(1, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        running = torch.maximum(x.cummax(1).values, self.most[:, None])
        self.most = running[:, -1]
        y = torch.where(self.begun, running, running - 1)
        self.begun = torch.ones_like(self.begun)
        return y


class Counted(nn.Module):
    """Attention with a state of its own, and a counter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(8, 24)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 8)."""
        self.seen += x.shape[1]
        q, k, v = self.p(x).chunk(3, -1)
        return (q.exp() @ k.exp().mT).tril() @ v


def convert(module: nn.Module, place: Path, *rest: Any, rows: int = 2) -> Manifest:
    torch.manual_seed(1)
    result = (module, (torch.randn(rows, 12, 8),), *rest)
    options = ConvertOptions(bench=False, threads=1)
    return convert_checked(load_module(result, "own:make"), place, options, Checks(SIZES))


def called(module: nn.Module, pieces: list[np.ndarray]) -> np.ndarray:
    """What the module gives for pieces, one call after another, in float64."""
    module = module.double().eval()
    with torch.no_grad():
        return np.concatenate([module(torch.from_numpy(x).double()).numpy() for x in pieces], 1)


def pieces_of(rows: int, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((rows, n, 8)).astype(np.float32) for n in lengths]


def check(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


CASES: dict[str, tuple[type[nn.Module], set[str], int]] = {
    "in place, of all rows": (Memory, set(), 2),
    "by assignment, and of rank 0": (Convolved, {"line", "h", "h_begun"}, 2),
    "in a loop, of one row": (Cell, {"state"}, 1),
    "of parts": (Nested, {"first_state", "last_state"}, 2),
    "written at a place": (Ring, {"keys", "values"}, 2),
    "from minus infinity": (Maximum, {"most", "most_begun"}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_equal_those_of_the_module(name: str, tmp_path: Path) -> None:
    kind, batched, rows = CASES[name]
    torch.manual_seed(0)
    manifest = convert(kind(), tmp_path / "out", rows=rows)
    assert manifest.status == "ok" and manifest.streaming and manifest.streaming.passed
    with_rows = {s.past for s in manifest.states if s.shape[0] == "batch"}
    assert with_rows == {f"past_buffer_{n}" for n in batched}
    for count in (1, 3):
        choose = random.Random(count)
        lengths = [1, 1, *(choose.randint(1, 20) for _ in range(6))]
        pieces = pieces_of(count, lengths)
        torch.manual_seed(0)
        expected = called(kind(), pieces)
        found = Independent(tmp_path / "out").pieces(np.concatenate(pieces, 1), lengths)
        check(found, expected)
        artifact = linexport.load(tmp_path / "out", threads=1)
        stream, parts = artifact.stream(), []
        for place, piece in enumerate(pieces):
            if place == 3:  # as a value, and back
                held = stream.state()
                stream = artifact.stream()
                stream.restore(held)
            parts.append(next(iter(stream.step(piece).values())))
        check(np.concatenate(parts, 1), expected)
        check(next(iter(artifact.run(pieces[0]).values())), expected[:, :1])


def test_a_model_is_traced_with_its_weights_where_the_loader_left_them() -> None:
    """As ``inspect`` and ``debug`` do; a conversion moves them to a file first."""
    for kind in (Convolved, Memory):
        traced = trace(load_module((kind(), (torch.randn(2, 12, 8),)), "own:make"))
        assert [s.op for s in traced.states] == ["Buffer"] * len(traced.states)


def test_what_is_shared_is_said(tmp_path: Path, cli: Callable[..., Any]) -> None:
    manifest = convert(Convolved(), tmp_path / "out")
    said = next(w for w in manifest.warnings if w.startswith("States are the buffers"))
    assert "line, count, h" in said and said.endswith("All rows of a batch share count.")
    shown = " ".join(cli("inspect", tmp_path / "out").out.split())
    assert "past_buffer_count (1): one for all rows of a batch" in shown
    assert "past_buffer_line (batch, 8, 3): one for each row of a batch" in shown
    artifact = linexport.load(tmp_path / "out", threads=1)
    stream = artifact.stream()
    stream.step(np.ones((2, 3, 8), np.float32))
    with pytest.raises(UsageError, match=r"past_buffer_count is one of all rows together"):
        stream.reset(rows=[0])
    with pytest.raises(UsageError, match=r"buffers, which each call writes as a whole"):
        artifact.stream(history=4)
    with pytest.raises(UsageError, match=r"a pool cuts what it is given into calls of its own"):
        artifact.pool()


def test_one_row_begins_anew_where_every_row_has_its_own(tmp_path: Path) -> None:
    convert(Cell(), tmp_path / "out")
    stream = linexport.load(tmp_path / "out", threads=1).stream()
    x = pieces_of(2, [5])[0]
    (first,) = stream.step(x).values()
    stream.reset(rows=[1])
    (again,) = stream.step(x).values()
    np.testing.assert_allclose(again[1], first[1], atol=1e-6)
    assert np.abs(again[0] - first[0]).max() > 1e-3


def test_a_shared_state_that_is_lost_is_lost_in_all_rows(tmp_path: Path) -> None:
    convert(Memory(), tmp_path / "out")
    stream = linexport.load(tmp_path / "out", threads=1).stream()
    x = pieces_of(3, [5])[0]
    x[1, 2, 4] = 3e38
    x[2, 2, 4] = 3e38
    with pytest.raises(NonFiniteError, match="past_buffer_memory") as lost:
        for _ in range(3):
            stream.step(x)
    assert lost.value.rows == (0, 1, 2) and stream.stopped == {0, 1, 2}
    stream.reset()
    assert np.isfinite(next(iter(stream.step(pieces_of(3, [5])[0]).values()))).all()


def test_a_counter_that_nothing_reads_costs_no_stream(tmp_path: Path) -> None:
    manifest = convert(Counted(), tmp_path / "out")
    assert manifest.status == "ok" and manifest.streaming and manifest.streaming.passed
    assert [s.op for s in manifest.states] == ["LinearAttention"]
    assert any("Forward writes seen, which no output depends on" in w for w in manifest.warnings)


def test_calls_of_one_length_alone(tmp_path: Path) -> None:
    manifest = convert(Convolved(), tmp_path / "out", None)
    assert manifest.status == "ok" and manifest.streaming and manifest.streaming.passed
    assert not manifest.dims
    torch.manual_seed(0)
    stream = linexport.load(tmp_path / "out", threads=1).stream()
    for piece in pieces_of(2, [12, 12]):
        stream.step(piece)


def test_packed_batches_are_refused(tmp_path: Path) -> None:
    loaded = load_module((Memory(), (torch.randn(2, 12, 8),)), "own:make")
    options = ConvertOptions(target="ort-cuda", packed_batches=True, bench=False)
    with pytest.raises(UnsupportedModelError, match="its states are buffers, which are of a call"):
        convert_checked(loaded, tmp_path / "out", options, Checks())


@pytest.mark.parametrize("rows", [1, 3])
def test_the_batch_is_found_whatever_that_of_the_example_is(rows: int) -> None:
    loaded = load_module((Cell(), (torch.randn(rows, 12, 8),)), "own:make")
    assert loaded.carried is not None and [b.batched for b in loaded.carried.buffers] == [True]
    loaded = load_module((Memory(), (torch.randn(rows, 12, 8),)), "own:make")
    assert loaded.carried is not None and [b.batched for b in loaded.carried.buffers] == [False]


def test_an_exported_program_that_writes_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = torch.export.export(
        Memory().eval(), (torch.randn(2, 12, 8),), dynamic_shapes=(ROWS_AND_TOKENS,)
    )
    torch.export.save(program, tmp_path / "memory.pt2")
    manifest = linexport.convert(tmp_path / "memory.pt2", tmp_path / "out", bench=False, threads=1)
    assert manifest.status == "ok" and [s.past for s in manifest.states] == ["past_buffer_memory"]
    lengths = [1, 5, 17, 1, 1]
    pieces = pieces_of(3, lengths)
    torch.manual_seed(0)
    found = Independent(tmp_path / "out").pieces(np.concatenate(pieces, 1), lengths)
    check(found, called(Memory(), pieces))
    assert linexport.validate(tmp_path / "out", threads=1).status == "ok"


def test_an_artifact_that_carries_a_wrong_value_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the state began with another number."""
    from linexport.graph.states import State

    begin = State.start
    monkeypatch.setattr(State, "start", lambda self, batch: begin(self, batch) + 1)
    manifest = convert(Memory(), tmp_path / "out")
    assert manifest.status == "parity_failed"


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_state_that_is_not_what_the_module_wrote_is_found(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OrtSession.run

    def changed(self: OrtSession, inputs: Any) -> dict[str, np.ndarray]:
        found = run(self, inputs)
        return {n: x * factor if n == "present_buffer_memory" else x for n, x in found.items()}

    monkeypatch.setattr(OrtSession, "run", changed)
    manifest = convert(Memory(), tmp_path / "out")
    assert manifest.streaming and manifest.streaming.passed is (factor == 1.0)
    if factor != 1.0:
        assert manifest.status == "parity_failed"
        assert "present_buffer_memory differs by 1.0e-03" in str(manifest.streaming.reason)


def test_debugging_a_right_artifact_finds_nothing(tmp_path: Path) -> None:
    """Its buffers after single tokens are others than after one call, as in the original."""
    torch.manual_seed(1)
    module = Memory()
    assert convert(module, tmp_path / "out").status == "ok"
    loaded = load_module((module, (torch.randn(2, 12, 8),)), "own:make")
    found = debug(tmp_path / "out", source=loaded, threads=1)
    assert found.value is None and found.state is None


class Allocated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("line", None)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x[:, :1]) if self.line is None else self.line
        self.line = x[:, -1:]
        return x + before


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows.expand(len(x), -1, -1), x], 1)
        return x + self.rows.mean(1, keepdim=True)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.w.data.copy_(self.w)
        self.w.mul_(0.9)
        return x * self.w


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.steps = torch.zeros(8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.memory = self.memory * 0.9 + x.mean((0, 1))
        return x + self.memory


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x * 2 if int(self.steps) > 1 else x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.zeros(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.turned.mul_(1j).add_(x.mean((0, 1)))
        return x + self.turned.real


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Allocated, r"the buffer line is None until forward gives it values"),
        (
            Growing,
            r"the buffer rows, which has the shape \(1, 1, 8\) before a call and \(2, 13, 8\)",
        ),
        (Weighted, r"forward writes the parameter w\. .*register_buffer"),
        (Plain, r"other outputs, and forward writes self\.memory, self\.steps.*register_buffer"),
        (Asked, r"(?s)States of the artifact are the buffers that forward writes: steps"),
        (Complex, r"the buffer turned, which has complex numbers"),
    ],
)
def test_what_cannot_be_a_state_is_refused_by_the_buffers_name(
    kind: type[nn.Module], said: str, tmp_path: Path
) -> None:
    with pytest.raises(linexport.errors.LinexportError, match=said):
        convert(kind(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_attributes_that_change_nothing_are_left_alone(tmp_path: Path) -> None:
    class Cached(nn.Module):
        """A table that is made in the first call."""

        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(8) / 8.0
            return x * self.table

    assert convert(Cached(), tmp_path / "out").status == "ok"


def test_an_exported_program_with_values_of_its_own_is_refused(tmp_path: Path) -> None:
    module = Memory()
    module.memory.copy_(torch.arange(8))
    program = torch.export.export(module.eval(), (torch.randn(2, 12, 8),))
    torch.export.save(program, tmp_path / "memory.pt2")
    with pytest.raises(UnsupportedModelError, match="the buffer memory, whose values differ"):
        linexport.convert(tmp_path / "memory.pt2", tmp_path / "out", bench=False)
