"""Attention of features and slots, a second set."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("streams")
class Rebased(nn.Module):
    """ReBased: squares of affine, normalised queries and keys, all scores at once."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.heads, self.d = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.norm_q, self.norm_k = nn.LayerNorm(self.d), nn.LayerNorm(self.d)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.norm_q(self.q_proj(x).view(b, t, self.heads, self.d)).transpose(1, 2)
        k = self.norm_k(self.k_proj(x).view(b, t, self.heads, self.d)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.heads, self.d).transpose(1, 2)
        a = torch.matmul(q / math.sqrt(self.d), k.transpose(2, 3)).pow(2)
        a = a * torch.tril(torch.ones(t, t, device=x.device))
        a = a / (a.sum(-1, keepdim=True) + 1e-5)
        return self.out(torch.matmul(a, v).transpose(1, 2).flatten(2))


@stranger("streams")
class PolarCausal(nn.Module):
    """PolaFormer made causal: positive and negative parts raised to a learnt power."""

    def __init__(self, dim=WIDTH, heads=2):
        super().__init__()
        self.heads = heads
        self.qk, self.v = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.power = nn.Parameter(torch.zeros(heads, 1, dim // heads))

    def forward(self, x):
        B, N, C = x.shape
        q, k = self.qk(x).reshape(B, N, 2, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        v = self.v(x).reshape(B, N, self.heads, C // self.heads).transpose(1, 2)
        power = 1 + 2 * torch.sigmoid(self.power)
        q_pos, q_neg = F.relu(q) ** power, F.relu(-q) ** power
        k_pos, k_neg = F.relu(k) ** power, F.relu(-k) ** power
        q_sim, k_ = torch.cat([q_pos, q_neg], -1), torch.cat([k_pos, k_neg], -1)
        context = torch.cumsum(torch.einsum("bhnd,bhne->bhnde", k_, v), dim=2)
        z = 1 / (torch.einsum("bhnd,bhnd->bhn", q_sim, k_.cumsum(2)) + 1e-4)
        out = torch.einsum("bhnd,bhnde,bhn->bhne", q_sim, context, z)
        return out.transpose(1, 2).reshape(B, N, C)


@stranger("streams")
class PerformerPositive(nn.Module):
    """FAVOR+ with a fixed projection, keys stabilised by no maximum, causal by prefix sums."""

    def __init__(self, dim=WIDTH, heads=2, features=12):
        super().__init__()
        self.heads, self.dh = heads, dim // heads
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.register_buffer("proj", torch.randn(features, self.dh))

    def phi(self, data, is_query):
        data = data * self.dh**-0.25
        dash = torch.einsum("...id,jd->...ij", data, self.proj)
        diag = (data**2).sum(-1, keepdim=True) / 2
        if is_query:
            dash = dash - dash.amax(-1, keepdim=True).detach()
        return self.proj.shape[0] ** -0.5 * (torch.exp(dash - diag) + 1e-4)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (
            t.reshape(b, n, self.heads, self.dh).transpose(1, 2)
            for t in self.to_qkv(x).split(self.heads * self.dh, -1)
        )
        q, k = self.phi(q, True), self.phi(k, False)
        norm = 1.0 / torch.einsum("...nd,...nd->...n", q, k.cumsum(-2) + 1e-6)
        kv = torch.einsum("...nd,...ne->...nde", k, v).cumsum(-3)
        out = torch.einsum("...nde,...nd,...n->...ne", kv, q, norm)
        return out.transpose(1, 2).reshape(b, n, -1)


@stranger("streams")
class SlopedDecay(nn.Module):
    """ALiBi's slopes as exponential decays of linear scores, the mask minus infinity before exp."""

    def __init__(self, dim=WIDTH, heads=4):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        slopes = torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])
        self.register_buffer("slopes", slopes.view(heads, 1, 1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for y in self.in_proj(x).tensor_split(3, dim=-1)
        )
        pos = torch.arange(t, device=x.device)
        rel = (pos[None, :] - pos[:, None]).to(x.dtype)
        bias = (rel * self.slopes).masked_fill(rel > 0, float("-inf"))
        w = (q @ k.mT) * bias.exp()
        return (w @ v).transpose(1, 2).reshape(b, t, c)


@stranger("streams", unit=4)
class RetNetChunks(nn.Module):
    """Chunkwise retention: the chunks from ``split``, their outputs in a list, a carried state."""

    def __init__(self, dim=WIDTH, heads=2, chunk=4):
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        gamma = 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float))
        i = torch.arange(chunk)
        d = (gamma[:, None, None] ** (i[:, None] - i[None, :])).tril()
        self.register_buffer("D", d)
        self.register_buffer("inner", gamma[:, None] ** (i + 1.0))
        self.register_buffer("zeta", gamma[:, None] ** (chunk - 1.0 - i))
        self.register_buffer("cross", gamma**chunk)

    def forward(self, x):
        b, n, dim = x.shape
        hd = dim // self.heads
        q, k, v = (
            t.unflatten(-1, (self.heads, hd)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        state = x.new_zeros(b, self.heads, hd, hd)
        outs = []
        for qc, kc, vc in zip(
            q.split(self.chunk, 2), k.split(self.chunk, 2), v.split(self.chunk, 2), strict=True
        ):
            within = ((qc @ kc.transpose(-1, -2)) * self.D) @ vc
            across = (qc @ state) * self.inner[..., None]
            outs.append(within + across)
            state = state * self.cross[:, None, None] + kc.transpose(-1, -2) @ (
                vc * self.zeta[..., None]
            )
        return torch.cat(outs, 2).transpose(1, 2).reshape(b, n, dim)


@stranger("streams")
class GatedSlots(nn.Module):
    """Gated slot attention, token by token: keys and values in slots, a softmax over the slots."""

    def __init__(self, dim=WIDTH, heads=2, slots=4):
        super().__init__()
        self.heads, self.slots = heads, slots
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.f = nn.Linear(dim, heads * slots)

    def forward(self, x):
        b, n, dim = x.shape
        q, k, v = (m(x).view(b, n, self.heads, -1) for m in (self.q, self.k, self.v))
        f = torch.sigmoid(self.f(x)).view(b, n, self.heads, self.slots) ** 0.25
        s = 1 - f
        K = x.new_zeros(b, self.heads, self.slots, q.shape[-1])
        V = x.new_zeros(b, self.heads, self.slots, q.shape[-1])
        out = []
        for t in range(n):
            ft, st = f[:, t, :, :, None], s[:, t, :, :, None]
            K = ft * K + st * k[:, t, :, None]
            V = ft * V + st * v[:, t, :, None]
            p = torch.softmax(torch.einsum("bhd,bhmd->bhm", q[:, t], K), -1)
            out.append(torch.einsum("bhm,bhmd->bhd", p, V))
        return torch.stack(out, 1).reshape(b, n, dim)
