"""Layers of gateloop-transformer, which scan by trees or complex logarithms -> ``LinearAttention``.

    S_t = a_t S_{t-1} + k_t v_t^T,   o_t = q_t Re(S_t)

The loop of attention has a complex a_t = r_t exp(i p_t) for each head. Of the angles only sums and
differences are left, with P_t = p_1 + ... + p_t:

    Re(exp(i (P_t - P_s))) = cos P_t cos P_s + sin P_t sin P_s
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.patches.heads_first import linear_attention
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject


def _simple(
    self: LibraryObject, x: Tensor, cache: LibraryObject = None, return_cache: bool = False
) -> Tensor:
    """Stands in for ``SimpleGateLoopLayer.forward``, whose state is one number a channel."""
    if cache is not None or return_cache:
        raise UnsupportedModelError(
            "A gate loop is given its cache, or returns it. Leave both out: the artifact has "
            "states of its own."
        )
    x = self.norm(x.flip(1) if self.reverse else x)
    query, value, gate = (y.transpose(1, 2)[..., None] for y in self.to_qkva[0](x).chunk(3, -1))
    one = torch.ones_like(query)
    state = linear_attention(one, one, value, F.logsigmoid(gate[..., 0]))
    out = self.maybe_post_ln((query * state)[..., 0].transpose(1, 2))
    return out.flip(1) if self.reverse else out


def _attention(
    self: LibraryObject,
    x: Tensor,
    ablate_complex: bool = False,
    ablate_state_transition: bool = False,
) -> Tensor:
    """Stands in for ``GateLoopedAttention.forward``."""
    parts = self.to_qkv(x).chunk(3, -1)
    query, key, value = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in parts)
    real, imaginary = self.to_a[0](x).unflatten(2, (self.heads, 2)).transpose(1, 2).unbind(-1)
    if ablate_complex:
        imaginary = torch.zeros_like(imaginary)
    if ablate_state_transition:
        out = linear_attention(query, key, value)
    else:
        turned = torch.atan2(imaginary, real).cumsum(2)[..., None]
        query, key = (torch.cat([y * turned.cos(), y * turned.sin()], -1) for y in (query, key))
        size = (real.square() + imaginary.square()).sqrt()
        out = linear_attention(query, key, value, F.logsigmoid(size))
    out = self.maybe_sub_ln(out.transpose(1, 2).flatten(2))
    return self.to_out(out if self.to_gates is None else self.to_gates(x) * out)


_PACKAGE, _TRIED = "gateloop_transformer", "gateloop-transformer 0.2.5"

FUNCTIONS = (
    Function(f"{_PACKAGE}.simplified_gate_loop", "SimpleGateLoopLayer.forward", _simple, _TRIED),
    Function(f"{_PACKAGE}.{_PACKAGE}", "GateLoopedAttention.forward", _attention, _TRIED),
)
