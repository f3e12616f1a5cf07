"""Tree scans in functions of a model's own, and loops that begin at the second token."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport import passes
from linexport.patches.own_scans import own_scans
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


def doubling(a: Tensor, b: Tensor) -> Tensor:
    """Hillis and Steele: passes of distance 1, 2, 4, ..."""
    distance = 1
    while distance < a.shape[1]:
        b = torch.cat([b[:, :distance], a[:, distance:] * b[:, :-distance] + b[:, distance:]], 1)
        a = torch.cat([a[:, :distance], a[:, distance:] * a[:, :-distance]], 1)
        distance *= 2
    return b


def padded(tokens: Tensor, gates: Tensor) -> Tensor:
    """The same by Pad, of (B, C, T), the arguments in another order."""
    for i in range(math.ceil(math.log2(max(gates.shape[-1], 2)))):
        tokens = tokens + gates * F.pad(tokens, (2**i, 0))[..., : -(2**i)]
        gates = gates * F.pad(gates, (2**i, 0), value=1.0)[..., : -(2**i)]
    return tokens


def halves(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Products and states by recursion over every second token."""
    a, b = pair
    if a.shape[1] < 2:
        return pair
    early, late = a[:, :-1:2], a[:, 1::2]
    products, states = halves((early * late, late * b[:, :-1:2] + b[:, 1::2]))
    first_a, first_b = torch.empty_like(a), torch.empty_like(b)
    first_a[:, 1::2], first_b[:, 1::2] = products, states
    first_a[:, 0], first_b[:, 0] = a[:, 0], b[:, 0]
    rest = a[:, 2::2]
    first_a[:, 2::2] = products[:, : rest.shape[1]] * rest
    first_b[:, 2::2] = rest * states[:, : rest.shape[1]] + b[:, 2::2]
    return first_a, first_b


def sweeps(a: Tensor, b: Tensor) -> Tensor:
    """Blelloch: up and down, of a power of two of tokens."""
    a, b, levels = a.clone(), b.clone(), int(math.log2(a.shape[1]))
    for n in (2**k for k in range(levels)):
        b[:, 2 * n - 1 :: 2 * n] += a[:, 2 * n - 1 :: 2 * n] * b[:, n - 1 :: 2 * n]
        a[:, 2 * n - 1 :: 2 * n] *= a[:, n - 1 :: 2 * n]
    for n in (2**k for k in range(levels - 2, -1, -1)):
        b[:, 3 * n - 1 :: 2 * n] += a[:, 3 * n - 1 :: 2 * n] * b[:, 2 * n - 1 : -n : 2 * n]
        a[:, 3 * n - 1 :: 2 * n] *= a[:, 2 * n - 1 : -n : 2 * n]
    return b


def swept(a: Tensor, b: Tensor) -> Tensor:
    """The same of any number of tokens."""
    more = 2 ** math.ceil(math.log2(max(a.shape[1], 2))) - a.shape[1]
    return sweeps(F.pad(a, (0, 0, 0, more)), F.pad(b, (0, 0, 0, more)))[:, : a.shape[1]]


def bounded(a: Tensor, b: Tensor) -> Tensor:
    """A recurrence whose state is bounded at every pass, which is another one."""
    distance = 1
    while distance < a.shape[1]:
        b = torch.cat([b[:, :distance], a[:, distance:] * b[:, :-distance] + b[:, distance:]], 1)
        a = torch.cat([a[:, :distance], a[:, distance:] * a[:, :-distance]], 1)
        b, distance = b.clamp(-5, 5), 2 * distance
    return b


def without_signs(a: Tensor, b: Tensor) -> Tensor:
    """The recurrence of the sizes of a."""
    return doubling(a.abs(), b)


def conjugated(a: Tensor, b: Tensor) -> Tensor:
    """The recurrence of the conjugates of a."""
    return doubling(a.conj(), b)


def softmax_of_shifts(w: Tensor, m: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sums below a running maximum, of (B, T, C), (B, T) and (B, T)."""
    distance = 1
    while distance < m.shape[1]:
        largest = torch.maximum(m[:, distance:], m[:, :-distance])
        late, early = (m[:, distance:] - largest).exp(), (m[:, :-distance] - largest).exp()
        u, w = (
            torch.cat(
                [
                    x[:, :distance],
                    x[:, distance:] * late.reshape(*late.shape, *more)
                    + x[:, :-distance] * early.reshape(*late.shape, *more),
                ],
                1,
            )
            for x, more in ((u, ()), (w, (1,)))
        )
        m, distance = torch.cat([m[:, :distance], largest], 1), 2 * distance
    return w, u


def softmax_above_zero(m: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The same by recursion, of a maximum that is never below 0."""
    if m.shape[-1] < 2:
        top = m.clamp(min=0)
        return (m - top).exp() * u, (m - top)[..., None].exp() * w
    half = m.shape[-1] // 2
    (u_0, w_0), (u_1, w_1) = (
        softmax_above_zero(m[..., part], u[..., part], w[..., part, :])
        for part in (slice(half), slice(half, None))
    )
    top = m.clamp(min=0).cummax(-1).values
    last, inner = top[..., half - 1 : half], m[..., half:].clamp(min=0).cummax(-1).values
    kept, new = (last - top[..., half:]).exp(), (inner - top[..., half:]).exp()
    u_1 = u_0[..., -1:] * kept + u_1 * new
    w_1 = w_0[..., -1:, :] * kept[..., None] + w_1 * new[..., None]
    return torch.cat([u_0, u_1], -1), torch.cat([w_0, w_1], -2)


class Gated(nn.Module):
    """h = sigmoid(a) h + b by some function."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.project(x).chunk(2, -1)
        return self.scan(torch.sigmoid(a), b) + x


class Doubling(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return doubling(a, b)


class Padded(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return padded(b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)


class Halves(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return halves((a, b))[1]


class Swept(Gated):
    @staticmethod
    def scan(a: Tensor, b: Tensor) -> Tensor:
        return swept(a, b)


class Turned(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return doubling(torch.polar(a, 2 * b), b.to(torch.complex64)).real


class Conjugated(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return conjugated(torch.polar(a, 2 * b), b.to(torch.complex64)).real


class Bounded(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return bounded(a, 30 * b)


class WithoutSigns(Gated):
    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return without_signs(2 * a - 1, b)


class FromSecond(Gated):
    """A loop whose first state is the first token's."""

    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        h = b[:, 0]
        states = [h]
        for t in range(1, b.shape[1]):
            h = a[:, t] * h + b[:, t]
            states.append(h)
        return torch.stack(states, 1)


class Average(Gated):
    """A moving average, of which the first token has the whole weight."""

    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        h = b[:, 0]
        states = [h]
        for t in range(1, b.shape[1]):
            h = 0.9 * h + 0.1 * b[:, t]
            states.append(h)
        return torch.stack(states, 1)


class Averages(Gated):
    """Averages over earlier tokens, weighted by exponentials too large for float32."""

    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        scores = 200 * a.mean(-1)
        w, u = softmax_of_shifts(b, scores, torch.ones_like(scores))
        return w / u[..., None]


class AboveZero(Gated):
    """Sums below a maximum that is never below 0."""

    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        scores = a.mean(-1) - 0.5
        u, w = softmax_above_zero(scores, torch.ones_like(scores), b)
        return w + u[..., None]


class Associative(Gated):
    """PyTorch's operator."""

    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        from torch._higher_order_ops import associative_scan

        def combine(x: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return x[0] * y[0], y[0] * x[1] + y[1]

        return associative_scan(combine, (a, b), 1, combine_mode="generic")[1]


class Inline(Gated):
    """A tree scan in the middle of ``forward``, of a size that is a variable."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.project(x).chunk(2, -1)
        a, length, s = torch.sigmoid(a), x.shape[1], 1
        while s < length:
            b = b + a * F.pad(b, (0, 0, s, 0))[:, :length]
            a = a * F.pad(a, (0, 0, s, 0), value=1.0)[:, :length]
            s *= 2
        return b + x


class InlineWrites(Gated):
    """Another one, in place, between loops that compute something else."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.project(x).chunk(2, -1)
        a, b = torch.sigmoid(a), b.clone()
        for scale in (0.5, 2.0):
            b = scale * b
        for i in range(math.ceil(math.log2(max(x.shape[1], 2)))):
            d = 2**i
            late = a[:, d:] * b[:, :-d]
            b[:, d:] += late
            a = torch.cat([a[:, :d], a[:, d:] * a[:, :-d]], 1)
        for bias in (1.0, -1.0):
            x = x + bias
        return b + x


class InlineImports(Gated):
    """The same with a module that the function imports; another loop calls what it defines."""

    def forward(self, x: Tensor) -> Tensor:
        import math as numbers

        def halved(y: Tensor) -> Tensor:
            return y / 2

        a, b = self.project(x).chunk(2, -1)
        a, s = torch.sigmoid(a), 1
        while s < x.shape[1]:
            b = b + a * F.pad(b, (0, 0, s, 0))[:, : x.shape[1]] * numbers.exp(0)
            a = a * F.pad(a, (0, 0, s, 0), value=1.0)[:, : x.shape[1]]
            s *= 2
        for y in (x, x):
            b = b + halved(y)
        return b


class InlineSigns(Gated):
    """The same of the sizes of a, which is another recurrence."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.project(x).chunk(2, -1)
        a, s = torch.tanh(a), 1
        while s < x.shape[1]:
            a = a.abs()
            b = b + a * F.pad(b, (0, 0, s, 0))[:, : x.shape[1]]
            a = a * F.pad(a, (0, 0, s, 0), value=1.0)[:, : x.shape[1]]
            s *= 2
        return b + x


def source(module: nn.Module) -> linexport.sources.LoadedModel:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return load_module((module.eval(), (torch.randn(2, 16, WIDTH),), shapes), "tests.models:scan")


def converted(module: nn.Module, folder: Path) -> linexport.manifest.Manifest:
    return linexport.convert(source(module), folder, bench=False, threads=1)


FOUND = [Doubling, Padded, Halves, Swept, Turned, Averages]


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_a_function_that_computes_a_recurrence_is_found(kind: type[Gated]) -> None:
    module = kind().eval()
    before = doubling, padded, halves, swept, sweeps
    with own_scans(module, (torch.randn(2, 16, WIDTH),), {}) as count:
        assert count
        x = torch.randn(2, 7, WIDTH)
        found = module(x)
    assert (doubling, padded, halves, swept, sweeps) == before
    torch.testing.assert_close(found, module(x))


INLINE = [Inline, InlineWrites, InlineImports]


@pytest.mark.parametrize("kind", INLINE, ids=lambda kind: kind.__name__)
def test_a_loop_in_the_middle_of_a_function_is_found(kind: type[Gated]) -> None:
    module = kind().eval()
    code, names = kind.forward.__code__, set(globals())
    with own_scans(module, (torch.randn(2, 16, WIDTH),), {}) as count:
        assert count == 1
        x = torch.randn(2, 7, WIDTH)
        found = module(x)
    assert kind.forward.__code__ is code and set(globals()) == names
    torch.testing.assert_close(found, module(x))


def test_another_loop_is_not_swapped() -> None:
    module, x = InlineSigns().eval(), torch.randn(2, 16, WIDTH)
    expected = module(x)
    with own_scans(module, (x,), {}) as count:
        assert not count
        torch.testing.assert_close(module(x), expected, rtol=0, atol=0)


def test_a_loop_in_the_middle_of_a_function_converts_and_streams(tmp_path: Path) -> None:
    module = Inline()
    manifest = converted(module, tmp_path / "artifact")
    assert manifest.fused == {"LinearAttention": 1}
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


OTHERS = {
    bounded: Bounded,
    without_signs: WithoutSigns,
    conjugated: Conjugated,
    softmax_above_zero: AboveZero,
}


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_another_function_is_not_swapped(function: object) -> None:
    module = OTHERS[function]()  # type: ignore[index]
    own = globals()[function.__name__]  # type: ignore[attr-defined]
    with own_scans(module, (torch.randn(2, 16, WIDTH),), {}):
        assert globals()[function.__name__] is own  # type: ignore[attr-defined]


def test_a_tree_scan_converts_and_streams(tmp_path: Path) -> None:
    module = Doubling()
    manifest = converted(module, tmp_path / "artifact")
    assert manifest.fused == {"LinearAttention": 1}
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [Padded, Halves, Swept, Turned, FromSecond, Associative, InlineWrites],
    ids=lambda kind: kind.__name__,
)
def test_every_scan_converts_and_streams(kind: type[Gated], tmp_path: Path) -> None:
    module = kind()
    manifest = converted(module, tmp_path / "artifact")
    assert manifest.fused == {"LinearAttention": 1}
    assert manifest.streaming and manifest.streaming.passed
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


@pytest.mark.slow
def test_the_sizes_of_a_decay_stay_outside_of_the_recurrence(tmp_path: Path) -> None:
    module = WithoutSigns()
    converted(module, tmp_path / "artifact")
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))


@pytest.mark.slow
def test_a_bounded_scan_is_limited_to_the_lengths_of_its_passes(tmp_path: Path) -> None:
    module = Bounded()
    manifest = converted(module, tmp_path / "artifact")
    assert not manifest.states and manifest.dims["seq"].max == 16
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(9, 13, 16))


def test_a_loop_from_the_second_token_begins_with_zeros() -> None:
    rewritten = passes.run(trace(source(FromSecond())).model)
    assert [n.op_type for n in rewritten.graph.node].count("LinearAttention") == 1
    assert "past_state_0" in [i.name for i in rewritten.graph.input]


@pytest.mark.slow
def test_a_first_token_that_counts_more_stays_right(tmp_path: Path) -> None:
    module = Average()
    manifest = converted(module, tmp_path / "artifact")
    assert not manifest.states
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 2, 7, 130))
