"""The stabilised mLSTM by chunks and token by token: any split of a sequence, single tokens too.

The oracle is the quadratic form in float64, which has no maximum and takes any length.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes
from linexport.graph import states
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.outcomes import run_in_pieces, session_of

WIDTH, HEADS, D, CHUNK, EPS = 16, 2, 8, 4, 1e-6

Cell = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("one_thread")


def quadratic(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """What all compute: (B, H, T, D) and exponents (B, H, T), at any length."""
    total = f.cumsum(-1)
    weights = (total[..., None] - total[..., None, :] + i[..., None, :]).exp().tril()
    scores = q @ k.mT * weights
    return scores @ v / scores.sum(-1, keepdim=True).abs().clamp(min=1)


def chunked(*tensors: Tensor) -> list[Tensor]:
    return [x.reshape(*x.shape[:2], x.shape[2] // CHUNK, CHUNK, *x.shape[3:]) for x in tensors]


def within(total: Tensor, i: Tensor) -> Tensor:
    """Exponents of a chunk, (.., CHUNK, CHUNK)."""
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    exponents = total[..., None] - total[..., None, :] + i[..., None, :]
    return exponents.masked_fill(later, -torch.inf)


def joined(
    q: Tensor, k: Tensor, v: Tensor, total: Tensor, i: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> Tensor:
    """Outputs of chunks from the states before them."""
    inside, before = within(total, i), total + m[..., None]
    largest = torch.maximum(inside.amax(-1), before)
    scores = q @ k.mT * (inside - largest[..., None]).exp()
    read = q * (before - largest).exp()[..., None]
    divisor = torch.maximum(
        (scores.sum(-1) + (read @ n[..., None])[..., 0]).abs(), (-largest).exp()
    )
    return (scores @ v + read @ c) / (divisor[..., None] + EPS)


def step(
    k: Tensor, v: Tensor, a: Tensor, g: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> list[Tensor]:
    """The states after a chunk."""
    after = torch.maximum(g + m, a.amax(-1))
    kept, fade = k * (a - after[..., None]).exp()[..., None], (g + m - after).exp()[..., None]
    return [fade[..., None] * c + kept.mT @ v, fade * n + kept.sum(-2), after]


def first_states(q: Tensor, m: float = 0.0) -> list[Tensor]:
    batch = q.shape[0]
    zeros = q.new_zeros(batch, HEADS, D, D), q.new_zeros(batch, HEADS, D)
    return [*zeros, q.new_full((batch, HEADS), m)]


def chunk_by_chunk(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """States and outputs in one loop."""
    q, k, v, i, f = chunked(q, k, v, i, f)
    total = f.cumsum(-1)
    state, outputs = first_states(q), []
    for n in range(q.shape[2]):
        x, y, z, u, e = (t[:, :, n] for t in (q, k, v, total, i))
        outputs.append(joined(x, y, z, u, e, *state))
        state = step(y, z, u[..., -1:] - u + e, u[..., -1], *state)
    return torch.stack(outputs, 2).flatten(2, 3)


def states_first(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """All states in a loop, then all outputs at once, as mlstm_kernels has it."""
    q, k, v, i, f = chunked(q, k, v, i, f)
    total = f.cumsum(-1)
    a, g = total[..., -1:] - total + i, total[..., -1]
    state, found = first_states(q), []
    for n in range(q.shape[2]):
        found.append(state)
        state = step(*(t[:, :, n] for t in (k, v, a, g)), *state)
    before = (torch.stack(same, 2) for same in zip(*found, strict=True))
    return joined(q, k, v, total, i, *before).flatten(2, 3)


def by_a_triangle(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """States between chunks without a loop, with a maximum of their own."""
    q, k, v, i, f = chunked(q, k, v, i, f)
    total = f.cumsum(-1)
    a, sums = total[..., -1:] - total + i, total[..., -1].cumsum(-1)
    most = a.amax(-1)
    kept = k * (a - most[..., None]).exp()[..., None]
    begun = F.pad(sums, (1, 0))[..., :-1]
    later = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool).triu()
    between = (begun[..., None] - sums[..., None, :] + most[..., None, :]).masked_fill(
        later, -torch.inf
    )
    m = torch.maximum(between.amax(-1), begun)
    weights = (between - m[..., None]).exp()
    c = torch.einsum("bhnm,bhmde->bhnde", weights, kept.mT @ v)
    n = torch.einsum("bhnm,bhmd->bhnd", weights, kept.sum(-2))
    return joined(q, k, v, total, i, c, n, m).flatten(2, 3)


def token_by_token(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """As the paper states it, with a maximum that begins below all exponents."""
    (c, n, m), outputs = first_states(q, -1e30), []
    for t in range(q.shape[2]):
        after = torch.maximum(f[:, :, t] + m, i[:, :, t])
        kept = k[:, :, t] * (i[:, :, t] - after).exp()[..., None]
        fade = (f[:, :, t] + m - after).exp()[..., None]
        c = fade[..., None] * c + kept[..., None] * v[:, :, t, None]
        n, m = fade * n + kept, after
        below = torch.maximum((q[:, :, t] * n).sum(-1).abs(), (-m).exp())
        outputs.append((q[:, :, t, None] @ c)[:, :, 0] / (below[..., None] + EPS))
    return torch.stack(outputs, 2)


class Layer(nn.Module):
    """Projections in front of a cell, with input gates of any size."""

    def __init__(self, cell: Cell, size: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.size = cell, size
        self.inside = nn.Linear(WIDTH, 3 * WIDTH + 2 * HEADS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        *qkv, i, f = self.inside(x).split([*[WIDTH] * 3, HEADS, HEADS], -1)
        q, k, v = (y.unflatten(-1, (HEADS, D)).transpose(1, 2) for y in qkv)
        q, k = F.elu(q) + 1, F.elu(k) + 1  # sums of one sign: their quotients lose no digits
        y = self.cell(q, k, v, self.size * i.mT, F.logsigmoid(f).mT)
        return y.transpose(1, 2).flatten(2)


def rewritten(layer: Layer) -> passes.Rewritten:
    given = ((torch.randn(2, 4 * CHUNK, WIDTH),), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    return passes.rewrite(trace(load_module((layer.eval(), *given), "stabilised:layer")).model)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("cell", "size"),
    [
        (chunk_by_chunk, 1.0),
        pytest.param(states_first, 1.0, marks=SLOW),
        pytest.param(chunk_by_chunk, 40.0, marks=SLOW),
        pytest.param(by_a_triangle, 1.0, marks=SLOW),
        pytest.param(token_by_token, 1.0, marks=SLOW),
    ],
)
def test_every_form_streams_by_tokens(cell: Cell, size: float) -> None:
    found = rewritten(Layer(cell, size))
    kept = states.find_states(found.model)
    assert len(found.findings.matches) == 1
    assert not any(node.op_type == "Scan" for node in found.model.graph.node)
    session, oracle = session_of(found.model), Layer(quadratic, size).double()
    for length in (1, 7, 130):
        x = torch.randn(3, length, WIDTH)
        with torch.no_grad():
            expected = oracle(x.double()).numpy()
        for parts in ([length], [length // 3, length - length // 3], [1] * length):
            got = run_in_pieces(session, kept, x.numpy(), [n for n in parts if n])
            assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_maximum_of_other_exponents_is_left() -> None:
    """Its quotient is the same but for epsilon, which counts where exponents are large."""

    def halved(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        q, k, v, i, f = chunked(q, k, v, i, f)
        total = f.cumsum(-1)
        outputs, state = [], first_states(q)
        for n in range(q.shape[2]):
            x, y, z, u, e = (t[:, :, n] for t in (q, k, v, total, i))
            outputs.append(joined(x, y, z, u, e, *state))
            c, norm, m = step(y, z, u[..., -1:] - u + e, u[..., -1], *state)
            lower = torch.maximum(u[..., -1] + state[2], e.amax(-1))
            state = [
                c * (m - lower).exp()[..., None, None],
                norm * (m - lower).exp()[..., None],
                lower,
            ]
        return torch.stack(outputs, 2).flatten(2, 3)

    found = rewritten(Layer(halved))
    assert not any("output" in match.where for match in found.findings.matches)
