"""Attention of features, with decays and without, as strangers write it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("streams")
class GlaRecurrent(nn.Module):
    """GLA by a loop over tokens, low-rank log gates, group norm and swish output gate."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.h, self.dk = heads, dim // heads
        self.wq, self.wk, self.wv, self.wg = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gk = nn.Sequential(nn.Linear(dim, 4, bias=False), nn.Linear(4, dim))
        self.norm = nn.LayerNorm(self.dk, elementwise_affine=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (
            rearrange(f(x), "b l (h d) -> b h l d", h=self.h) for f in (self.wq, self.wk, self.wv)
        )
        gk = rearrange(F.logsigmoid(self.gk(x)) / 16.0, "b l (h d) -> b h l d", h=self.h)
        B, H, L, D = q.shape
        o = torch.zeros_like(v)
        S = k.new_zeros(B, H, D, D)
        scale = D**-0.5
        for i in range(L):
            q_i, k_i, v_i, g_i = q[:, :, i] * scale, k[:, :, i], v[:, :, i], gk[:, :, i].exp()
            kv_i = k_i[..., None] * v_i[..., None, :]
            S = S * g_i[..., None] + kv_i
            o[:, :, i] = (q_i[..., None] * S).sum(-2)
        o = rearrange(self.norm(o), "b h l d -> b l (h d)")
        return self.wo(o * F.silu(self.wg(x)))


@stranger("streams", unit=4)
class GlaChunked(nn.Module):
    """GLA by chunks: decays by quotients within them, a loop over them for the states."""

    def __init__(self, dim=WIDTH, heads=2, chunk=4):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        g = F.logsigmoid(self.gate(x)) / 16
        q, k, v, g = (
            rearrange(t, "b (n c) (h d) -> b h n c d", c=self.chunk, h=self.heads)
            for t in (q, k, v, g)
        )
        b = g.cumsum(dim=-2)
        b_last = b[..., -1:, :]
        q_ = q * b.exp() * q.shape[-1] ** -0.5
        k_ = k * (-b).exp()
        k_end = k * (b_last - b).exp()
        mask = torch.triu(
            torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=x.device), diagonal=1
        )
        attn = (q_ @ k_.transpose(-1, -2)).masked_fill(mask, 0)
        intra = attn @ v
        S = torch.zeros(
            q.shape[0], q.shape[1], q.shape[-1], v.shape[-1], dtype=x.dtype, device=x.device
        )
        inter = []
        for n in range(q.shape[2]):
            inter.append(q_[:, :, n] @ S)
            S = (
                b_last[:, :, n].exp().transpose(-1, -2) * S
                + k_end[:, :, n].transpose(-1, -2) @ v[:, :, n]
            )
        o = intra + torch.stack(inter, dim=2)
        return rearrange(o, "b h n c d -> b (n c) (h d)")


@stranger("streams")
class RetNetParallel(nn.Module):
    """Retention as a tutorial has it: head by head, its mask by powers of differences."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.W_Q, self.W_K, self.W_V = (
            nn.Parameter(torch.randn(heads, dim, self.hd) / dim) for _ in range(3)
        )
        self.gammas = (
            1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), heads))
        ).tolist()
        self.gn = nn.GroupNorm(heads, dim)
        self.W_G = nn.Parameter(torch.randn(dim, dim) / dim)
        self.W_O = nn.Parameter(torch.randn(dim, dim) / dim)

    def mask_of(self, n, gamma, device):
        i = torch.arange(n, device=device).unsqueeze(1)
        j = torch.arange(n, device=device).unsqueeze(0)
        D = (gamma ** (i - j)) * (i >= j).float()
        D[D != D] = 0
        return D

    def forward(self, X):
        ys = []
        for h in range(self.heads):
            Q, K, V = X @ self.W_Q[h], X @ self.W_K[h], X @ self.W_V[h]
            D = self.mask_of(X.shape[1], self.gammas[h], X.device)
            ret = (Q @ K.permute(0, 2, 1)) * D.unsqueeze(0)
            ys.append(ret @ V)
        Y = torch.cat(ys, dim=2)
        Y = self.gn(Y.reshape(-1, Y.shape[-1])).reshape(Y.shape)
        return (X @ self.W_G * torch.sigmoid(X @ self.W_G) * Y) @ self.W_O


@stranger("streams")
class RetNetRecurrent(nn.Module):
    """Retention token by token: a method that takes and returns a state, called in a loop."""

    def __init__(self, dim=WIDTH, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.register_buffer("decay", 1 - 2 ** (-5 - torch.arange(heads).float()))

    def step(self, x, state):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        state = self.decay.view(1, -1, 1, 1) * state + torch.einsum("bhi,bhj->bhij", k, v)
        return torch.einsum("bhi,bhij->bhj", q, state).flatten(1), state

    def forward(self, x):
        d = x.shape[-1] // self.heads
        state = torch.zeros(x.shape[0], self.heads, d, d, device=x.device, dtype=x.dtype)
        ys = []
        for n in range(x.shape[1]):
            y, state = self.step(x[:, n], state)
            ys.append(y.unsqueeze(1))
        return torch.cat(ys, 1)


@stranger("streams")
class CosFormer(nn.Module):
    """cosFormer, causal: relu times cos and sin of positions, by cumsum of einsums."""

    def __init__(self, dim=WIDTH, heads=2, m=512):
        super().__init__()
        self.heads, self.m = heads, m
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, n, _ = x.shape
        q, k = F.relu(self.q(x)), F.relu(self.k(x))
        v = self.v(x)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        idx = (
            math.pi
            / 2
            * torch.arange(1, n + 1, device=x.device, dtype=x.dtype).view(1, 1, -1, 1)
            / self.m
        )
        q_ = torch.cat([q * torch.sin(idx), q * torch.cos(idx)], dim=-1)
        k_ = torch.cat([k * torch.sin(idx), k * torch.cos(idx)], dim=-1)
        kv = torch.cumsum(torch.einsum("bhld,bhlm->bhldm", k_, v), dim=2)
        z = 1 / torch.clamp_min(torch.einsum("bhld,bhld->bhl", q_, torch.cumsum(k_, dim=2)), 1e-6)
        out = torch.einsum("bhld,bhldm,bhl->bhlm", q_, kv, z)
        return self.o(out.transpose(1, 2).reshape(b, n, -1))


@stranger("streams")
class SoftmaxFeatures(nn.Module):
    """Efficient attention, causal: softmax of q, exp of k, a masked product and row sums."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = rearrange(
            self.to_qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads
        ).unbind(0)
        q = q.softmax(dim=-1) * q.shape[-1] ** -0.5
        k = k.exp()
        sim = einsum(q, k, "b h i d, b h j d -> b h i j")
        causal = torch.ones(n, n, device=x.device, dtype=torch.bool).triu(1)
        sim = sim.masked_fill(causal, 0.0)
        attn = sim / sim.sum(dim=-1, keepdim=True).clamp(min=1e-10)
        out = einsum(attn, v, "b h i j, b h j d -> b h i d")
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


@stranger("streams")
class Hgrn2(nn.Module):
    """HGRN2: forget gates with a lower bound, keys 1 - f, masked differences of log sums."""

    def __init__(self, d=WIDTH, heads=2):
        super().__init__()
        self.h = heads
        self.q, self.f, self.i = (nn.Linear(d, d) for _ in range(3))
        self.lb = 0.3

    def forward(self, x):
        T = x.shape[1]
        f = self.lb + (1 - self.lb) * torch.sigmoid(self.f(x))
        q, k, v, g = (
            z.view(*x.shape[:2], self.h, -1) for z in (F.silu(self.q(x)), 1 - f, self.i(x), f.log())
        )
        G = g.cumsum(1)
        W = G[:, :, None] - G[:, None]
        causal = torch.tril(torch.ones(T, T, device=x.device)).bool()
        W = torch.exp(W.masked_fill(~causal[None, :, :, None, None], float("-inf")))
        A = torch.einsum("bthd,btshd,bshd->bhts", q, W, k)
        return torch.einsum("bhts,bshe->bthe", A, v).flatten(-2)


@stranger("streams")
class Based(nn.Module):
    """Based: Taylor features by outer products and concatenation, cumulative sums."""

    def __init__(self, d=WIDTH, heads=2, f=4):
        super().__init__()
        self.h, self.f = heads, f
        self.q, self.k, self.v, self.o = (
            nn.Linear(d, heads * f, bias=False),
            nn.Linear(d, heads * f, bias=False),
            nn.Linear(d, d, bias=False),
            nn.Linear(d, d, bias=False),
        )

    def feature_map(self, x):
        x2 = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(start_dim=-2) / math.sqrt(2)
        return torch.cat(
            [torch.ones_like(x[..., :1]), x / self.f**0.25, x2 / math.sqrt(self.f)], dim=-1
        )

    def forward(self, x):
        b, t, _ = x.size()
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.view(b, t, self.h, self.f).transpose(1, 2)
        k = k.view(b, t, self.h, self.f).transpose(1, 2)
        v = v.view(b, t, self.h, -1).transpose(1, 2)
        q, k = self.feature_map(q), self.feature_map(k)
        q, k, v = q.unsqueeze(-2), k.unsqueeze(-2), v.unsqueeze(-1)
        num = (q * (k * v).cumsum(dim=2)).sum(dim=-1)
        y = num / ((q * k.cumsum(dim=2)).sum(dim=-1) + 1e-12)
        return self.o(rearrange(y, "b h l d -> b l (h d)"))


@stranger("streams")
class AftSimple(nn.Module):
    """AFT-simple, causal: sigmoid(q) times a running weighted mean."""

    def __init__(self, d=WIDTH):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d) for _ in range(3))
        self.project = nn.Linear(d, d)

    def forward(self, x):
        Q, K, V = self.to_q(x), self.to_k(x), self.to_v(x)
        w = torch.exp(K)
        num, den = torch.cumsum(w * V, dim=1), torch.cumsum(w, dim=1)
        return self.project(torch.sigmoid(Q) * num / den)


@stranger("streams")
class Lightning(nn.Module):
    """Lightning attention: slopes like ALiBi's, exp of a triangle of -inf."""

    def __init__(self, d=WIDTH, heads=4):
        super().__init__()
        self.h = heads
        self.qkv, self.gate = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.register_buffer(
            "slopes",
            torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)]).view(heads, 1, 1),
        )

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = F.silu(self.qkv(x)).view(b, n, self.h, -1).transpose(1, 2).chunk(3, -1)
        index = torch.arange(n, device=x.device)
        dist = (index[:, None] - index[None]).float()
        bias = torch.where(dist >= 0, -self.slopes * dist, float("-inf"))
        out = ((q @ k.transpose(-1, -2)) * bias.exp()) @ v
        return F.rms_norm(out, (out.shape[-1],), eps=1e-6).transpose(1, 2).reshape(
            b, n, d
        ) * torch.sigmoid(self.gate(x))
