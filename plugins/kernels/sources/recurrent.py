"""Linear attention token by token, all update rules: a decode step reads and writes S once.

The formulas are those of the op's oracle. A program holds a tile of d_v columns of one state; it
reads its part of the past before it writes the present, which may be the same memory. The
normaliser is shared by the tiles, and only the first writes it.

Operands are tensors, or expressions of other tensors (``expressions``): PLACES are those of query,
key, value, decay and beta in the program, -1 for a tensor. Convolutions in these leave their states
in memory of its own: other programs still read the past.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linexport.plugins.kernels.sources.expressions import of_token, store_states
from linexport.plugins.kernels.sources.feature_functions import token_features
from linexport.plugins.kernels.sources.tiles import load_state, store_state


@triton.jit
def step(
    operands,
    key_mask,
    parameter_0,
    past_state,
    past_normalizer,
    tensors,
    output,
    present_state,
    present_normalizer,
    states,
    length,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    BETA_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    DECAYS: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PROGRAM: tl.constexpr,
    PLACES: tl.constexpr,
    QUERY_CONVOLUTIONS: tl.constexpr,
    KEY_CONVOLUTIONS: tl.constexpr,
    VALUE_CONVOLUTIONS: tl.constexpr,
):
    """Tokens one after the other. Grid: (B * HEADS * tiles of d_v)."""
    V_TILES: tl.constexpr = tl.cdiv(D_V, BLOCK_V)
    GROUP: tl.constexpr = tl.cdiv(QUERY_HEADS, HEADS)
    OUT: tl.constexpr = HEADS * GROUP
    tile = tl.program_id(0) % V_TILES
    head = tl.program_id(0) // V_TILES
    h = head % HEADS
    columns_k = tl.arange(0, BLOCK_K)
    columns_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_k, inside_v = columns_k < D_K, columns_v < D_V
    batch = (head // HEADS).to(tl.int64)
    row = batch * length
    head = head.to(tl.int64)
    key_head = h * KEY_HEADS // HEADS
    past = past_state + head * (D_K * D_V) if past_state is not None else None
    past_z = past_normalizer + head * D_K if past_normalizer is not None else None
    S, z = load_state(past, past_z, columns_k, columns_v, D_K, D_V)

    for t in range(0, length):
        at = row + t
        # A padded token has the key zero and no decay: it does not change the state.
        keep = inside_k
        if key_mask is not None:
            keep = keep & (tl.load(key_mask + at) != 0)
        if PLACES[1] < 0:
            place = operands.key + (at * KEY_HEADS + key_head) * WIDTH
            k = token_features(place, columns_k, parameter_0, WIDTH, D_K, MAP)
        else:
            k = of_token(PROGRAM, PLACES[1], tensors, batch, t, length, key_head, columns_k, D_K)
        k = tl.where(keep, k, 0.0)
        if PLACES[2] < 0:
            place = operands.value + (at * HEADS + h) * D_V
            v = tl.load(place + columns_v, mask=inside_v, other=0.0).to(tl.float32)
        else:
            v = of_token(PROGRAM, PLACES[2], tensors, batch, t, length, h, columns_v, D_V)
        # S_t = alpha_t S_{t-1} + k_t u_t^T, with one alpha a head or one a channel.
        if DECAYS > 0:
            channels = columns_k if DECAYS > 1 else columns_k * 0
            if PLACES[3] < 0:
                place = operands.decay + (at * HEADS + h) * DECAYS
                g = tl.load(place + channels, mask=keep, other=0.0).to(tl.float32)
            else:
                g = of_token(PROGRAM, PLACES[3], tensors, batch, t, length, h, channels, DECAYS)
                g = tl.where(keep, g, 0.0)
            alpha = tl.exp(g)
            S *= alpha[:, None]
            z *= alpha
        # Delta rules, u_t = beta_t (v_t - S^T k_t): the error of what the state has stored.
        if DELTA:
            beta_head = h * BETA_HEADS // HEADS
            if PLACES[4] < 0:
                rate = tl.load(operands.beta + at * BETA_HEADS + beta_head).to(tl.float32)
            else:
                channels = columns_v * 0
                rate = of_token(
                    PROGRAM, PLACES[4], tensors, batch, t, length, beta_head, channels, 1
                )
            v = rate * (v - tl.sum(S * k[:, None], 0))
        S += k[:, None] * v[None, :]
        z += k
        # o_t = s q_t S_t / (s q_t . z_t + eps), for each query head of the state.
        for g in tl.static_range(GROUP):
            query_head = (h * GROUP + g) * QUERY_HEADS // OUT
            if PLACES[0] < 0:
                place = operands.query + (at * QUERY_HEADS + query_head) * WIDTH
                q = token_features(place, columns_k, parameter_0, WIDTH, D_K, MAP)
            else:
                q = of_token(
                    PROGRAM, PLACES[0], tensors, batch, t, length, query_head, columns_k, D_K
                )
                q = tl.where(inside_k, q, 0.0)
            o = tl.sum(S * q[:, None], 0) * SCALE
            if NORMALIZE:
                o /= tl.sum(q * z, 0) * SCALE + EPS
            place = output + (at * OUT + h * GROUP + g) * D_V
            tl.store(place + columns_v, o.to(output.dtype.element_ty), mask=inside_v)

    present_state += head * (D_K * D_V)
    if present_normalizer is not None:
        present_normalizer += head * D_K
    store_state(present_state, present_normalizer, S, z, columns_k, columns_v, D_K, D_V)

    if PROGRAM is not None:
        # Of the programs that read a channel, the first one writes its state.
        for g in tl.static_range(GROUP):
            query_head = (h * GROUP + g) * QUERY_HEADS // OUT
            first = (tile == 0) & ((h * GROUP + g) * QUERY_HEADS % OUT < QUERY_HEADS)
            store_states(
                *(PROGRAM, QUERY_CONVOLUTIONS, tensors, states, batch, length, query_head),
                *(columns_k, D_K, first),
            )
        first = (tile == 0) & (h * KEY_HEADS % HEADS < KEY_HEADS)
        store_states(
            *(PROGRAM, KEY_CONVOLUTIONS, tensors, states, batch, length, key_head),
            *(columns_k, D_K, first),
        )
        store_states(
            *(PROGRAM, VALUE_CONVOLUTIONS, tensors, states, batch, length, h),
            *(columns_v, D_V, h >= 0),
        )
