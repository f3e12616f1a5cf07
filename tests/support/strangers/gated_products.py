"""Gated states and products of reflections, a second set."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("carried")
class Longhorn(nn.Module):
    """Longhorn: online least squares in closed form for each element, token by token."""

    def __init__(self, dim=WIDTH, state=4):
        super().__init__()
        self.in_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.conv = nn.Conv1d(dim, dim, 3, groups=dim, padding=2)
        self.x_proj = nn.Linear(dim, dim + 2 * state, bias=False)
        self.state, self.out = state, nn.Linear(dim, dim, bias=False)

    def forward(self, u):
        batch, length, dim = u.shape
        x, z = self.in_proj(u).chunk(2, -1)
        x = F.silu(self.conv(x.mT)[..., :length]).mT
        beta, k, q = torch.split(self.x_proj(x), [dim, self.state, self.state], dim=-1)
        beta = torch.sigmoid(beta)
        eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
        S = torch.zeros(batch, dim, self.state, device=u.device)
        ys = []
        for t in range(length):
            keep = 1 - eps[:, t, :, None] * k[:, t, None, :] ** 2
            S = keep * S + (eps[:, t] * x[:, t])[..., None] * k[:, t, None, :]
            ys.append((S * q[:, t, None, :]).sum(-1))
        return self.out(torch.stack(ys, dim=1) * F.silu(z))


@stranger("carried")
class DeltaProduct(nn.Module):
    """DeltaProduct: two reflections and two writes for each token, in an inner loop."""

    def __init__(self, dim=WIDTH, heads=2, householder=2):
        super().__init__()
        self.h, self.n, self.d = heads, householder, dim // heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.ModuleList(nn.Linear(dim, dim) for _ in range(householder))
        self.v = nn.ModuleList(nn.Linear(dim, dim) for _ in range(householder))
        self.b = nn.ModuleList(nn.Linear(dim, heads) for _ in range(householder))

    def forward(self, x):
        B, T, C = x.shape
        shape = (B, T, self.h, self.d)
        q = self.q(x).view(shape)
        ks = [F.normalize(m(x).view(shape), dim=-1) for m in self.k]
        vs = [m(x).view(shape) for m in self.v]
        bs = [2 * m(x).sigmoid() for m in self.b]
        S = x.new_zeros(B, self.h, self.d, self.d)
        o = []
        for t in range(T):
            for k, v, b in zip(ks, vs, bs, strict=True):
                kt, vt, bt = k[:, t], v[:, t], b[:, t, :, None]
                S = S + torch.einsum(
                    "bhk,bhv->bhkv", kt, bt * (vt - torch.einsum("bhk,bhkv->bhv", kt, S))
                )
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return torch.stack(o, dim=1).reshape(B, T, C)


@stranger("streams")
class KimiDelta(nn.Module):
    """Kimi delta attention: a decay for each key channel before the delta rule, by a loop."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.h, self.d = heads, dim // heads
        self.qkv, self.g, self.b = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 2)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.zeros(heads, 1)),
            nn.Parameter(torch.ones(dim)),
        )

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, self.d).unbind(2)
        g = F.softplus(self.g(x) + self.dt_bias).view(B, T, self.h, self.d)
        g = -self.A_log.exp() * g
        beta = self.b(x).sigmoid()
        out = torch.empty_like(v)
        S = torch.zeros(B, self.h, self.d, self.d, dtype=x.dtype)
        for i in range(T):
            q_i = F.normalize(q[:, i], p=2, dim=-1) * self.d**-0.5
            k_i = F.normalize(k[:, i], p=2, dim=-1)
            S = S * g[:, i].exp().unsqueeze(-1)
            err = v[:, i] - (S * k_i.unsqueeze(-1)).sum(-2)
            S = S + (beta[:, i, :, None] * k_i).unsqueeze(-1) * err.unsqueeze(-2)
            out[:, i] = (S * q_i.unsqueeze(-1)).sum(-2)
        return out.reshape(B, T, C)


@stranger("streams")
class GateLoopSurrogate(nn.Module):
    """GateLoop's attention mode: quotients of cumulative products of real gates as scores."""

    def __init__(self, dim=WIDTH):
        super().__init__()
        self.q, self.k, self.v, self.a = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        a = torch.sigmoid(self.a(x)) * 0.2 + 0.8
        c = torch.cumprod(a, dim=1)
        scores = torch.einsum("bid,bjd->bij", q * c, k / c)
        n = x.size(1)
        keep = torch.arange(n)[:, None] >= torch.arange(n)[None]
        return torch.where(keep, scores, torch.zeros(())) @ v


@stranger("streams")
class Qrnn(nn.Module):
    """QRNN with fo-pooling: gates from a causal convolution, pooled by a loop."""

    def __init__(self, dim=WIDTH):
        super().__init__()
        self.conv = nn.Conv1d(dim, 3 * dim, kernel_size=2)

    def forward(self, x):
        z, f, o = self.conv(F.pad(x.transpose(1, 2), (1, 0))).chunk(3, dim=1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c = torch.zeros_like(z[..., 0])
        hs = []
        for zt, ft, ot in zip(z.unbind(-1), f.unbind(-1), o.unbind(-1), strict=True):
            c = ft * c + (1 - ft) * zt
            hs.append(ot * c)
        return torch.stack(hs, dim=1)
