"""Layers that xLSTM, RWKV-4 and others describe, as strangers write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.strangers.registry import WIDTH, stranger


@stranger("streams")
class Rwkv4(nn.Module):
    """RWKV-4 token by token, the maximum of its exponents from -1e38 on."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.r = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.w, self.u = nn.Parameter(-torch.rand(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        k, v, r = self.k(x), self.v(x), torch.sigmoid(self.r(x))
        aa = torch.zeros_like(k[:, 0])
        bb, pp = torch.zeros_like(aa), torch.full_like(aa, -1e38)
        out, w = [], -torch.exp(self.w)
        for t in range(k.size(1)):
            kk, vv = k[:, t], v[:, t]
            ww = self.u + kk
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out.append((e1 * aa + e2 * vv) / (e1 * bb + e2))
            ww = pp + w
            p = torch.maximum(ww, kk)
            e1, e2 = torch.exp(ww - p), torch.exp(kk - p)
            aa, bb, pp = e1 * aa + e2 * vv, e1 * bb + e2, p
        return r * torch.stack(out, 1)


@stranger("carried", linear=False)
class Sru(nn.Module):
    """The simple recurrent unit, whose gates read its state."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.v, self.b = (nn.Parameter(torch.randn(2, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        u, hs = self.w(x), []
        c = torch.zeros(x.size(0), WIDTH, device=x.device, dtype=x.dtype)
        for t, xt in enumerate(x.unbind(dim=1)):
            u0, u1, u2 = torch.split(u[:, t], WIDTH, -1)
            f = torch.sigmoid(u1 + self.v[0] * c + self.b[0])
            r = torch.sigmoid(u2 + self.v[1] * c + self.b[1])
            c = f * c + (1 - f) * u0
            hs.append(r * c + (1 - r) * xt)
        return torch.stack(hs).transpose(0, 1)


@stranger("carried", linear=False)
class LearntStart(nn.Module):
    """A recurrent layer whose first state is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.h0 = nn.GRUCell(WIDTH, WIDTH), nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h, hs = self.h0.expand(x.shape[0], -1), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            hs.append(h)
        return torch.stack(hs, 1)


@stranger("carried")
class RunningExtremes(nn.Module):
    """A running maximum, minimum and product by ``associative_scan``."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        from torch._higher_order_ops.associative_scan import associative_scan

        def scan(operator, y):
            return associative_scan(operator, y, 1, combine_mode="generic")

        y = self.p(x)
        low = scan(lambda a, b: torch.minimum(a, b), y)
        return scan(torch.maximum, y) + low * scan(lambda a, b: a * b, torch.sigmoid(y))


@stranger("streams", unit=4)
class MlstmChunkwise(nn.Module):
    """The stabilised mLSTM, one chunk after another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        size, (b, t, _) = 4, x.shape
        n = t // size
        q, k, v = (
            z.reshape(b, n, size, 2, 8).permute(0, 3, 1, 2, 4) for z in self.qkv(x).chunk(3, -1)
        )
        i, f = (z.reshape(b, n, size, 2).permute(0, 3, 1, 2) for z in self.gates(x).chunk(2, -1))
        q = q * 8**-0.5
        sums = F.logsigmoid(f).cumsum(-1)
        total = sums[..., -1]
        a = total[..., None] - sums + i
        state, norm, m = q.new_zeros(b, 2, 8, 8), q.new_zeros(b, 2, 8), q.new_zeros(b, 2)
        triangle = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        outs = []
        for c in range(n):
            qc, kc, vc, own = q[:, :, c], k[:, :, c], v[:, :, c], sums[:, :, c]
            d = own[..., None] - own[..., None, :] + i[:, :, c, None, :]
            d = d.masked_fill(~triangle, float("-inf"))
            before = own + m[..., None]
            high = torch.maximum(d.max(-1).values, before)
            scores = (qc @ kc.mT) * torch.exp(d - high[..., None])
            inter = torch.exp(before - high)
            above = scores @ vc + inter[..., None] * (qc @ state)
            below = scores.sum(-1) + inter * (qc * norm[..., None, :]).sum(-1)
            outs.append(above / torch.maximum(below.abs(), torch.exp(-high))[..., None])
            last = torch.maximum(total[:, :, c] + m, a[:, :, c].amax(-1))
            keys = kc * torch.exp(a[:, :, c] - last[..., None])[..., None]
            decay = torch.exp(total[:, :, c] + m - last)
            state = decay[..., None, None] * state + keys.mT @ vc
            norm, m = decay[..., None] * norm + keys.sum(-2), last
        return torch.stack(outs, 2).permute(0, 2, 3, 1, 4).reshape(b, t, WIDTH)


@stranger("streams")
class MlstmBesideSoftmax(nn.Module):
    """The stabilised mLSTM in parallel, then softmax attention to earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        i, f = (z.transpose(1, 2) for z in self.gates(x).chunk(2, -1))
        sums = F.logsigmoid(f).cumsum(-1)
        d = sums[..., None] - sums[..., None, :] + i[..., None, :]
        triangle = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        d = d.masked_fill(~triangle, float("-inf"))
        high = d.max(-1, keepdim=True).values
        scores = (q @ k.mT) * 8**-0.5 * torch.exp(d - high)
        below = torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-high))
        y = ((scores / below) @ v).transpose(1, 2).flatten(2)
        q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in self.attend(y).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + attended.transpose(1, 2).flatten(2)
