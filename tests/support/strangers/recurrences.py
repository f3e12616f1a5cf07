"""Recurrences, as strangers write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("streams")
class Rwkv5(nn.Module):
    """RWKV-5's time mixing with token shift by ZeroPad2d, bonus u and a group norm."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.h, self.s = heads, d // heads
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.mk, self.mv, self.mr = (nn.Parameter(torch.rand(1, 1, d)) for _ in range(3))
        self.decay, self.faaaa = (
            nn.Parameter(-torch.rand(heads, self.s)),
            nn.Parameter(torch.randn(heads, self.s)),
        )
        self.r, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.ln_x = nn.GroupNorm(heads, d)

    def forward(self, x):
        B, T, C = x.size()
        H, S = self.h, self.s
        xx = self.time_shift(x)
        k = self.k(x * self.mk + xx * (1 - self.mk)).view(B, T, H, S).transpose(1, 2)
        v = self.v(x * self.mv + xx * (1 - self.mv)).view(B, T, H, S).transpose(1, 2)
        r = self.r(x * self.mr + xx * (1 - self.mr)).view(B, T, H, S).transpose(1, 2)
        w = torch.exp(-torch.exp(self.decay)).unsqueeze(-1)
        u = self.faaaa.unsqueeze(-1)
        state = torch.zeros(B, H, S, S, device=x.device, dtype=x.dtype)
        y = torch.empty(B, H, T, S, device=x.device, dtype=x.dtype)
        for t in range(T):
            rt, kt, vt = (
                r[:, :, t : t + 1, :],
                k[:, :, t : t + 1, :].transpose(-2, -1),
                v[:, :, t : t + 1, :],
            )
            at = kt @ vt
            y[:, :, t : t + 1, :] = rt @ (u * at + state)
            state = at + w * state
        y = y.transpose(1, 2).contiguous().view(B * T, C)
        return self.o(self.ln_x(y / 8).view(B, T, C))


@stranger("streams")
class Rwkv6(nn.Module):
    """RWKV-6: data-dependent decay by a small LoRA, the wkv loop in one helper."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.h = heads
        self.r, self.k, self.v, self.g = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.w0, self.w1, self.w2 = (
            nn.Parameter(-torch.ones(d)),
            nn.Parameter(torch.randn(d, 4)),
            nn.Parameter(torch.randn(4, d) / 4),
        )
        self.u = nn.Parameter(torch.randn(heads, d // heads))

    @staticmethod
    def wkv(r, k, v, w, u):
        B, T, H, N = r.shape
        s = torch.zeros(B, H, N, N, dtype=torch.float32, device=r.device)
        ys = []
        for t in range(T):
            kv = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            ys.append(torch.einsum("bhk,bhkv->bhv", r[:, t], s + u[None, :, :, None] * kv))
            s = w[:, t].unsqueeze(-1) * s + kv
        return torch.stack(ys, 1)

    def forward(self, x):
        prev = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        xw = x + (prev - x) * 0.5
        w = torch.exp(-torch.exp(self.w0 + torch.tanh(xw @ self.w1) @ self.w2))
        r, k, v, w = (
            z.reshape(*x.shape[:2], self.h, -1) for z in (self.r(x), self.k(xw), self.v(xw), w)
        )
        return self.wkv(r, k, v, w, self.u).flatten(2) * F.silu(self.g(x))


@stranger("streams")
class MlstmRecurrent(nn.Module):
    """mLSTM step by step with its stabiliser, as tutorials of xLSTM write it."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.h, self.hd = heads, d // heads
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.i, self.f, self.o = nn.Linear(d, heads), nn.Linear(d, heads), nn.Linear(d, d)

    def forward(self, x):
        B, T, _D = x.shape
        q = self.q(x).view(B, T, self.h, self.hd)
        k = self.k(x).view(B, T, self.h, self.hd) / math.sqrt(self.hd)
        v = self.v(x).view(B, T, self.h, self.hd)
        it, ft = self.i(x), F.logsigmoid(self.f(x))
        C = torch.zeros(B, self.h, self.hd, self.hd, device=x.device)
        n = torch.zeros(B, self.h, self.hd, device=x.device)
        m = torch.zeros(B, self.h, device=x.device)
        hs = []
        for t in range(T):
            m_new = torch.max(ft[:, t] + m, it[:, t])
            i = torch.exp(it[:, t] - m_new)
            f = torch.exp(ft[:, t] + m - m_new)
            C = f[..., None, None] * C + i[..., None, None] * (
                v[:, t].unsqueeze(-1) @ k[:, t].unsqueeze(-2)
            )
            n = f[..., None] * n + i[..., None] * k[:, t]
            num = torch.einsum("bhvk,bhk->bhv", C, q[:, t])
            den = torch.maximum(torch.abs((n * q[:, t]).sum(-1)), torch.exp(-m_new)).unsqueeze(-1)
            hs.append((num / den).flatten(1))
            m = m_new
        return torch.sigmoid(self.o(x)) * torch.stack(hs, dim=1)


@stranger("streams")
class MinGruHeinsen(nn.Module):
    """minGRU in log space with h_0 padded in front, parallel_scan_log of the paper's appendix."""

    def __init__(self, d=WIDTH, e=24):
        super().__init__()
        self.z, self.hh, self.out = nn.Linear(d, e), nn.Linear(d, e), nn.Linear(e, d)
        self.e = e

    @staticmethod
    def log_g(x):
        return torch.where(x >= 0, (F.relu(x) + 0.5).log(), -F.softplus(-x))

    def forward(self, x):
        k = self.z(x)
        log_z, log_coeffs = -F.softplus(-k), -F.softplus(k)
        h_0 = torch.zeros(x.shape[0], 1, self.e, device=x.device)
        log_h_0 = self.log_g(h_0)
        log_tilde_h = self.log_g(self.hh(x))
        log_values = torch.cat([log_h_0, log_z + log_tilde_h], dim=1)
        a_star = F.pad(torch.cumsum(log_coeffs, dim=1), (0, 0, 1, 0))
        log_h0_plus_b_star = torch.logcumsumexp(log_values - a_star, dim=1)
        log_h = a_star + log_h0_plus_b_star
        return self.out(torch.exp(log_h)[:, 1:])


@stranger("streams")
class MinLstmHeinsen(nn.Module):
    """minLSTM in log space with normalised gates and a learnt initial state."""

    def __init__(self, d=WIDTH, e=16):
        super().__init__()
        self.f, self.i, self.h = nn.Linear(d, e), nn.Linear(d, e), nn.Linear(d, e)
        self.h0 = nn.Parameter(torch.rand(e) + 0.1)

    def g(self, x):
        return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))

    def forward(self, x):
        diff = F.softplus(-self.f(x)) - F.softplus(-self.i(x))
        log_f, log_i = -F.softplus(diff), -F.softplus(-diff)
        start = self.h0.log().expand(x.size(0), 1, -1)
        log_values = torch.cat((start, log_i + torch.log(self.g(self.h(x)))), 1)
        a_star = torch.cat((torch.zeros_like(start), log_f.cumsum(1)), 1)
        return (a_star + (log_values - a_star).logcumsumexp(1)).exp()[:, 1:]


@stranger("streams")
class RgLru(nn.Module):
    """Griffin's RG-LRU: sqrt(1 - a^2) inputs, a loop over tokens with block-diagonal gates."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.wx, self.wa = (
            nn.Parameter(torch.randn(heads, d // heads, d // heads) / 4) for _ in range(2)
        )
        self.bx, self.ba = (nn.Parameter(torch.zeros(d)) for _ in range(2))
        self.a_param = nn.Parameter(torch.rand(d))
        self.h = heads

    def gate(self, x, w, b):
        return torch.sigmoid(
            rearrange(
                torch.einsum("blhi,hij->blhj", rearrange(x, "b l (h i) -> b l h i", h=self.h), w),
                "b l h j -> b l (h j)",
            )
            + b
        )

    def forward(self, x):
        i, r = self.gate(x, self.wx, self.bx), self.gate(x, self.wa, self.ba)
        log_a = -8.0 * r * F.softplus(self.a_param)
        a = torch.exp(log_a)
        mult = torch.sqrt(-torch.expm1(2 * log_a))
        y = x * i * mult
        h = torch.zeros(x.shape[0], x.shape[-1], device=x.device)
        hs = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + y[:, t]
            hs.append(h)
        return torch.stack(hs, dim=1)


@stranger("streams")
class SimpleTreeScan(nn.Module):
    """A gated recurrence by Hillis-Steele doubling inline in forward."""

    def __init__(self, d=WIDTH):
        super().__init__()
        self.gate, self.value = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        a, b = torch.sigmoid(self.gate(x)), self.value(x)
        T, s = x.shape[1], 1
        while s < T:
            b = b + a * F.pad(b, (0, 0, s, 0))[:, :T]
            a = a * F.pad(a, (0, 0, s, 0), value=1.0)[:, :T]
            s *= 2
        return b
