"""Delta rules of packages, by tokens, chunks or kernels -> ``LinearAttention``.

    S_t = alpha_t S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = S_t q_t

or ``GeneralizedDeltaRule``, RWKV-7's:

    S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T,                 o_t = S_t r_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.models import functional
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject


def _gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Stands in for functions of opengdn of (B, T, H, d), whose state is (B, H, d_v, d_k)."""
    heads = q.shape[2]
    output, last, _normalizer = functional.linear_attention(
        q.flatten(2),
        k.flatten(2),
        v.flatten(2),
        None if state is None else state.transpose(2, 3),
        decay=alpha.log(),
        beta=beta,
        q_num_heads=heads,
        kv_num_heads=heads,
        update_rule="gated_delta",
        scale=1.0,
    )
    return output.unflatten(2, (heads, -1)), last.transpose(2, 3)


def _rwkv7(
    receptance: Tensor,
    decay: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Stands in for a function of rwkv7-hf of (B, T, H, d), whose state is (B, H, d_k, d_v).

    It loops over the sequences of a batch as well. A token that is masked gives zeros.
    """
    heads = receptance.shape[2]
    mask = None if attention_mask is None else attention_mask.bool()
    output, last = functional.generalized_delta_rule(
        receptance.flatten(2),
        key.flatten(2),
        value.flatten(2),
        decay.log().flatten(2),
        a.flatten(2),
        b.flatten(2),
        initial_state,
        mask,
        num_heads=heads,
    )
    if mask is not None:
        output = torch.where(mask[..., None], output, 0.0)
    return output.unflatten(2, (heads, -1)), last


def _several_keys(
    self: LibraryObject,
    x: Tensor,
    h_0: Tensor | None = None,
    delta_t: Tensor | None = None,
    return_state: bool = False,
) -> Tensor:
    """Stands in for ``DeltaMinGRU.forward`` of mingru-scans, which solves triangular systems."""
    if h_0 is not None or delta_t is not None or return_state:
        raise UnsupportedModelError(
            "A DeltaMinGRU is given its state or gaps of time, or returns its state. Leave them "
            "out: the artifact has a state of its own."
        )
    query, *written = self._coeffs(x)
    key, value, beta = (torch.stack(parts, 2).flatten(1, 2) for parts in written)
    output, _state, _normalizer = functional.linear_attention(
        query.repeat_interleave(self.nh, 1).flatten(2),
        key.flatten(2),
        value.flatten(2),
        beta=beta,
        q_num_heads=self.n_heads,
        kv_num_heads=self.n_heads,
        update_rule="delta",
        scale=1.0,
    )
    result: Tensor = self.out_proj(output.unflatten(1, (-1, self.nh))[:, :, -1])
    return result


FUNCTIONS = (
    Function("rwkv7_hf.ops_rwkv7", "rwkv7_recurrent", _rwkv7, "rwkv7-hf 0.9.0"),
    *(
        Function(f"opengdn.{module}", name, _gated_delta, "opengdn 0.1.0")
        for module, name in (
            ("reference", "gated_delta"),
            ("chunkwise", "gated_delta_chunkwise"),
            ("triton", "gated_delta_triton"),
        )
    ),
    Function("mingru.min_gru", "DeltaMinGRU.forward", _several_keys, "mingru-scans 0.2.0"),
)
