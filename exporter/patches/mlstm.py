"""The mLSTM of xLSTM in transformers -> ``StabilizedExp`` and ``LinearAttention``, gated.

    C_t = f_t C_{t-1} + exp(i_t) k_t v_t^T,   n_t = f_t n_{t-1} + exp(i_t) k_t,   f = sigmoid
    h_t = C_t^T q_t / max(|n_t . q_t|, 1)                                           per head

(Beck et al. 2024, arXiv:2405.04517, equations 19 to 27), with q divided by sqrt(d_k). C and n are
kept times exp(-m_t), m_t the running maximum of the exponents. Exponents have two features, that
maximum and 0, so that those of the query, exp(m_t - M) and exp(-M) with M = max(m_t, 0), are what
numerator and 1 are multiplied by. The library adds eps to the denominator that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches import Patch, Swap
from linexport.patches.library import find
from linexport.patches.state_cache import active
from linexport.system.untyped import LibraryObject


def backend(
    self: LibraryObject,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> tuple[Tensor, None]:
    """Stands in for ``xLSTMBackend.forward``; query, key and value are (B, H, T, d)."""
    return cell(query, key, value, igate, fgate, self.config.eps), None


def cell(
    query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, eps: float
) -> Tensor:
    """Return h (B, H, T, d_v).

    Args:
        query: (B, H, T, d_k).
        key: (B, H, T, d_k).
        value: (B, H, T, d_v).
        igate: i before its exp, (B, H, T).
        fgate: f before its sigmoid, (B, H, T).
        eps: added to the denominator that is kept.
    """
    states = active()
    layer = states.next_layer()
    scale = query.shape[-1] ** -0.5
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    exponent, forget = igate.transpose(1, 2), F.logsigmoid(fgate).transpose(1, 2)
    zero = torch.zeros_like(exponent)
    scales, features, decay = states.stabilized_exp(
        torch.stack([zero, zero], -1),
        torch.stack([exponent, zero], -1),
        torch.stack([forget, zero], -1),
        layer,
    )
    # The normaliser is the sum of a value that is 1.
    value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    sums, _ = states.attend(
        query,
        key * features[..., :1],
        value,
        layer,
        decay=decay[..., 0],
        update_rule="gated",
        scale=scale,
    )
    numerator, normalizer = sums[..., :-1], sums[..., -1:].abs()
    kept, one = scales[..., :1], scales[..., 1:]
    denominator = torch.maximum(kept * normalizer, one) + kept * eps
    return (kept * numerator / denominator).transpose(1, 2)


def model(self: LibraryObject, input_ids: Tensor, **kwargs: LibraryObject) -> Any:
    """Stands in for ``xLSTMModel.forward``, which cuts long inputs into chunks of its own."""
    hidden = self.embeddings(input_ids)
    for block in self.blocks:
        hidden, _ = block(hidden, None)
    return (self.out_norm(hidden),)


def language_model(self: LibraryObject, input_ids: Tensor, **kwargs: LibraryObject) -> Any:
    """Stands in for ``xLSTMForCausalLM.forward``, which does as well."""
    logits = self.lm_head(self.backbone(input_ids)[0]).float()
    cap = self.config.output_logit_soft_cap
    output = find("modeling_outputs", "CausalLMOutput")
    return output(logits=logits if cap is None else cap * torch.tanh(logits / cap))


PATCH = Patch(
    swaps=(
        Swap("xLSTMBackend.forward", backend),
        Swap("xLSTMModel.forward", model),
        Swap("xLSTMForCausalLM.forward", language_model),
    ),
    families=("xlstm",),
)
