"""Loops that take tokens by a number they count, as torch's while_loop does, become Scans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import linexport
from linexport import passes
from linexport.sources.factory import load_module
from linexport.sources.loaded_model import LoadedModel
from linexport.trace import trace
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

DYNAMIC = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
WIDTH = 6
Row = Callable[[Tensor, Tensor], Tensor]
Write = Callable[[Tensor, Tensor, Tensor], Tensor]


def number(i: Tensor, size: int) -> int:
    at = int(i.item())
    torch._check(at >= 0)
    torch._check(at < size)
    return at


READS: dict[str, Row] = {
    "index_select": lambda x, i: x.index_select(1, i.reshape(1))[:, 0],
    "gather": lambda x, i: x.gather(1, i.reshape(1, 1, 1).expand(x.shape[0], 1, x.shape[2]))[:, 0],
    "select": lambda x, i: x.select(1, number(i, x.shape[1])),
    "narrow": lambda x, i: x.narrow(1, number(i, x.shape[1]), 1).squeeze(1),
}

WRITES: dict[str, Write] = {
    "index_copy": lambda y, i, row: y.index_copy(1, i.reshape(1), row[:, None]),
    "where": lambda y, i, row: torch.where(
        (torch.arange(y.shape[1]) == i)[:, None], row[:, None], y
    ),
    "index_put": lambda y, i, row: y.index_put(
        (torch.arange(y.shape[0]), i.expand(y.shape[0])), row
    ),
    "scatter": lambda y, i, row: y.scatter(
        1, i.reshape(1, 1, 1).expand(y.shape[0], 1, y.shape[2]), row[:, None]
    ),
    "select_scatter": lambda y, i, row: y.select_scatter(row, 1, number(i, y.shape[1])),
}


class Recurrence(nn.Module):
    """h_t = a_t h_{t-1} + b_t and y_t = c_t h_t, by ``while_loop``."""

    begin = 0

    def __init__(self, read: str = "index_select", write: str = "index_copy") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.write = READS[read], WRITES[write]
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def step(self, i: Tensor, h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = row.chunk(3, -1)
        h = h * a.sigmoid() + b
        return h, h * c

    def goes_on(self, i: Tensor, h: Tensor, length: int) -> Tensor:
        return i < length

    def taken(self, tokens: Tensor, i: Tensor, h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h, row = self.step(i, h, self.read(tokens, i))
        return i + 1, h, self.write(y, i, row)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        tokens, length = self.project(x), x.shape[1]
        begun = torch.tensor(self.begin), torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        found = while_loop(
            lambda i, h, y: self.goes_on(i, h, length),
            lambda i, h, y: self.taken(tokens, i, h, y),
            begun,
        )
        return self.out(found[2])


class UpToTheLast(Recurrence):
    def goes_on(self, i: Tensor, h: Tensor, length: int) -> Tensor:
        return i <= length - 1


class FromTheSecond(Recurrence):
    """The first row stays as it was: there may be no step."""

    begin = 1


class Numbered(Recurrence):
    """A step reads the number of its token."""

    def step(self, i: Tensor, h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = row.chunk(3, -1)
        h = torch.where(i == 3, b, h * a.sigmoid() + b / (i + 1))
        return h, h * c


class Elman(Recurrence):
    """Not linear in its state."""

    def step(self, i: Tensor, h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = row.chunk(3, -1)
        h = (h @ self.out.weight + a).tanh() + b
        return h, h * c


class TokensFirst(Recurrence):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.project(x).transpose(0, 1)

        def body(i: Tensor, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h, row = self.step(i, h, tokens.index_select(0, i.reshape(1))[0])
            return i + 1, h, y.index_copy(0, i.reshape(1), row[None])

        begun = (
            torch.tensor(0),
            torch.zeros_like(x[:, 0]),
            x.new_zeros(x.shape[1], x.shape[0], WIDTH),
        )
        y = while_loop(lambda i, h, y: i < x.shape[1], body, begun)[2]
        return self.out(y.transpose(0, 1))


class Reread(Recurrence):
    """A step reads a row that an earlier one wrote."""

    def taken(self, tokens: Tensor, i: Tensor, h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h, row = self.step(i, h, self.read(tokens, i))
        return i + 1, h, self.write(y, i, row + self.read(y, i // 2))


class SumsRows(Recurrence):
    """A step reads what it has written."""

    def taken(self, tokens: Tensor, i: Tensor, h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        i, h, y = super().taken(tokens, i, h, y)
        return i, h + y.sum(1), y


class UntilLarge(Recurrence):
    """Data decides how many tokens are taken."""

    def goes_on(self, i: Tensor, h: Tensor, length: int) -> Tensor:
        return (i < length) & (h.sum() < 2)


def loaded(module: nn.Module) -> LoadedModel:
    return load_module((module.eval(), (torch.randn(2, 12, WIDTH),), DYNAMIC), "tests:loop")


def loops(graph: onnx.GraphProto) -> list[str]:
    return [n.op_type for n in graph.node if n.op_type in ("Loop", "Scan")]


def results(model: onnx.ModelProto, *fed: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, dict(zip((i.name for i in session.get_inputs()), fed, strict=True)))


PLAIN = [Recurrence(*pair) for pair in zip((*READS, "index_select"), WRITES, strict=True)]
OTHERS = [kind() for kind in (UpToTheLast, Numbered, Elman, TokensFirst)]


@pytest.mark.parametrize("module", PLAIN + OTHERS, ids=lambda m: type(m).__name__)
def test_a_loop_over_tokens_is_a_scan(module: nn.Module) -> None:
    model = trace(loaded(module)).graph
    assert loops(model.graph) == ["Loop"]
    found = passes.run(model, ["canonicalise"])
    assert loops(found.graph) == ["Scan"]
    for batch, length in ((1, 1), (3, 2), (2, 33)):
        x = torch.randn(batch, length, WIDTH)
        with torch.no_grad():
            expected = module.double()(x.double()).numpy()
        np.testing.assert_allclose(results(found, x.numpy())[0], expected, atol=1e-5)
    module.float()


@pytest.mark.parametrize("kind", [Reread, SumsRows, UntilLarge, FromTheSecond])
def test_what_is_no_loop_over_tokens_stays(kind: type[Recurrence]) -> None:
    model = passes.run(trace(loaded(kind())).graph, ["canonicalise"])
    assert loops(model.graph) == ["Loop"]


@pytest.mark.parametrize(("kind", "fused"), [(Recurrence, {"LinearAttention": 1}), (Elman, {})])
def test_it_streams(tmp_path: Path, kind: type[Recurrence], fused: dict[str, int]) -> None:
    manifest = linexport.convert(loaded(kind()), tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    assert manifest.fused == fused
    check_independently(tmp_path / "a", kind().eval(), WIDTH, lengths=(1, 7, 33))


COUNTED = """
<ir_version: 8, opset_import: ["": 18]>
of_another_exporter (float[T, 2] x, float[U, 2] y, float[2] h)
    => (float[2] last, float[U, 2] rows, float[T, 2] sums, int64 end) {{
  begin = Constant <value = int64 {{{begin}}}> ()
  first = Constant <value = int64 {{0}}> ()
  size = Shape (x)
  length = Gather (size, first)
  bound = Add (length, begin)
  goes_on = Less (begin, bound)
  end, last, rows, sums = Loop ({condition}, begin, h, y) <body = step
      (int64 n, bool on, int64 i, float[2] s, float[U, 2] w)
      => (bool next, int64 i_next, float[2] s_next, float[U, 2] w_next, float[2] given) {{
    one = Constant <value = int64 {{1}}> ()
    axis = Constant <value = int64[1] {{0}}> ()
    square = Constant <value = int64[2] {{1, 1}}> ()
    read = Constant <value = int64 {{{read}}}> ()
    write = Constant <value = int64 {{{write}}}> ()
    from = Sub (i, begin)
    token = Gather (x, from)
    beside = Add (i, read)
    other = Gather (y, beside)
    both = Add (token, other)
    s_next = Add (s, both)
    to = Add (write, i)
    place = Reshape (to, square)
    row = Unsqueeze (s_next, axis)
    w_next = ScatterND (w, place, row)
    given = Mul (s_next, token)
    i_next = Add (i, one)
    next = {goes_on}
  }}>
}}
"""
"""Running sums of x[i - begin] + y[i + read], written to the rows i + write of a copy of y.

Places below 0 count from the end.
"""


@given(
    limited=st.booleans(),
    begin=st.integers(0, 3),
    read=st.integers(-1, 2),
    write=st.integers(0, 2),
    length=st.integers(1, 9),
)
@settings(max_examples=25, deadline=None)
def test_loops_of_other_exporters(
    limited: bool, begin: int, read: int, write: int, length: int
) -> None:
    text = COUNTED.format(
        begin=begin,
        read=read,
        write=write,
        condition="length, " if limited else ", goes_on",
        goes_on="Identity (on)" if limited else "Less (i_next, bound)",
    )
    model = onnx.parser.parse_model(text)
    found = passes.run(model, ["canonicalise"])
    assert loops(found.graph) == ["Scan"]
    rng = np.random.default_rng(length)
    fed = [rng.standard_normal((n, 2), np.float32) for n in (length, length + 5)]
    fed.append(rng.standard_normal(2, np.float32))
    for before, after in zip(results(model, *fed), results(found, *fed), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
