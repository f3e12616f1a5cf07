"""Loops, chunks and functions around them, as strangers write them."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.strangers.registry import WIDTH, stranger


class Gates(nn.Module):
    """A rate between 0 and 1 and a value for each channel."""

    def __init__(self, d=WIDTH):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def gates(self, x):
        return torch.sigmoid(self.a(x)), self.b(x)

    @staticmethod
    def scan(a, b):
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            h = a[:, t] * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1)


@stranger("streams")
class LerpAverage(nn.Module):
    """A moving average by torch.lerp, written into a copy of the input."""

    def __init__(self, d=WIDTH):
        super().__init__()
        self.alpha = nn.Parameter(torch.randn(d))

    def forward(self, x):
        rate, s, out = self.alpha.sigmoid(), torch.zeros_like(x[:, 0]), x.clone()
        for t in range(x.size(1)):
            s = torch.lerp(s, x[:, t], rate)
            out[:, t] = s
        return out


class Cell(nn.Module):
    """One step of a gated layer; its state is a dict."""

    def __init__(self, d):
        super().__init__()
        self.i, self.f, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, state):
        f = torch.sigmoid(self.f(x))
        state = {"h": f * state["h"] + (1 - f) * torch.tanh(self.i(x))}
        return torch.sigmoid(self.o(x)) * state["h"], state


@stranger("streams")
class StackOfCells(nn.Module):
    """Tokens outside, layers with residuals inside."""

    def __init__(self, d=WIDTH, layers=2):
        super().__init__()
        self.cells = nn.ModuleList(Cell(d) for _ in range(layers))

    def forward(self, x):
        states = [{"h": torch.zeros_like(x[:, 0])} for _ in self.cells]
        ys = []
        for xt in x.transpose(0, 1):
            for j, cell in enumerate(self.cells):
                y, states[j] = cell(xt, states[j])
                xt = xt + y
            ys.append(xt)
        return torch.stack(ys).transpose(0, 1)


@stranger("streams", unit=8)
class RetentionOfIteratedChunks(nn.Module):
    """RetNet by chunks, which the loop takes from tensors with the chunks in front."""

    def __init__(self, d=WIDTH, heads=2, chunk=8):
        super().__init__()
        self.h, self.c = heads, chunk
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        gamma = 1 - 2.0 ** (-5 - torch.arange(heads))
        i = torch.arange(chunk)
        self.register_buffer("inner", gamma[:, None, None] ** (i[:, None] + 1))
        self.register_buffer("cross", gamma[:, None, None] ** chunk)
        self.register_buffer("left", gamma[:, None, None] ** (chunk - 1 - i[:, None]))
        self.register_buffer("within", (gamma[:, None, None] ** (i[:, None] - i)).tril())

    def forward(self, x):
        pattern = "b (n c) (h d) -> n b h c d"
        q, k, v = (rearrange(p(x), pattern, h=self.h, c=self.c) for p in (self.q, self.k, self.v))
        out, state = [], x.new_zeros(x.shape[0], self.h, q.shape[-1], q.shape[-1])
        for qc, kc, vc in zip(q, k, v, strict=True):
            out.append((qc @ kc.mT * self.within) @ vc + (qc @ state) * self.inner)
            state = self.cross * state + kc.mT @ (vc * self.left)
        return rearrange(torch.stack(out), "n b h c d -> b (n c) (h d)")


@stranger("streams")
class Accumulated(Gates):
    """itertools.accumulate in the place of a loop."""

    def forward(self, x):
        a, b = self.gates(x)
        pairs = zip(a.unbind(1), b.unbind(1), strict=True)
        zero = torch.zeros_like(b[:, 0])
        states = accumulate(pairs, lambda h, ab: ab[0] * h + ab[1], initial=zero)
        return torch.stack(list(states)[1:], 1)


class ScanFunction(torch.autograd.Function):
    """A recurrence with a gradient of its own."""

    @staticmethod
    def forward(ctx, a, b):
        out = Gates.scan(a, b)
        ctx.save_for_backward(a, out)
        return out


@stranger("streams")
class WithItsOwnGradient(Gates):
    """The loop in an autograd function."""

    def forward(self, x):
        return ScanFunction.apply(*self.gates(x))


@stranger("streams")
class Checkpointed(Gates):
    """The loop in a checkpoint."""

    def forward(self, x):
        return checkpoint(self.scan, *self.gates(x), use_reentrant=False)


@stranger("streams")
class OfOneSequence(nn.Module):
    """A function of one head of one sequence, by vmap of all."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.qkv, self.h = nn.Linear(d, 3 * d), heads

    @staticmethod
    def attend(q, k, v):
        weights = torch.tril((F.elu(q) + 1) @ (F.elu(k) + 1).T)
        return weights @ v / (weights.sum(1)[:, None] + 1e-6)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b t (c h d) -> c b h t d", c=3, h=self.h)
        every = torch.func.vmap(torch.func.vmap(self.attend))
        return rearrange(every(q, k, v), "b h t d -> b t (h d)")


@stranger("carried")
class LearnedFirstState(nn.Module):
    """TTT-linear, token by token, from weights: a delta rule that does not begin with zeros."""

    def __init__(self, d=WIDTH):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.rate, self.first = nn.Linear(d, 1), nn.Parameter(torch.randn(d, d) / 8)

    def forward(self, x):
        q, k, v = self.q(x), F.normalize(self.k(x), dim=-1), self.v(x)
        eta, out = torch.sigmoid(self.rate(x)) / 2, []
        w = self.first.repeat(x.shape[0], 1, 1)
        for t in range(x.shape[1]):
            kt = k[:, t : t + 1]
            w = w - eta[:, t, :, None] * (kt.mT @ (kt @ w - v[:, t : t + 1]))
            out.append(q[:, t : t + 1] @ w)
        return torch.cat(out, 1)
