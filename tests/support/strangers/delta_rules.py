"""Memories that are corrected: delta rules, fast weights and gradients, as strangers write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("streams")
class DeltaNetLoop(nn.Module):
    """DeltaNet as the naive function of a paper's repository has it."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.b = nn.Linear(dim, heads)

    @staticmethod
    def delta_rule(q, k, v, beta):
        b, h, length, d_k = q.shape
        d_v = v.shape[-1]
        o = torch.zeros_like(v)
        S = torch.zeros(b, h, d_k, d_v).to(v)
        q = q * (d_k**-0.5)
        beta = beta[..., None] if beta.ndim < v.ndim else beta
        for i in range(length):
            _k, _q, _v = k[:, :, i], q[:, :, i], v[:, :, i].clone()
            _v = _v - (S.clone() * _k[..., None]).sum(-2)
            _v = _v * beta[:, :, i]
            S = S.clone() + _k.unsqueeze(-1) * _v.unsqueeze(-2)
            o[:, :, i] = torch.einsum("bhd,bhdm->bhm", _q, S)
        return o

    def forward(self, x):
        q, k, v = (
            rearrange(f(x), "b t (h d) -> b h t d", h=self.h) for f in (self.q, self.k, self.v)
        )
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
        o = self.delta_rule(q, k, v, self.b(x).sigmoid().transpose(1, 2))
        return rearrange(o, "b h t d -> b t (h d)")


@stranger("streams", unit=8)
class DeltaNetChunkWY(nn.Module):
    """DeltaNet by the WY representation: forward substitution in place, then a loop over chunks."""

    def __init__(self, dim=WIDTH, heads=2, C=8):
        super().__init__()
        self.h, self.C = heads, C
        self.qkv, self.b = nn.Linear(dim, 3 * dim), nn.Linear(dim, heads)

    def forward(self, x):
        C = self.C
        q, k, v = (
            t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).split(WIDTH, -1)
        )
        k, q = F.normalize(k, dim=-1), F.normalize(q, dim=-1)
        beta = torch.sigmoid(self.b(x)).transpose(1, 2)
        B, H, L, D = q.shape
        kb, vb = k * beta[..., None], v * beta[..., None]
        q, k, v, kb, vb = (t.reshape(B, H, L // C, C, D) for t in (q, k, v, kb, vb))
        lower = torch.tril(torch.ones(C, C, device=x.device, dtype=torch.bool), -1)
        A = -(kb @ k.mT) * lower
        for i in range(1, C):
            A[..., i, :i] = A[..., i, :i].clone() + (
                A[..., i, :, None].clone() * A[..., :, :i].clone()
            ).sum(-2)
        A = A + torch.eye(C, device=x.device)
        w, u = A @ kb, A @ vb
        S = x.new_zeros(B, H, D, D)
        out = []
        for c in range(L // C):
            ui = u[:, :, c] - w[:, :, c] @ S
            at = (q[:, :, c] @ k[:, :, c].mT).tril()
            out.append(q[:, :, c] @ S + at @ ui)
            S = S + k[:, :, c].mT @ ui
        return torch.cat(out, 2).transpose(1, 2).reshape(B, L, -1)


@stranger("streams")
class GatedDeltaNet(nn.Module):
    """Gated DeltaNet with a short convolution and Mamba-like decays; the state is (d_v, d_k)."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = nn.Conv1d(3 * dim, 3 * dim, 4, groups=3 * dim, padding=3)
        self.a, self.b = nn.Linear(dim, heads, bias=False), nn.Linear(dim, heads, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(heads)), nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        B, T, C = x.shape
        y = F.silu(self.conv(self.qkv(x).transpose(1, 2))[..., :T]).transpose(1, 2)
        q, k, v = (t.view(B, T, self.h, -1) for t in y.chunk(3, -1))
        q = q / (q.norm(dim=-1, keepdim=True) + 1e-6)
        k = k / (k.norm(dim=-1, keepdim=True) + 1e-6)
        alpha = torch.exp(-self.A_log.exp() * F.softplus(self.a(x) + self.dt_bias))
        beta = self.b(x).sigmoid()
        S = torch.zeros(B, self.h, C // self.h, C // self.h, device=x.device, dtype=x.dtype)
        eye = torch.eye(C // self.h, device=x.device)
        outs = []
        for t in range(T):
            kt, vt = k[:, t], v[:, t]
            a, bt = alpha[:, t, :, None, None], beta[:, t, :, None, None]
            S = a * (S @ (eye - bt * kt.unsqueeze(-1) @ kt.unsqueeze(-2))) + bt * vt.unsqueeze(
                -1
            ) @ kt.unsqueeze(-2)
            outs.append((S @ q[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(outs, dim=1).reshape(B, T, C)


@stranger("streams")
class FastWeights(nn.Module):
    """A fast-weight programmer: DPFP features over their sum, tokens first."""

    def __init__(self, d=WIDTH, heads=2, nu=2):
        super().__init__()
        self.h, self.dh, self.nu = heads, d // heads, nu
        self.qkvb = nn.Linear(d, heads * (3 * self.dh + 1), bias=False)
        self.out, self.ln = nn.Linear(d, d), nn.LayerNorm(d)

    def dpfp(self, x):
        x = torch.cat([F.relu(x), F.relu(-x)], dim=-1)
        x = torch.cat([x * x.roll(shifts=j, dims=-1) for j in range(1, self.nu + 1)], dim=-1)
        return x / (x.sum(-1, keepdim=True) + 1e-5)

    def forward(self, x):
        h = x.transpose(0, 1)
        slen, bsz, _ = h.shape
        qkvb = self.qkvb(h).view(slen, bsz, self.h, 3 * self.dh + 1)
        q, k, v, b = torch.split(qkvb, (self.dh,) * 3 + (1,), -1)
        q, k, b = self.dpfp(q), self.dpfp(k), torch.sigmoid(b)
        W = torch.zeros(bsz, self.h, q.shape[-1], self.dh, device=x.device, dtype=x.dtype)
        ys = []
        for t in range(slen):
            v_old = torch.einsum("bhkv,bhk->bhv", W, k[t])
            W = W + torch.einsum("bhk,bhv->bhkv", k[t], b[t] * (v[t] - v_old))
            ys.append(torch.einsum("bhkv,bhk->bhv", W, q[t]))
        y = torch.stack(ys).reshape(slen, bsz, -1)
        return self.ln(h + self.out(y)).transpose(0, 1)


@stranger("streams")
class Rwkv7(nn.Module):
    """RWKV-7 as its reference RNN: state = state*w + state@(-kk)(kk*a)^T + v k^T."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.h, self.n = heads, d // heads
        self.r, self.k, self.v, self.w, self.a = (nn.Linear(d, d) for _ in range(5))
        self.k_k, self.k_a, self.r_k = (
            nn.Parameter(torch.rand(d)),
            nn.Parameter(torch.rand(d)),
            nn.Parameter(torch.randn(heads, self.n)),
        )

    def forward(self, x):
        B, T, C = x.shape
        H, N = self.h, self.n
        r, k, v = self.r(x), self.k(x), self.v(x)
        w = torch.exp(-0.606531 * torch.sigmoid(self.w(x)))
        a = torch.sigmoid(self.a(x))
        kk = F.normalize((k * self.k_k).view(B, T, H, N), dim=-1, p=2.0).view(B, T, C)
        k = k * (1 + (a - 1) * self.k_a)
        out = torch.empty((B, T, C), device=x.device, dtype=x.dtype)
        state = torch.zeros(B, H, N, N, device=x.device, dtype=x.dtype)
        for t in range(T):
            vk = v[:, t].view(B, H, N, 1) @ k[:, t].view(B, H, 1, N)
            ab = (-kk[:, t]).view(B, H, N, 1) @ (kk[:, t] * a[:, t]).view(B, H, 1, N)
            state = state * w[:, t].view(B, H, 1, N) + state @ ab + vk
            out[:, t] = (state @ r[:, t].view(B, H, N, 1)).view(B, C)
        bonus = (r.view(B, T, H, N) * k.view(B, T, H, N) * self.r_k).sum(-1, keepdim=True) * v.view(
            B, T, H, N
        )
        return out + bonus.view(B, T, C)


@stranger("carried")
class TitansMemory(nn.Module):
    """A linear Titans memory: gradient of |Mk - v|^2, momentum and forgetting, token by token."""

    def __init__(self, d=WIDTH):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.eta, self.theta, self.alpha = (nn.Linear(d, 1) for _ in range(3))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.q(x), F.normalize(self.k(x), dim=-1), self.v(x)
        eta, theta, alpha = (torch.sigmoid(g(x)) for g in (self.eta, self.theta, self.alpha))
        M, S = x.new_zeros(b, d, d), x.new_zeros(b, d, d)
        outs = []
        for i in range(t):
            ki, vi = k[:, i], v[:, i]
            err = torch.bmm(M, ki.unsqueeze(-1)).squeeze(-1) - vi
            grad = err.unsqueeze(-1) * ki.unsqueeze(1)
            S = eta[:, i, :, None] * S - theta[:, i, :, None] * grad
            M = (1 - alpha[:, i, :, None]) * M + S
            outs.append(torch.bmm(M, q[:, i].unsqueeze(-1)).squeeze(-1))
        return torch.stack(outs, dim=1)


@stranger("streams")
class TitansForget(nn.Module):
    """The same without momentum: M = (1 - alpha) M - theta grad, the gradient at the old memory."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.h = heads
        self.kvq = nn.Linear(d, 3 * d, bias=False)
        self.gates = nn.Linear(d, 2 * heads)

    def forward(self, x):
        k, v, q = rearrange(self.kvq(x), "b t (n h d) -> n t b h d", n=3, h=self.h)
        k = F.normalize(k, dim=-1)
        alpha, theta = rearrange(torch.sigmoid(self.gates(x)), "b t (n h) -> n t b h 1 1", n=2)
        M = torch.zeros(*k.shape[1:], v.shape[-1], device=x.device).to(x)
        out = []
        for kt, vt, qt, a, th in zip(k, v, q, alpha, theta, strict=False):
            pred = torch.einsum("bhk,bhkv->bhv", kt, M)
            M = (1 - a) * M - th * torch.einsum("bhk,bhv->bhkv", kt, pred - vt)
            out.append(torch.einsum("bhk,bhkv->bhv", qt, M))
        return rearrange(torch.stack(out), "t b h d -> b t (h d)")


@stranger("left", unit=4)
class TttLinear(nn.Module):
    """TTT-linear in dual form: gradients of four tokens at the weights before them."""

    def __init__(self, d=WIDTH, heads=2, size=4):
        super().__init__()
        self.h, self.size = heads, size
        self.qkv, self.lr = nn.Linear(d, 3 * d), nn.Linear(d, heads)
        self.W0 = nn.Parameter(torch.randn(heads, d // heads, d // heads) * 0.02)

    def forward(self, x):
        XQ, XK, XV = rearrange(
            self.qkv(x), "b (n c) (z h d) -> z n b h c d", z=3, h=self.h, c=self.size
        )
        eta = (
            rearrange(torch.sigmoid(self.lr(x)), "b (n c) h -> n b h 1 c", c=self.size) / self.size
        )
        W = self.W0.expand(x.shape[0], -1, -1, -1)
        out = []
        for i in range(XQ.shape[0]):
            grad = XK[i] @ W - (XV[i] - XK[i])
            attn = torch.tril(XQ[i] @ XK[i].transpose(-2, -1))
            out.append(XQ[i] @ W - (eta[i] * attn) @ grad + XQ[i])
            W = W - (eta[i].transpose(-1, -2) * XK[i]).transpose(-1, -2) @ grad
        return rearrange(torch.stack(out), "n b h c d -> b (n c) (h d)")
