"""Retention of torchscale and yet-another-retnet, parallel in both -> ``LinearAttention``, gated.

    o_t = sum_{s <= t} gamma^(t-s) (q_t . k_s) v_s                                     per head

torchscale divides row t of the mask by r_t, the square root of its sum, and o_t by the larger of 1
and |sum_s gamma^(t-s) (q_t . k_s)| / r_t: both together are the larger of r_t and that sum.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.heads_first import linear_attention, with_sum
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject


def _positions(
    self: LibraryObject,
    slen: int,
    activate_recurrent: bool = False,
    chunkwise_recurrent: bool = False,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Stands in for ``RetNetRelPos.forward``: decays in the place of their mask."""
    if activate_recurrent or chunkwise_recurrent:
        raise UnsupportedModelError(
            "A RetNet is traced in its recurrent or chunkwise form. Leave incremental_state and "
            "chunkwise_recurrent out: the artifact takes tokens one by one as well."
        )
    index = torch.arange(slen).to(self.decay)
    angle = index[:, None] * self.angle[None]
    return (torch.sin(angle), torch.cos(angle)), self.decay


def _torchscale(self: torch.nn.Module, qr: Tensor, kr: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Stands in for ``MultiScaleRetention.parallel_forward``; ``mask`` are log decays."""
    value = v.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
    decay = mask[:, None].expand(qr.shape[:3])
    numerator, total = with_sum(qr, kr, value, decay)
    one = torch.ones_like(qr[..., :1])
    row = linear_attention(one, one, one, decay).sqrt()
    return (numerator / torch.maximum(total.abs(), row)).transpose(1, 2)


def _parallel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, None]:
    """Stands in for ``retention_parallel`` of yet-another-retnet."""
    if need_weights:
        raise UnsupportedModelError(
            "A retention returns its weights, T by T. Leave need_weights False."
        )
    # Behind its cache, which would keep a tensor of the trace.
    gammas = importlib.import_module("yet_another_retnet.retention")._build_decay_gammas.__wrapped__
    decay = gammas(query.shape[1], query.device, query.dtype).log()
    scale = key.shape[-1] ** 0.5 if scale is None else scale
    return linear_attention(query, key / scale, value, decay[:, None].expand(query.shape[:3])), None


_TORCHSCALE, _RETNET = "torchscale 0.3.0", "yet-another-retnet 0.5.1"

FUNCTIONS = (
    Function("torchscale.architecture.retnet", "RetNetRelPos.forward", _positions, _TORCHSCALE),
    Function(
        "torchscale.component.multiscale_retention",
        "MultiScaleRetention.parallel_forward",
        _torchscale,
        _TORCHSCALE,
    ),
    Function("yet_another_retnet.retention", "retention_parallel", _parallel, _RETNET),
)
