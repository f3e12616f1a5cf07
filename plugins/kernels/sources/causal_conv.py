"""Depthwise causal convolution with state, channels first, as ``plugins.ops.causal_conv`` says it.

y_t = f(bias + sum_j weight_j x_{t - (k-1) + j})        f = identity or silu
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_seen(input, past_state, t, inside, SIZE: tl.constexpr):
    """Values at times t, the past where t < 0, zero where there is none and where not inside."""
    x = tl.load(input + t, mask=inside & (t >= 0), other=0.0)
    if past_state is not None:
        before = inside & (t < 0)
        x += tl.load(past_state + t + SIZE - 1, mask=before, other=0.0)
    return x


@triton.jit
def convolve(
    input,
    weight,
    bias,
    past_state,
    output,
    present_state,
    length,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (B * blocks of channels, chunks). BLOCK_S is SIZE - 1 or more, CHUNK that or length.

    The first chunk alone reads the past, and writes the present when it has: they may be the same
    memory.
    """
    BLOCKS: tl.constexpr = tl.cdiv(CHANNELS, BLOCK_C)
    chunk = tl.program_id(1)
    channels = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channels < CHANNELS)[:, None]
    row = (tl.program_id(0) // BLOCKS).to(tl.int64) * CHANNELS + channels[:, None]
    input += row * length
    past = past_state + row * (SIZE - 1) if past_state is not None else None
    # A program computes BLOCK_C channels over CHUNK times.
    times = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    live = inside & (times < length)
    y = tl.zeros((BLOCK_C, CHUNK), tl.float32)
    if bias is not None:
        y += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)[:, None]
    # Tap j sees the input k - 1 - j steps back, in the past where that is before t = 0.
    for j in tl.static_range(SIZE):
        w = tl.load(weight + channels * SIZE + j, mask=channels < CHANNELS, other=0.0)
        x = load_seen(input, past, times - (SIZE - 1) + j, live, SIZE)
        y += x.to(tl.float32) * w.to(tl.float32)[:, None]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(output + row * length + times, y.to(output.dtype.element_ty), mask=live)
    if SIZE > 1:
        # The last k - 1 inputs; of a short input some of them are still the past's.
        if chunk == 0:
            at = tl.arange(0, BLOCK_S)[None, :]
            kept = inside & (at < SIZE - 1)
            state = load_seen(input, past, length - (SIZE - 1) + at, kept, SIZE)
            # Threads write what others read, where past and present are one memory.
            tl.debug_barrier()
            tl.store(present_state + row * (SIZE - 1) + at, state, mask=kept)
