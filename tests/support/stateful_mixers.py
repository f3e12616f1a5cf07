"""Mixers of heads that return the state behind the last token, from zeros or from a given one.

Queries, keys and values are (B, H, T, D), logarithms of decays (B, H, T), states (B, H, D, D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.chunk_listing import CHUNK, HEADS, D, chunk_products

State = Tensor | None
Outputs = tuple[Tensor, Tensor]
Mixer = Callable[..., Outputs]


def _begun(state: State, k: Tensor, v: Tensor) -> Tensor:
    if state is not None:
        return state
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])


def gated_loop(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """Token by token; (B, H, T, D), logarithms of decays (B, H, T)."""
    state, out = _begun(state, k, v), list[Tensor]()
    for t in range(q.shape[2]):
        state = state * steps[:, :, t, None, None].exp() + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, 2), state


def signed_loop(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """Rates of both signs."""
    state, out = _begun(state, k, v), list[Tensor]()
    for t in range(q.shape[2]):
        rate = (1 + 2 * steps[:, :, t, None, None]).tanh()
        state = state * rate + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, 2), state


def delta_loop(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """The delta rule, whose state is transposed outside."""
    beta, k = steps.exp(), F.normalize(k, dim=-1)
    state, out = _begun(None if state is None else state.mT, k, v), list[Tensor]()
    for t in range(q.shape[2]):
        new = v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0]
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * new)[:, :, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, 2), state.mT


def transition_loop(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """RWKV-7's correction of a state by another vector than its key."""
    a, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    state, out = _begun(state, k, v), list[Tensor]()
    for t in range(q.shape[2]):
        read = a[:, :, t, None] @ state
        state = state * steps[:, :, t, None, None].exp() - 0.3 * a[:, :, t, :, None] * read
        state = state + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, 2), state


def listing(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """Mamba-2's listing of whole chunks, whose last state is that behind the last chunk."""
    shape = (q.shape[0], q.shape[2] // CHUNK, CHUNK, HEADS, D)
    q, k, v = (x.transpose(1, 2).reshape(shape) for x in (q, k, v))
    steps = steps.mT.reshape(shape[:-1]).permute(0, 3, 1, 2)
    first = None if state is None else state.mT[:, None]
    out, final = chunk_products(q, k, v, steps, first)
    return out.flatten(1, 2).transpose(1, 2), final


def padded_listing(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """The same at any length: tokens of zeros neither write nor fade the state."""
    tokens = q.shape[2]
    behind = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, behind)) for x in (q, k, v))
    out, final = listing(q, k, v, F.pad(steps, (0, behind)), state)
    return out[:, :, :tokens], final


def padded_chunks(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """Gated linear attention by a loop over chunks that are padded and cut again."""
    tokens = q.shape[2]
    behind = (CHUNK - tokens % CHUNK) % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, behind)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    since = F.pad(steps, (0, behind)).unflatten(2, (-1, CHUNK)).cumsum(-1)[..., None]
    state, out = _begun(state, k[:, :, 0], v[:, :, 0]), list[Tensor]()
    for n in range(q.shape[2]):
        read, kept = q[:, :, n] * since[:, :, n].exp(), k[:, :, n] * (-since[:, :, n]).exp()
        out.append((read @ kept.mT).tril() @ v[:, :, n] + read @ state)
        last = since[:, :, n, -1:]
        faded = k[:, :, n] * (last - since[:, :, n]).exp()
        state = state * last.exp() + faded.mT @ v[:, :, n]
    return torch.stack(out, 2).flatten(2, 3)[:, :, :tokens], state


def read_before(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """RWKV-6's order: a token reads the state before it is written, and its own value anew."""
    bonus, out = q.new_full((D, 1), 0.7), list[Tensor]()
    state = _begun(state, k, v)
    for t in range(q.shape[2]):
        new = k[:, :, t, :, None] * v[:, :, t, None]
        out.append((q[:, :, t, None] @ (state + bonus * new))[:, :, 0])
        state = state * steps[:, :, t, None, None].exp() + new
    return torch.stack(out, 2), state


def retention(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """Whole sequences at once, each head with a decay of its own."""
    rates = -torch.arange(1, HEADS + 1, dtype=q.dtype)[:, None] / 8
    place = torch.arange(q.shape[2])
    fades = torch.exp(rates[..., None] * (place[:, None] - place).clamp(min=0)).tril()
    out = ((q @ k.mT) * fades) @ v
    written = (k * torch.exp(rates * (q.shape[2] - 1 - place))[..., None]).mT @ v
    if state is None:
        return out, written
    out = out + torch.exp(rates * (place + 1))[..., None] * (q @ state)
    return out, written + torch.exp(rates * q.shape[2])[..., None] * state


def prefix_sums(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, state: State = None) -> Outputs:
    """Products of all tokens, added up."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    sums = (k[..., :, None] * v[..., None, :]).cumsum(2)
    sums = sums if state is None else sums + state[:, :, None]
    return (q[..., None, :] @ sums)[..., 0, :], sums[:, :, -1]
