"""Loops that turn pairs of numbers: how exact they are, what is carried, and which stay loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes
from linexport.graph import states
from linexport.passes import Rewritten
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.loops import session_of

pytestmark = pytest.mark.usefixtures("one_thread")

Step = Callable[..., tuple[Tensor, ...]]


def turned(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re - b * im, b * re + a * im


def turned_by_halves(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Both parts side by side, and turned by a quarter, as rotary positions are written."""
    both, quarter = torch.cat([re, im], -1), torch.cat([-im, re], -1)
    return (torch.cat([a, a], -1) * both + torch.cat([b, b], -1) * quarter).chunk(2, -1)


class Recurrence(nn.Module):
    """h_t = (a + ib) h_{t-1} + c + id of a, b, c, d side by side, as re h, im h."""

    def __init__(self, step: Step = turned, begin: float = 0.0) -> None:
        super().__init__()
        self.step, self.begin = step, begin

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = x.chunk(4, -1)
        re = im = torch.full_like(c[:, 0], self.begin)
        out = []
        for t in range(x.shape[1]):
            re, im = self.step(re, im, a[:, t], b[:, t])
            re, im = re + c[:, t], im + d[:, t]
            out.append(torch.cat([re, im], -1))
        return torch.stack(out, 1)


def rewritten(module: nn.Module, withdrawn: dict[str, str] | None = None) -> Rewritten:
    example = (torch.randn(2, 16, 16),)
    source = load_module((module, example, ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)), "recurrence")
    return passes.rewrite(trace(source).model, withdrawn=withdrawn)


def in_float64(x: np.ndarray) -> np.ndarray:
    """The recurrence with the factors that float32 has."""
    a, b, c, d = np.split(x.astype(np.float64), 4, -1)
    factor, added, h, found = a + 1j * b, c + 1j * d, 0, []
    for t in range(x.shape[1]):
        h = factor[:, t] * h + added[:, t]
        found.append(h)
    whole = np.stack(found, 1)
    return np.concatenate([whole.real, whole.imag], -1)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    found = rewritten(Recurrence())
    assert [m.update_rule for m in found.findings.matches] == ["gated"]
    assert not any(node.op_type == "Scan" for node in found.model.graph.node)
    return found.model


def test_parts_may_be_turned_side_by_side() -> None:
    found = rewritten(Recurrence(turned_by_halves))
    assert [m.update_rule for m in found.findings.matches] == ["gated"]
    (state,) = states.find_states(found.model)
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (2, 50, 16)).astype(np.float32)
    got = session_of(found.model).run(None, {"x": x, state.past: state.start(2)})[0]
    expected = in_float64(x)
    assert np.abs(got - expected).max() < 5e-6 * np.abs(expected).max()


@pytest.mark.parametrize("turns", ["all", "one"])
def test_angles_do_not_wear_off(model: onnx.ModelProto, turns: str) -> None:
    """Of 4,097 turns without decay none is forgotten, and their angles add up to many turns."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 4097, 16)).astype(np.float32)
    angle = random.uniform(-np.pi, np.pi, (2, 4097 if turns == "all" else 1, 4))
    x[..., :4], x[..., 4:8] = np.cos(angle), np.sin(angle)
    (state,) = states.find_states(model)
    session, past, found = session_of(model), state.start(2), []
    expected = in_float64(x)
    for piece in np.split(x, [1000, 1001, 3500], 1):
        got, past = session.run(None, {"x": piece, state.past: past})
        found.append(got)
    largest = np.abs(expected).max()
    assert np.abs(np.concatenate(found, 1) - expected).max() < 5e-6 * largest
    parts = np.concatenate([past[:, :, 0, 0], past[:, :, 0, 1]], -1)
    assert np.abs(parts - expected[:, -1]).max() < 5e-6 * largest


def test_the_state_is_that_of_the_recurrence(model: onnx.ModelProto) -> None:
    """Without tokens it stays; a token turns it, two quarters are a half, and a zero forgets it."""
    (state,) = states.find_states(model)
    session = session_of(model)
    past = np.arange(1, 17, dtype=np.float32).reshape(2, 4, 1, 2)

    def after(*factors: complex) -> np.ndarray:
        x = np.zeros((2, len(factors), 16), np.float32)
        x[..., :4], x[..., 4:8] = (np.reshape(f(factors), (-1, 1)) for f in (np.real, np.imag))
        found: np.ndarray = session.run([state.present], {"x": x, state.past: past})[0]
        return found

    def times(factor: complex) -> np.ndarray:
        whole = (past[..., 0] + 1j * past[..., 1]) * factor
        return np.stack([whole.real, whole.imag], -1)

    np.testing.assert_array_equal(after(), past)
    for factors in ((1j,), (-1.0,), (1j, 1j), (0.5j, 1.0), (0.6 - 0.8j, 1j, -0.25), (1e-30, 1e-20)):
        np.testing.assert_allclose(after(*factors), times(np.prod(factors)), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(after(1j, 0.0, 1j), 0 * past)


def squeezed(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re - 0.5 * b * im, b * re + 0.5 * a * im


def mirrored(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re + b * im, b * re - a * im


def across(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re - b * im.flip(-1), b * re.flip(-1) + a * im


def rarely_squeezed(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re - b * im, b * re + torch.where(b > 6, a / 2, a) * im


def bounded(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re - b * im, b * re + a.clamp(max=8) * im


@pytest.mark.parametrize("step", [squeezed, mirrored, across, rarely_squeezed, bounded])
def test_what_does_not_turn_pairs_stays_a_loop(step: Step) -> None:
    """Squeezing, mirroring, and turning channels into others, if only of numbers rarely drawn."""
    found = rewritten(Recurrence(step))
    assert not found.findings.matches
    assert any(node.op_type == "Scan" for node in found.model.graph.node)


def one_way_or_the_other(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return 0.8 * re - b * im, b * re + 0.8 * im


def as_far_either_way(re: Tensor, im: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * re - 0.6 * im, 0.6 * re + a * im


@pytest.mark.parametrize("step", [one_way_or_the_other, as_far_either_way])
def test_one_factor_may_be_the_same_for_all_tokens(step: Step) -> None:
    module = Recurrence(step)
    found = rewritten(module)
    assert len(found.findings.matches) == 1
    (state,) = states.find_states(found.model)
    x = torch.rand(2, 37, 16) * 0.5
    y, _ = session_of(found.model).run(None, {"x": x.numpy(), state.past: state.start(2)})
    with torch.no_grad():
        expected = module.double()(x.double()).numpy()
    np.testing.assert_allclose(y, expected, rtol=0, atol=5e-6 * np.abs(expected).max())


def test_a_state_that_does_not_begin_with_zeros_stays_a_loop() -> None:
    assert not rewritten(Recurrence(begin=1.0)).findings.matches


def test_a_withdrawn_match_stays_a_loop() -> None:
    (match,) = rewritten(Recurrence()).findings.matches
    found = rewritten(Recurrence(), {match.where: "it differs"})
    assert not found.findings.matches
    assert [(r.where, r.reason) for r in found.findings.rejected] == [(match.where, "it differs")]


class Neighbours(nn.Module):
    """Layers whose pairs are neighbours, of a width of its own each."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = (2, 3)
        self.layers = nn.ModuleList((nn.Linear(16, 6), nn.Linear(4, 9)))

    def forward(self, x: Tensor) -> Tensor:
        for layer, n in zip(self.layers, self.pairs, strict=True):
            added, angles = layer(x.tanh()).split((2 * n, n), -1)
            cos, sin = angles.cos(), angles.sin()
            h, found = torch.zeros_like(added[:, 0]), []
            for t in range(x.shape[1]):
                both = torch.stack(turned(h[:, 0::2], h[:, 1::2], cos[:, t], sin[:, t]), -1)
                h = 0.9 * both.flatten(-2) + added[:, t]
                found.append(h)
            x = torch.stack(found, 1)
        return x


def test_numbers_of_two_loops_have_names_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Tensors of one name would be one tensor in the file, and onnx-graphsurgeon warns of them."""
    assert len(rewritten(Neighbours()).findings.matches) == 2
    written = capfd.readouterr()
    assert "share the same name" not in written.out + written.err
