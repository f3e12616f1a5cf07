"""Windowed softmax attention of ``fla.layers`` with one key for all heads, given a mask.

    q, k, v = W x, q and k rotated by their places in the padded row
    output  = W_o attention(q, k, v) of the valid tokens of each row, 0 at padding

The layer takes as many values of the mask as its window has, where that is more than the tokens. A
trace would have that as a size. Here it takes those of the tokens, which are the same.
"""

from __future__ import annotations

from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.padding import pad_input, unpad_input
from linexport.patches.gpu_kernels.softmax import flash_attn_func
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject


def forward(
    self: LibraryObject,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: object = None,
    output_attentions: bool = False,
    use_cache: bool = False,
    **given: object,
) -> tuple[Tensor, None, None]:
    """Stand in for ``SlidingWindowSharedKeyAttention.forward``."""
    refuse_packed(given.get("cu_seqlens"))
    if past_key_values is not None:
        raise UnsupportedModelError(
            "SlidingWindowSharedKeyAttention of fla is given a state. Give it whole sequences: the "
            "artifact carries its states itself."
        )
    batch, tokens, _width = hidden_states.shape
    q, k, v = (
        project(hidden_states).unflatten(-1, (-1, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    if self.qk_norm:
        q, k = self.q_norm(q), self.k_norm(k)
    q, k = self.rotary(q, k)
    q, k, v = (x if x.itemsize == 2 else x.bfloat16() for x in (q, k, v))  # as the layer
    places = None
    if attention_mask is not None:
        q, (k, v), places, _ends, _lengths = unpad_input(
            q, (k, v), attention_mask[:, -tokens:], tokens
        )
    window = (-1, -1) if self.window_size is None else (self.window_size - 1, 0)
    o = flash_attn_func(q, k.expand_as(q), v, causal=True, window_size=window)
    o = o if places is None else pad_input(o, places, batch, tokens)
    o = o.reshape(batch, tokens, -1).to(self.o_proj.weight.dtype)
    output: Tensor = self.o_proj(o)
    return output, None, None


FUNCTIONS = (
    Function(
        "fla.layers.rodimus",
        "SlidingWindowSharedKeyAttention.forward",
        forward,
        "flash-linear-attention 0.6.0",
    ),
)
