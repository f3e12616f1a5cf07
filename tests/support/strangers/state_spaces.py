"""State spaces and moving averages, as strangers write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("streams")
class MambaMinimal(nn.Module):
    """Mamba as the one-file implementation writes it: a sequential selective scan."""

    def __init__(self, d=WIDTH, n=4, r=2):
        super().__init__()
        e = 2 * d
        self.n, self.r, self.e = n, r, e
        self.in_proj = nn.Linear(d, 2 * e, bias=False)
        self.conv1d = nn.Conv1d(e, e, 4, groups=e, padding=3)
        self.x_proj = nn.Linear(e, r + 2 * n, bias=False)
        self.dt_proj = nn.Linear(r, e)
        self.A_log = nn.Parameter(torch.log(repeat(torch.arange(1.0, n + 1), "n -> d n", d=e)))
        self.D = nn.Parameter(torch.ones(e))
        self.out_proj = nn.Linear(e, d, bias=False)

    def forward(self, x):
        (b, length, _) = x.shape
        (x, res) = self.in_proj(x).split([self.e, self.e], dim=-1)
        x = rearrange(x, "b l d -> b d l")
        x = self.conv1d(x)[:, :, :length]
        x = F.silu(rearrange(x, "b d l -> b l d"))
        A = -torch.exp(self.A_log.float())
        delta, B, C = self.x_proj(x).split([self.r, self.n, self.n], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        deltaA = torch.exp(einsum(delta, A, "b l d, d n -> b l d n"))
        deltaB_u = einsum(delta, B, x, "b l d, b l n, b l d -> b l d n")
        s = torch.zeros((b, self.e, self.n), device=deltaA.device)
        ys = []
        for i in range(length):
            s = deltaA[:, i] * s + deltaB_u[:, i]
            ys.append(einsum(s, C[:, i, :], "b d n, b n -> b d"))
        y = torch.stack(ys, dim=1) + x * self.D
        return self.out_proj(y * F.silu(res))


@stranger("fused", linear=False)
class MambaCumsum(nn.Module):
    """Mamba's scan by cumulative sums from the end, with an epsilon that later tokens reach."""

    def __init__(self, d=WIDTH, n=4):
        super().__init__()
        self.n = n
        self.bc, self.dt = nn.Linear(d, 2 * n), nn.Linear(d, d)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))

    def forward(self, u):
        A = -self.A_log.exp()
        B, C = self.bc(u).chunk(2, -1)
        delta = F.softplus(self.dt(u))
        dA = torch.einsum("bld,dn->bldn", delta, A)
        dB_u = torch.einsum("bld,bld,bln->bldn", delta, u, B)
        dA_cumsum = F.pad(dA[:, 1:], (0, 0, 0, 0, 0, 1)).flip(1).cumsum(1).exp().flip(1)
        x = dB_u * dA_cumsum
        x = x.cumsum(1) / (dA_cumsum + 1e-12)
        return torch.einsum("bldn,bln->bld", x, C)


@stranger("streams", unit=4)
class Mamba2Ssd(nn.Module):
    """Mamba-2's SSD with segment sums, its states passed by a loop over chunks."""

    def __init__(self, d=WIDTH, heads=4, n=8, chunk=4):
        super().__init__()
        self.h, self.n, self.c = heads, n, chunk
        self.proj = nn.Linear(d, d + 2 * n + heads)
        self.A_log = nn.Parameter(torch.rand(heads))

    @staticmethod
    def segsum(x):
        T = x.size(-1)
        c = torch.cumsum(x, dim=-1)
        s = c[..., :, None] - c[..., None, :]
        return s.masked_fill(
            ~torch.tril(torch.ones(T, T, device=x.device, dtype=torch.bool)), -torch.inf
        )

    def forward(self, u):
        x, B, C, dt = self.proj(u).split([u.shape[-1], self.n, self.n, self.h], -1)
        dt = F.softplus(dt)
        x = rearrange(x, "b (c l) (h p) -> b c l h p", l=self.c, h=self.h)
        B, C, dt = (rearrange(z, "b (c l) n -> b c l n", l=self.c) for z in (B, C, dt))
        X = x * dt[..., None]
        A = rearrange(-torch.exp(self.A_log) * dt, "b c l h -> b h c l")
        Acs = A.cumsum(-1)
        Y = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", C, B, torch.exp(self.segsum(A)), X)
        decay = torch.exp(Acs[..., -1:] - Acs)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", B, decay, X)
        h = torch.zeros_like(states[:, 0])
        prev = []
        for i in range(states.shape[1]):
            prev.append(h)
            h = h * Acs[:, :, i, -1].exp()[..., None, None] + states[:, i]
        Y = Y + torch.einsum("bcln,bchpn,bhcl->bclhp", C, torch.stack(prev, 1), Acs.exp())
        return rearrange(Y, "b c l h p -> b (c l) (h p)")


@stranger("streams")
class S4dKernel(nn.Module):
    """S4D in real pairs, by its Vandermonde kernel under a Toeplitz matrix."""

    def __init__(self, d=WIDTH, n=4):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(d) * 2 - 4)
        self.C = nn.Parameter(torch.randn(d, n, 2))
        self.re, self.im = (
            nn.Parameter(torch.log(0.5 * torch.ones(d, n))),
            nn.Parameter(math.pi * torch.arange(n).repeat(d, 1).float()),
        )
        self.D = nn.Parameter(torch.randn(d))

    def forward(self, u):
        L = u.shape[1]
        dt = self.log_dt.exp()[:, None]
        a, w = -self.re.exp() * dt, self.im * dt
        t = torch.arange(L, device=u.device, dtype=u.dtype)
        mag = torch.exp(a[..., None] * t)
        K = 2 * (
            self.C[..., 0, None] * mag * torch.cos(w[..., None] * t)
            - self.C[..., 1, None] * mag * torch.sin(w[..., None] * t)
        ).sum(1)
        lag = t[:, None] - t[None, :]
        M = torch.where(lag >= 0, K[:, lag.clamp(min=0).long()], torch.zeros((), dtype=u.dtype))
        y = torch.einsum("dts,bsd->btd", M, u)
        return F.gelu(y + u * self.D)


@stranger("streams")
class LruRealPairs(nn.Module):
    """LRU with its complex state as two real ones, one loop over tokens."""

    def __init__(self, d=WIDTH, n=8):
        super().__init__()
        self.nu, self.theta = (
            nn.Parameter(torch.log(-torch.log(torch.rand(n) * 0.1 + 0.9))),
            nn.Parameter(torch.rand(n)),
        )
        self.Br, self.Bi = (nn.Parameter(torch.randn(n, d) / d**0.5) for _ in range(2))
        self.Cr, self.Ci = (nn.Parameter(torch.randn(d, n) / n**0.5) for _ in range(2))
        self.D = nn.Parameter(torch.randn(d))

    def forward(self, x):
        r = torch.exp(-torch.exp(self.nu))
        lr, li = r * torch.cos(self.theta), r * torch.sin(self.theta)
        gamma = torch.sqrt(1 - r * r)
        ur, ui = (x @ self.Br.T) * gamma, (x @ self.Bi.T) * gamma
        hr = hi = torch.zeros(x.shape[0], r.numel(), device=x.device)
        out = []
        for t in range(x.shape[1]):
            hr, hi = lr * hr - li * hi + ur[:, t], lr * hi + li * hr + ui[:, t]
            out.append(hr @ self.Cr.T - hi @ self.Ci.T)
        return torch.stack(out, 1) + self.D * x


@stranger("streams")
class MegaEma(nn.Module):
    """MEGA's damped EMA, its kernel of T powers applied by FFT."""

    def __init__(self, d=WIDTH, n=4):
        super().__init__()
        self.delta, self.alpha = (
            nn.Parameter(torch.randn(d, n, 1) * 0.2),
            nn.Parameter(torch.randn(d, n, 1) * 0.2),
        )
        self.beta, self.gamma = nn.Parameter(torch.randn(d, n, 1)), nn.Parameter(torch.randn(d, n))
        self.omega = nn.Parameter(torch.randn(d))

    def forward(self, x):
        T = x.shape[1]
        p, a = torch.sigmoid(self.delta), torch.sigmoid(self.alpha)
        q = 1 - p * a
        vander = torch.arange(T, device=x.device).to(x).view(1, 1, T) * torch.log(q)
        kernel = torch.einsum("dnl,dn->dl", p * self.beta * torch.exp(vander), self.gamma * 0.5)
        u = x.transpose(1, 2)
        k_f, u_f = torch.fft.rfft(kernel, n=2 * T), torch.fft.rfft(u, n=2 * T)
        y = torch.fft.irfft(u_f * k_f, n=2 * T)[..., :T]
        return F.silu(y.transpose(1, 2) + x * self.omega)


def _joined(first, second):
    return second[0] * first[0], second[0] * first[1] + second[1]


def _scanned(elements):
    """Return all prefixes of an associative operator, as S5's port of JAX's scan has it."""
    count = elements[0].shape[0]
    if count < 2:
        return elements
    pairs = _joined([e[:-1:2] for e in elements], [e[1::2] for e in elements])
    odd = _scanned(pairs)
    before = [e[:-1] for e in odd] if count % 2 == 0 else odd
    even = _joined(before, [e[2::2] for e in elements])
    found = []
    for element, evens, odds in zip(elements, even, odd, strict=True):
        whole = element.new_zeros(element.shape)
        whole[::2], whole[1::2] = torch.cat([element[:1], evens]), odds
        found.append(whole)
    return found


@stranger("streams")
class S5Vmapped(nn.Module):
    """S5: one sequence at a time below vmap, its complex states by a recursive scan."""

    def __init__(self, d=WIDTH, n=6):
        super().__init__()
        rate = torch.complex(torch.full((n,), -0.5), math.pi * torch.arange(n))
        self.rate = nn.Parameter(torch.view_as_real(rate))
        self.B = nn.Parameter(torch.randn(n, d, 2) / d**0.5)
        self.C = nn.Parameter(torch.randn(d, n, 2) / n**0.5)
        self.D, self.log_step = nn.Parameter(torch.rand(d)), nn.Parameter(-1 - 2 * torch.rand(n))

    def row(self, u, decay, B, C):
        """(T, D) -> (T, D)."""
        added = torch.vmap(lambda x: B @ x.to(B.dtype))(u)
        _, states = _scanned([decay.tile(u.shape[0], 1), added])
        return torch.vmap(lambda s: (C @ s).real)(states) + torch.vmap(lambda x: self.D * x)(u)

    def forward(self, x):
        rate, B, C = map(torch.view_as_complex, (self.rate, self.B, self.C))
        decay = torch.exp(rate * self.log_step.exp())
        B = ((decay - 1) / rate)[:, None] * B
        return torch.vmap(lambda u: self.row(u, decay, B, C))(x)
