"""States that turn: complex diagonal state spaces in real numbers, as loops over tokens."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.formulations.notation import (
    COLLECTED,
    HEADS,
    WIDTH,
    D,
    formulation,
    heads_first,
    merge,
    split,
)

N = 8
"""Complex states of a layer."""


class LinearRecurrentUnit(nn.Module):
    """LRU: exp(-exp(nu) + i exp(theta)), its normaliser gamma, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        size = torch.linspace(0.8, 0.999, N)
        self.nu = nn.Parameter(torch.log(-torch.log(size)))
        self.theta = nn.Parameter(torch.log(torch.linspace(0.01, 3.1, N)))
        self.gamma = nn.Parameter(torch.log(torch.sqrt(1 - size**2)))
        self.b = nn.Parameter(torch.randn(2, N, WIDTH) / math.sqrt(2 * WIDTH))
        self.c = nn.Parameter(torch.randn(2, WIDTH, N) / math.sqrt(N))
        self.d = nn.Parameter(torch.randn(WIDTH))

    def rates(self):
        size = torch.exp(-torch.exp(self.nu))
        return size * torch.cos(self.theta.exp()), size * torch.sin(self.theta.exp())

    def forward(self, q, k, v):
        a, b = self.rates()
        added = [v @ (self.gamma.exp()[:, None] * part).T for part in self.b]
        re = im = torch.zeros(v.shape[0], N)
        out = []
        for t in range(v.shape[1]):
            re, im = a * re - b * im + added[0][:, t], b * re + a * im + added[1][:, t]
            out.append(re @ self.c[0].T - im @ self.c[1].T)
        return torch.stack(out, 1) + self.d * v + q * k


formulation(COLLECTED)(LinearRecurrentUnit)


class ComplexUnit(LinearRecurrentUnit):
    """The same in complex numbers, as its authors write it."""

    def forward(self, q, k, v):
        rate = torch.exp(torch.complex(-self.nu.exp(), self.theta.exp()))
        b, c = torch.complex(*self.b), torch.complex(*self.c)
        added = v.to(b.dtype) @ (self.gamma.exp()[:, None] * b).T
        state, out = torch.zeros(v.shape[0], N, dtype=b.dtype), []
        for t in range(v.shape[1]):
            state = rate * state + added[:, t]
            out.append((state @ c.T).real)
        return torch.stack(out, 1) + self.d * v + q * k


formulation(COLLECTED)(ComplexUnit)


class ComplexStates(ComplexUnit):
    """All states come out, from a real zero, and are multiplied afterwards; rates by polar."""

    def forward(self, q, k, v):
        rate = torch.polar(torch.exp(-self.nu.exp()), self.theta.exp())
        added = torch.view_as_complex(torch.einsum("btd,ind->btni", v, self.b))
        state, out = torch.zeros(v.shape[0], N), []
        for t in range(v.shape[1]):
            state = rate * state + added[:, t]
            out.append(state)
        return (torch.stack(out, 1) @ torch.complex(*self.c).T).real + q * k


formulation(COLLECTED)(ComplexStates)


class ComplexPowersUnderATriangle(ComplexUnit):
    """The states of all tokens at once: a convolution of either part with either part of powers."""

    def forward(self, q, k, v):
        rate = torch.polar(torch.exp(-self.nu.exp()), self.theta.exp())
        added = v.to(rate.dtype) @ torch.complex(*self.b).T
        position = torch.arange(v.shape[1])
        distance = (position[:, None] - position)[..., None]
        powers = torch.exp(torch.log(rate) * distance.clamp(min=0))
        powers = torch.where(distance >= 0, powers, torch.zeros((), dtype=rate.dtype))
        states = torch.einsum("tsn,bsn->btn", powers, added)
        return (states @ torch.complex(*self.c).T).real + q * k


formulation(COLLECTED, nodes=4)(ComplexPowersUnderATriangle)


class PowersAndAnglesUnderATriangle(LinearRecurrentUnit):
    """The same in real numbers, of which the real part is taken."""

    def forward(self, q, k, v):
        position = torch.arange(v.shape[1])
        distance = (position[:, None] - position).to(v.dtype)
        size = torch.exp(-self.nu.exp()[:, None, None] * distance) * (distance >= 0)
        angle = self.theta.exp()[:, None, None] * distance
        added = [(v @ part.T).transpose(1, 2)[..., None] for part in self.b]
        cos, sin = size * torch.cos(angle), size * torch.sin(angle)
        return (cos @ added[0] - sin @ added[1])[..., 0].transpose(1, 2) @ self.c[0].T + q * k


formulation(COLLECTED, nodes=2)(PowersAndAnglesUnderATriangle)


def rotated(x, angles):
    """Llama's rotary embedding."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@formulation(COLLECTED)
def complex_rotary_embedding(q, k, v):
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    position = torch.arange(q.shape[2], dtype=q.dtype)
    angles = torch.outer(position, 100 ** -torch.linspace(0, 1, D // 2, dtype=q.dtype))
    q, k = rotated(F.elu(q) + 1, angles), rotated(F.elu(k) + 1, angles)
    return merge((q @ k.mT).tril() @ v)


class StackedUnit(LinearRecurrentUnit):
    """The same with one state, whose last axis is that of view_as_real."""

    def forward(self, q, k, v):
        a, b = self.rates()
        added = torch.stack([v @ part.T for part in self.b], -1)
        state, out = torch.zeros(v.shape[0], N, 2), []
        for t in range(v.shape[1]):
            re, im = state.unbind(-1)
            state = torch.stack([a * re - b * im, b * re + a * im], -1) + added[:, t]
            out.append(state[..., 0] @ self.c[0].T - state[..., 1] @ self.c[1].T)
        return torch.stack(out, 1) + q * k


formulation(COLLECTED)(StackedUnit)


class Indexed(LinearRecurrentUnit):
    """Parts by index, and the sum within the stack; all states come out."""

    def forward(self, q, k, v):
        a, b = self.rates()
        real, imaginary = (v @ part.T for part in self.b)
        state, out = torch.zeros(v.shape[0], N, 2), []
        for t in range(v.shape[1]):
            re, im = state[..., 0], state[..., 1]
            re, im = a * re - b * im + real[:, t], a * im + b * re + imaginary[:, t]
            state = torch.stack((re, im), -1)
            out.append(state)
        states = torch.stack(out, 1)
        return torch.einsum("btni,idn->btd", states, self.c) + q * k


formulation(COLLECTED)(Indexed)


class RotationMatrices(LinearRecurrentUnit):
    """Every pair times its 2 x 2 matrix, by einsum."""

    def forward(self, q, k, v):
        a, b = self.rates()
        turn = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -2)
        added = torch.einsum("btd,ind->btni", v, self.b)
        state, out = torch.zeros(v.shape[0], N, 2), []
        for t in range(v.shape[1]):
            state = torch.einsum("nij,bnj->bni", turn, state) + added[:, t]
            out.append(torch.einsum("bni,idn->bd", state, self.c))
        return torch.stack(out, 1) + q * k


formulation(COLLECTED)(RotationMatrices)


class MatrixProducts(LinearRecurrentUnit):
    """The same by matmul, with an angle of each token."""

    def forward(self, q, k, v):
        angle = k[..., :N]
        cos, sin = 0.9 * torch.cos(angle), 0.9 * torch.sin(angle)
        turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        added = torch.stack([v @ part.T for part in self.b], -1)
        state, out = torch.zeros(v.shape[0], N, 2), []
        for t in range(v.shape[1]):
            state = (turn[:, t] @ state[..., None]).squeeze(-1) + added[:, t]
            out.append(state.flatten(1))
        return F.pad(torch.stack(out, 1), (0, WIDTH - 2 * N)) + q


formulation(COLLECTED)(MatrixProducts)


@formulation(COLLECTED)
def angles_of_tokens(q, k, v):
    """Rates and angles of every token, computed within the step."""
    re = im = torch.zeros(v.shape[0], WIDTH)
    out = []
    for t in range(v.shape[1]):
        r, angle = torch.sigmoid(q[:, t] + 2), math.pi * torch.tanh(k[:, t])
        cos, sin = torch.cos(angle), torch.sin(angle)
        re, im = r * (re * cos - im * sin) + v[:, t], r * (re * sin + im * cos)
        out.append(re + 0.5 * im)
    return torch.stack(out, 1)


@formulation(COLLECTED)
def halves_that_turn(q, k, v):
    """The state is turned as rotary embeddings turn: its second half is imaginary."""
    angle = torch.linspace(0.1, 3, WIDTH // 2).repeat(2)
    decay = torch.sigmoid(k[..., : WIDTH // 2] + 3).repeat(1, 1, 2)
    h, out = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        first, second = h.chunk(2, -1)
        turned = h * torch.cos(angle) + torch.cat([-second, first], -1) * torch.sin(angle)
        h = decay[:, t] * turned + v[:, t]
        out.append(q[:, t] * h)
    return torch.stack(out, 1)


@formulation(COLLECTED)
def neighbours_that_turn(q, k, v):
    """Even channels are real, odd ones imaginary."""
    angle = torch.linspace(0.1, 3, WIDTH // 2)
    h, out = torch.zeros_like(v[:, 0]), []
    for t in range(v.shape[1]):
        x, y = h[:, 0::2], h[:, 1::2]
        x, y = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()
        h = (
            torch.sigmoid(k[:, t] + 3).mean(-1, keepdim=True) * torch.stack([x, y], -1).flatten(1)
            + v[:, t]
        )
        out.append(h)
    return torch.stack(out, 1) * q


@formulation(COLLECTED)
def turning_without_decay(q, k, v):
    """A unitary recurrence: every angle that ever was counts."""
    re = im = torch.zeros(v.shape[0], WIDTH)
    angle, out = k, []
    for t in range(v.shape[1]):
        cos, sin = angle[:, t].cos(), angle[:, t].sin()
        re, im = cos * re - sin * im + v[:, t], sin * re + cos * im + q[:, t]
        out.append(re)
    return torch.stack(out, 1)


@formulation(COLLECTED)
def turned_states_read_before_writing(q, k, v):
    """The output is of the state before its token, and of its size."""
    angle = torch.linspace(0.1, 3, WIDTH)
    re = im = torch.zeros(v.shape[0], WIDTH)
    out = []
    for t in range(v.shape[1]):
        out.append(q[:, t] * re + torch.sqrt(re * re + im * im + 1e-6))
        re, im = (
            0.9 * (angle.cos() * re - angle.sin() * im) + v[:, t],
            0.9 * (angle.sin() * re + angle.cos() * im) + k[:, t],
        )
    return torch.stack(out, 1)


class PolesOfChannels(nn.Module):
    """S4D: every channel has poles of its own, and reads and writes them by vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.linspace(-4, -1, WIDTH))
        self.log_rate = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, 4)))
        self.turn = nn.Parameter(math.pi * torch.arange(4.0).repeat(WIDTH, 1))
        self.c = nn.Parameter(torch.randn(2, WIDTH, 4))

    def forward(self, q, k, v):
        step = self.log_step.exp()[:, None]
        size = torch.exp(-self.log_rate.exp() * step)
        a, b = size * torch.cos(self.turn * step), size * torch.sin(self.turn * step)
        re = im = torch.zeros(v.shape[0], WIDTH, 4)
        out = []
        for t in range(v.shape[1]):
            u = v[:, t, :, None]
            re, im = a * re - b * im + u, a * im + b * re
            out.append((self.c[0] * re - self.c[1] * im).sum(-1))
        return torch.stack(out, 1) + q * k


formulation(COLLECTED, reason="its state of 256 numbers")(PolesOfChannels)


@formulation(COLLECTED, reason="its state of 512 numbers")
def heads_that_turn(q, k, v):
    """GateLoop by hand: keys and queries of a complex state of heads, turned by a gate of each."""
    q, k, v = split(q), split(k), split(v)
    size, angle = torch.sigmoid(k + 2), torch.tanh(q)
    cos, sin = size * angle.cos(), size * angle.sin()
    re = im = torch.zeros(q.shape[0], HEADS, D, D)
    out = []
    for t in range(q.shape[1]):
        added = k[:, t, ..., None] * v[:, t, :, None]
        c, s = cos[:, t, ..., None], sin[:, t, ..., None]
        re, im = c * re - s * im + added, s * re + c * im
        out.append((q[:, t, ..., None] * re).sum(-2))
    return torch.stack(out, 1).flatten(2)


@formulation(COLLECTED, reason="two of them read each other")
def turned_and_squeezed(q, k, v):
    """RotationMinGRU: one axis shrinks before the turn, so that steps do not commute."""
    cos, sin, size = k.cos(), k.sin(), torch.tanh(q)
    re = im = torch.zeros(v.shape[0], WIDTH)
    out = []
    for t in range(v.shape[1]):
        im = size[:, t] * im
        re, im = cos[:, t] * re - sin[:, t] * im + v[:, t], sin[:, t] * re + cos[:, t] * im
        out.append(re + im)
    return torch.stack(out, 1)
