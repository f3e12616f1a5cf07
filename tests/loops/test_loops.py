"""Loops over tokens: what is rolled, what is refused, and swaps of packages' scans."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.export import Dim

import linexport
from linexport import passes
from linexport.errors import UnsupportedModelError
from linexport.graph.dims import DimRange
from linexport.patches import scans
from linexport.patches.packages import Function
from linexport.sources.factory import load_module
from linexport.trace import length_warnings, trace
from linexport.trace.loops import capture, reroll
from tests.support.independent import Independent, check_independently
from tests.support.pieces import in_pieces, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

DYNAMIC = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)


class Recurrence(nn.Module):
    """h = sigmoid(a) h + b of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)

    def states(self, x):
        a, b = self.project(x).chunk(2, -1)
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(a[:, t]) * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1), h

    def forward(self, x):
        return self.states(x)[0] + x


class Counted(Recurrence):
    """A mean over the tokens so far, by its number in the loop."""

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = h + (x[:, t] - h) / (t + 1)
            out.append(h)
        return torch.stack(out, 1)


class Gates(Recurrence):
    """A recurrence that is not linear, and its last state."""

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            a, b = self.project(h + x[:, t]).chunk(2, -1)
            h = torch.sigmoid(a) * h + torch.tanh(b)
            out.append(2 * h)
        return torch.stack(out, 1), h


class Normed(Recurrence):
    """The state's RMS norm, of which torch's export writes a Cast to the state's own type."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(x[:, t]) * self.norm(h) + x[:, t]
            out.append(h)
        return torch.stack(out, 1)


class Extremes(nn.Module):
    """Running maxima and minima."""

    def forward(self, x):
        return x.cummax(1).values * torch.cummin(x - 1, -2)[0]


class Uneven(Recurrence):
    """The third step is another one."""

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(h) if t == 3 else 0.5 * h + x[:, t]
            out.append(h)
        return torch.stack(out, 1)


LENGTHS: list[int | torch.SymInt] = []


class Counting(Recurrence):
    """It notes the length in each step; torch restores attributes that a trace changes.

    A loop over pairs of tokens may be behind that over the tokens.
    """

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            LENGTHS.append(x.shape[1])
            h = torch.tanh(h) + x[:, t]
            out.append(h)
        y = torch.stack(out, 1)
        if not self.pairs:
            return y
        state, sums = torch.zeros_like(x[:, 0]), []
        for n in range(x.shape[1] // 2):
            state = torch.tanh(state) + x[:, 2 * n : 2 * n + 2].sum(1)
            sums.append(state)
        return y, torch.stack(sums, 1)


def test_a_long_example_is_not_traced_to_its_end() -> None:
    module = Counting(pairs=False).eval()
    LENGTHS.clear()
    trace(load_module((module, (torch.randn(2, 300, 8),), DYNAMIC), "loop"))
    assert sum(isinstance(length, torch.SymInt) for length in LENGTHS) == capture.STEPS


def test_loops_of_tokens_and_of_pairs_are_counted_together() -> None:
    """The first loop alone does not say how many tokens the second takes."""
    module = Counting(pairs=True).eval()
    found = trace(load_module((module, (torch.randn(2, 32, 8),), DYNAMIC), "loops"))
    session = onnxruntime.InferenceSession(found.model.SerializeToString())
    for length in (16, 40):
        x = torch.randn(2, length, 8)
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            for expected, value in zip(module(x), got, strict=True):
                assert torch.allclose(expected, torch.from_numpy(value), atol=1e-5)


def test_a_loop_converts_at_every_length(tmp_path: Path) -> None:
    module = Recurrence().eval()
    source = load_module((module, (torch.randn(2, 16, 8),), DYNAMIC), "loop")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.fused == {"LinearAttention": 1}
    assert manifest.dims["seq"].min == 1
    check_independently(tmp_path / "artifact", module, 8, lengths=(1, 2, 40))


@pytest.mark.parametrize(
    "dims",
    [
        {"x": {0: Dim("batch"), 1: Dim("seq")}},
        {"x": (Dim.DYNAMIC, Dim.DYNAMIC, None)},
        {"x": {0: Dim.AUTO, 1: Dim.AUTO}},
        [{0: Dim.AUTO, 1: Dim.AUTO}],
    ],
    ids=["named", "tuple", "auto", "list"],
)
def test_dims_of_a_loop_are_in_any_notation(dims: object) -> None:
    """By the names of parameters as well; torch would fix what may be fixed."""
    traced = trace(load_module((Recurrence().eval(), (torch.randn(2, 12, 8),), dims), "test"))
    assert [node.op_type for node in traced.graph.graph.node].count("Scan") == 1
    assert list(traced.dims) == ["batch", "seq"] and traced.dims["seq"].max is None


@pytest.mark.parametrize("size", [(2, 2), (5, 5)])
def test_an_example_of_few_tokens_is_made_longer(size: tuple[int, int]) -> None:
    """Too few steps to see that they repeat; a batch of as many sequences is none of the steps."""
    module = Recurrence().eval()
    traced = trace(load_module((module, (torch.randn(*size, 8),), DYNAMIC), "a:loop"))
    rewritten = passes.run(traced.graph)
    assert [n.op_type for n in rewritten.graph.node if n.domain] == ["LinearAttention"]


@pytest.mark.slow
def test_a_loop_that_is_not_linear_streams(tmp_path: Path) -> None:
    class Outputs(Gates):
        def forward(self, x):
            return super().forward(x)[0]

    module = Outputs().eval()
    source = load_module((module, (torch.randn(2, 16, 8),), DYNAMIC), "loop")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert [state.op for state in manifest.states] == ["Scan"]
    check_independently(tmp_path / "artifact", module, 8, lengths=(1, 2, 40))


@pytest.mark.parametrize(("kind", "states"), [(Normed, 1), (Extremes, 2)])
def test_a_value_that_is_not_linear_is_carried(
    kind: type[nn.Module], states: int, tmp_path: Path
) -> None:
    module = kind()
    loaded = load_module((module, (torch.randn(2, 12, 8),), DYNAMIC), "a:module")
    manifest = linexport.convert(loaded, tmp_path / "out", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    carried = [state.past for state in manifest.states]
    assert len([name for name in carried if not name.endswith("_begun")]) == states
    check_independently(tmp_path / "out", module, 8, lengths=(1, 2, 40))


@pytest.mark.slow
def test_numbers_of_steps_are_counted(tmp_path: Path) -> None:
    module = Counted().eval()
    source = load_module((module, (torch.randn(2, 16, 8),), DYNAMIC), "loop")
    linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    check_independently(tmp_path / "artifact", module, 8, lengths=(1, 2, 40))


def test_a_loop_that_is_not_linear_is_a_scan_with_its_last_state() -> None:
    graph = trace(load_module((Gates().eval(), (torch.randn(2, 16, 8),), DYNAMIC), "loop")).model
    (scan,) = (n for n in graph.graph.node if n.op_type == "Scan")
    (last,) = (n for n in graph.graph.node if n.output[0] == graph.graph.output[1].name)
    assert last.input[0] in scan.output
    assert sum(n.op_type == "Tanh" for n in graph.graph.node) == 0


def test_steps_that_differ_are_refused_with_the_line_of_the_loop() -> None:
    source = load_module((Uneven().eval(), (torch.randn(2, 16, 8),), DYNAMIC), "loop")
    with pytest.raises(UnsupportedModelError, match=r"range\(x.shape\[1\]\)"):
        trace(source)


def test_marks_that_do_not_repeat_are_named() -> None:
    """Steps of different operators, marked by hand."""
    nodes = [
        helper.make_node(op, ["x"], [f"y{i}"])
        for i, op in enumerate(["Relu", "Relu", "Tanh", "Relu", "Relu", "Relu", "Relu"])
    ]
    given = ["n", *(f"y{i}" for i in range(7))]
    nodes.append(helper.make_node(capture.MARK, given, ["z"], domain=capture.DOMAIN))
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["seq", "batch", 4])],
        [numpy_helper.from_array(torch.tensor(7).numpy(), "n")],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(capture.DOMAIN, 1)]
    with pytest.raises(reroll.NotALoopError, match="differ"):
        reroll.roll(helper.make_model(graph, opset_imports=imports))


def test_scans_of_packages_are_swapped_while_a_model_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tree(a, b):
        if a.shape[1] > 16:
            raise AssertionError("the package's own function ran")
        return b

    package, user = ModuleType("a_package"), ModuleType("a_package.layers")
    package.scan = user.imported = tree
    for module in (package, user):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    swap = Function("a_package", "scan", scans.recurrence, "a-package 1.0")
    monkeypatch.setattr(scans, "SCANS", (swap,))
    layer = nn.Identity()
    layer.scan, layer.reads = tree, lambda: tree
    own = layer.scan  # the name in the closure is swapped as well
    with scans.as_loops(layer):
        assert package.scan is user.imported is layer.scan is layer.reads() is scans.recurrence
    assert package.scan is user.imported is layer.scan is layer.reads() is own


class Cells(nn.Module):
    """An LSTM without its output gate, one of its two states collected, and the last gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(16, 24)

    def forward(self, x):
        h = c = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            i, f, g = self.gates(torch.cat([x[:, t], h], -1)).chunk(3, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.tanh(c)
            out.append(h)
        return torch.stack(out, 1), h, c, g


class Parts(Cells):
    """Both states are parts of one tensor, and nothing reads the second one."""

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h, c, _ = torch.tanh(self.gates(torch.cat([x[:, t], h], -1))).chunk(3, -1)
            out.append(h)
        return torch.stack(out, 1), h, c


class SecondToken(Recurrence):
    """The first output is computed before the loop."""

    def forward(self, x):
        h = self.project(x[:, 0])[:, :8]
        out = [h]
        for t in range(1, x.shape[1]):
            h = torch.tanh(h) + x[:, t]
            out.append(h)
        return torch.stack(out, 1), h


class ThirdToken(Recurrence):
    """The state after three tokens is read."""

    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(h + x[:, t])
            out.append(h)
        return torch.stack(out, 1) + out[2][:, None]


@pytest.mark.parametrize("kind", [Cells, Parts, SecondToken])
def test_what_is_read_of_the_last_step_is_right_at_every_length(kind: type[nn.Module]) -> None:
    module = kind().eval()
    model = trace(load_module((module, (torch.randn(2, 16, 8),), DYNAMIC), "loop")).model
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for length in (1, 2, 40):
        x = torch.randn(3, length, 8)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for got, expected in zip(found, module(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), expected)


def test_a_step_in_the_middle_is_refused() -> None:
    source = load_module((ThirdToken().eval(), (torch.randn(2, 16, 8),), DYNAMIC), "loop")
    with pytest.raises(UnsupportedModelError, match="a single step besides the last"):
        trace(source)


class Tree(nn.Module):
    """Sums of all tokens so far, by shifts of growing distance."""

    def forward(self, x):
        step = 1
        while step < x.shape[1]:
            x = x + nn.functional.pad(x, (0, 0, step, 0))[:, : x.shape[1]]
            step *= 2
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("module", "limited"), [(Tree(), True), (Recurrence(), False)])
def test_a_warning_names_sizes_that_the_code_limits(
    tmp_path: Path, module: nn.Module, limited: bool
) -> None:
    source = load_module((module.eval(), (torch.randn(2, 12, 8),), DYNAMIC), "loop")
    found = linexport.convert(source, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert any("a seq of 9 to 16 alone" in text for text in found.warnings) is limited


@pytest.mark.parametrize("given", [Dim("seq", max=64), Dim.DYNAMIC])
def test_a_limit_that_was_asked_for_needs_no_warning(given: object) -> None:
    dims = {"seq": DimRange(1, None, 64)}
    found = length_warnings(({0: Dim.DYNAMIC, 1: given},), dims, {"seq": 12})
    assert bool(found) is (given is Dim.DYNAMIC)


class Chunks(nn.Module):
    """Retention in chunks of four tokens that a loop takes by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        size, out = 4, []
        q, k, v = self.project(x).chunk(3, -1)
        state = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype)
        for c in range(x.shape[1] // size):
            q_c, k_c, v_c = (z[:, c * size : (c + 1) * size] for z in (q, k, v))
            out.append((q_c @ k_c.mT).tril() @ v_c + q_c @ state)
            state = 0.9 * state + k_c.mT @ v_c
        return torch.cat(out, 1)


class Steps(Chunks):
    """The loop counts tokens, by the number that a slice has."""

    def forward(self, x):
        size, out = 4, []
        q, k, v = self.project(x).chunk(3, -1)
        state = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype)
        for t in range(0, x.shape[1], size):
            q_c, k_c, v_c = q[:, t : t + size], k[:, t : t + size], v[:, t : t + size]
            out.append((q_c @ k_c.mT).tril() @ v_c + q_c @ state)
            state = state + k_c.mT @ v_c
        return torch.cat(out, 1)


class Written(Chunks):
    """Slices are written into a tensor, as RWKV-5's loop does."""

    def forward(self, x):
        size, out = 4, torch.zeros_like(x)
        q, k, v = self.project(x).chunk(3, -1)
        state = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype)
        for c in range(x.shape[1] // size):
            here = slice(c * size, c * size + size)
            out[:, here] = (q[:, here] @ k[:, here].mT).tril() @ v[:, here] + q[:, here] @ state
            state = state + k[:, here].mT @ v[:, here]
        return out


class Parted(Chunks):
    """A delta rule in chunks that the loop takes from lists."""

    def chunks(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return zip(*(y.split(4, 1) for y in (q, F.normalize(k, dim=-1), v)), strict=True)

    def forward(self, x):
        out = []
        state = torch.zeros(x.shape[0], 8, 8, dtype=x.dtype)
        for q_c, k_c, v_c in self.chunks(x):
            matrix, known = k_c @ k_c.mT, v_c - k_c @ state
            new = torch.linalg.solve_triangular(matrix, known, upper=False, unitriangular=True)
            out.append(q_c @ state + (q_c @ k_c.mT).tril() @ new)
            state = state + k_c.mT @ new
        return torch.cat(out, 1)


class Numbered(Parted):
    """The same by the numbers of the chunks."""

    def chunks(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        k = F.normalize(k, dim=-1)
        for c in range(x.shape[1] // 4):
            yield tuple(y[:, 4 * c : 4 * c + 4] for y in (q, k, v))


class Iterated(Chunks):
    """The loop takes chunks from tensors that have them along their first dimension."""

    def forward(self, x):
        q, k, v = (y.unflatten(1, (-1, 4)).transpose(0, 1) for y in self.project(x).chunk(3, -1))
        out, state = [], torch.zeros(x.shape[0], 8, 8, dtype=x.dtype)
        for q_c, k_c, v_c in zip(q, k, v, strict=True):
            out.append((q_c @ k_c.mT).tril() @ v_c + q_c @ state)
            state = state + k_c.mT @ v_c
        return torch.cat(out, 1)


class OfNumber(Chunks):
    """Sixteen chunks, whatever the length: those of performer-pytorch without CUDA, say."""

    def forward(self, x):
        last, out = 0, []
        for chunk in self.project(x)[..., :8].chunk(16, dim=1):
            total = last + chunk.cumsum(1)
            out.append(total / (1 + total.abs()))
            last = total[:, -1:]
        return torch.cat(out, dim=1)


class UnevenChunks(Chunks):
    """The fourth chunk is another one."""

    def forward(self, x):
        size, out = 4, []
        for c in range(x.shape[1] // size):
            out.append(x[:, c * size : (c + 1) * size] * (2 if c == 3 else 1))
        return torch.cat(out, 1)


@pytest.mark.parametrize(
    ("dim", "name", "most"),
    [(Dim.DYNAMIC, "seq", None), (4 * Dim("n", min=1, max=64), "4*n", 256)],
)
def test_a_loop_over_slices_takes_every_number_of_chunks(
    dim: object, name: str, most: int | None
) -> None:
    module = Chunks().eval()
    shapes = ({0: Dim.DYNAMIC, 1: dim},)
    traced = trace(load_module((module, (torch.randn(2, 12, 8),), shapes), "loop"))
    limits = traced.dims[name]
    assert (limits.min, limits.max, limits.multiple) == (4, most, 4)
    session = onnxruntime.InferenceSession(traced.model.SerializeToString())
    for length in (4, 8, 40):
        x = torch.randn(3, length, 8)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(x))


@pytest.mark.parametrize(
    ("kind", "dim", "rule"),
    [
        (Steps, Dim.DYNAMIC, "linear"),
        (Written, Dim.DYNAMIC, "linear"),
        (Iterated, Dim.DYNAMIC, "linear"),
        (Parted, Dim.DYNAMIC, "delta"),
        (Numbered, 4 * Dim("n", min=1, max=64), "delta"),
    ],
)
def test_loops_over_slices_are_fused(kind: type[nn.Module], dim: object, rule: str) -> None:
    module = kind().eval()
    shapes = ({0: Dim.DYNAMIC, 1: dim},)
    traced = trace(load_module((module, (torch.randn(2, 12, 8),), shapes), "loop"))
    assert [limits.multiple for limits in traced.dims.values()] == [1, 4]
    rewritten = passes.rewrite(traced.model)
    assert [match.update_rule for match in rewritten.findings.matches] == [rule]
    assert "Scan" not in {node.op_type for node in rewritten.model.graph.node}


@pytest.mark.parametrize("tokens", [5, 12, 24])
def test_a_loop_over_a_number_of_chunks_takes_every_length(tokens: int, tmp_path: Path) -> None:
    """Beyond sixteen tokens each chunk has several."""
    module = OfNumber().eval()
    source = load_module((module, (torch.randn(2, tokens, 8),), DYNAMIC), "loop")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    check_independently(tmp_path / "artifact", module, 8)


@pytest.mark.slow
def test_a_loop_over_slices_converts(tmp_path: Path) -> None:
    module = Chunks().eval()
    source = load_module((module, (torch.randn(2, 12, 8),), DYNAMIC), "loop")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.dims["seq"].multiple == 4
    check_independently(tmp_path / "artifact", module, 8, lengths=(4, 12, 64), unit=4)


def test_chunks_that_differ_are_refused_with_the_line_of_the_loop() -> None:
    source = load_module((UnevenChunks().eval(), (torch.randn(2, 12, 8),), DYNAMIC), "loop")
    with pytest.raises(UnsupportedModelError, match=r"range\(x.shape\[1\] // size\)"):
        trace(source)


class Resets(nn.Module):
    """A sum over tokens that begins anew where a second input says so."""

    def forward(self, x, reset):
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.9 * h * (1 - reset[:, t, None]) + x[:, t]
            out.append(h)
        return torch.stack(out, 1)


@pytest.mark.parametrize("named", [False, True])
def test_inputs_that_a_loop_reads_together_have_one_length(named: bool) -> None:
    """torch has a symbol for each, and does not see that there are as many steps."""
    dims = ({0: Dim("batch"), 1: Dim("T")}, {0: Dim("batch"), 1: Dim("S")})
    given = (Resets().eval(), (torch.randn(2, 9, 4), torch.zeros(2, 9)), *([dims] if named else []))
    traced = trace(load_module(given, "resets:layer"))
    shapes = [[d.dim_param for d in i.type.tensor_type.shape.dim] for i in traced.graph.graph.input]
    length = "T" if named else "seq"
    assert shapes == [["batch", length, ""], ["batch", length]] and [*traced.dims] == [
        "batch",
        length,
    ]
    x, reset = torch.randn(3, 33, 4), (torch.rand(3, 33) > 0.7).float()
    session = onnxruntime.InferenceSession(traced.model.SerializeToString())
    (got,) = session.run(None, {"x": x.numpy(), "reset": reset.numpy()})
    expected = Resets()(x.double(), reset.double())
    torch.testing.assert_close(torch.from_numpy(got).double(), expected, atol=1e-5, rtol=1e-5)


class Halves(nn.Module):
    """A step that cuts its state, and is not linear: the loop is kept, with its state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, out = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            first, second = state.chunk(2, -1)
            state = torch.tanh(torch.cat([second + x[:, t, :4], first * x[:, t, 4:]], -1))
            out.append(state)
        return torch.stack(out, 1)


def test_a_kept_loop_whose_step_cuts_its_state_streams(tmp_path: Path) -> None:
    loaded = load_module((Halves(), (torch.randn(2, 9, 8),)), "halves:make")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    check_independently(tmp_path / "a", Halves(), 8)


class Normalized(nn.Module):
    """RetNet's recurrence: a state that is normalised by a sum of powers, of no token."""

    def forward(
        self, x: torch.Tensor, state: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out = []
        for t in range(x.shape[1]):
            more = scale.square() * 0.75 + 1
            state = state * (scale.square() * 0.75 / more) + x[:, t] / more
            scale = more.sqrt()
            out.append(torch.tanh(state))
        return torch.stack(out, 1), state, scale


def test_a_state_of_no_token_is_carried(tmp_path: Path) -> None:
    examples = torch.randn(2, 9, 8), torch.randn(2, 8), torch.rand(2, 8)
    loaded = load_module((Normalized(), examples), "normalized:make")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    found, x = Independent(tmp_path / "a"), torch.randn(3, 70, 8)
    rows = [torch.randn(3, 8), torch.rand(3, 8)]
    expected = Normalized()(*(a.double() for a in (x, *rows)))
    for sizes in ([70], [1] * 70, [3, 60, 7]):
        got = found.outputs(x.numpy(), sizes, [a.numpy() for a in rows])
        for one, exact in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(one).double(), exact, rtol=1e-5, atol=1e-5)


class ClosedGates(nn.Module):
    """Logarithms of gates that read their state, so that no step leaves the loop."""

    def forward(self, x):
        m, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            gate = F.logsigmoid(x[:, t] + m.sin())
            m = torch.logaddexp(gate, (x[:, t] - m.cos()).sigmoid().log() - 90)
            out.append(m)
        return torch.stack(out, 1)


def test_logarithms_in_a_loop_are_right_where_a_gate_is_closed() -> None:
    """ONNX Runtime's Sigmoid is the same number from -18 down, and 0 soon after."""
    module, x = ClosedGates(), torch.linspace(-120, 120, 120).reshape(2, 10, 6)
    model = rewritten(module, x)
    assert any(node.op_type == "Scan" for node in model.graph.node)
    x = torch.cat([x, x.flip(1)], 1)
    found = in_pieces(model, x.numpy(), [3, 17])
    np.testing.assert_allclose(found, module(x.double()).numpy(), rtol=1e-6, atol=1e-5)
