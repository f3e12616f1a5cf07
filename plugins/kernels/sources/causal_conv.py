"""Depthwise causal convolution with state, tokens first: ``plugins.ops.causal_conv_tokens``.

y_t = f(bias + sum_j weight_j x_{t - (k-1) + j})        f = identity or silu
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_seen(input, past, t, inside, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """Values at times t, the past where t < 0, zero where there is none and where not inside."""
    x = tl.load(input + t.to(tl.int64) * CHANNELS, mask=inside & (t >= 0), other=0.0)
    x = x.to(tl.float32)
    if past is not None:
        x += tl.load(past + t + SIZE - 1, mask=inside & (t < 0), other=0.0)
    return x


@triton.jit
def convolved(
    input,
    past,
    weight,
    bias,
    times,
    live,
    channels,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
):
    """y at ``times`` of ``channels``, in float32, where ``live``."""
    real = channels < CHANNELS
    y = tl.zeros(live.shape, tl.float32)
    if bias is not None:
        y += tl.load(bias + channels, mask=real, other=0.0).to(tl.float32)[None, :]
    # Tap j sees the input k - 1 - j steps back, in the past where that is before t = 0.
    for j in range(SIZE):
        w = tl.load(weight + channels * SIZE + j, mask=real, other=0.0)
        x = load_seen(input, past, times - (SIZE - 1) + j, live, CHANNELS, SIZE)
        y += x * w.to(tl.float32)[None, :]
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    return y


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
    """Grid: (B * chunks * blocks of channels). BLOCK_S is SIZE - 1 or more.

    The first chunk alone reads the past, for the first SIZE - 1 times, and writes the present when
    it has: they may be the same memory. States are float32.
    """
    BLOCKS: tl.constexpr = tl.cdiv(CHANNELS, BLOCK_C)
    chunks = tl.maximum(tl.cdiv(length, CHUNK), 1)
    chunk = tl.program_id(0) // BLOCKS % chunks
    channels = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, columns = (channels < CHANNELS)[None, :], channels[None, :]
    batch = (tl.program_id(0) // BLOCKS // chunks).to(tl.int64)
    input += batch * length * CHANNELS + columns
    output += batch * length * CHANNELS + columns
    kind: tl.constexpr = output.dtype.element_ty
    # A program computes BLOCK_C channels over CHUNK times.
    times = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    live = inside & (times < length) & (times >= SIZE - 1)
    y = convolved(input, None, weight, bias, times, live, channels, CHANNELS, SIZE, SILU)
    tl.store(output + times.to(tl.int64) * CHANNELS, y.to(kind), mask=live)
    if SIZE > 1:
        if chunk == 0:
            state = (batch * CHANNELS + columns) * (SIZE - 1)
            past = past_state + state if past_state is not None else None
            at = tl.arange(0, BLOCK_S)[:, None]
            kept = inside & (at < SIZE - 1)
            early = kept & (at < length)
            first = convolved(input, past, weight, bias, at, early, channels, CHANNELS, SIZE, SILU)
            tl.store(output + at * CHANNELS, first.to(kind), mask=early)
            # The last k - 1 inputs; of a short input some of them are still the past's.
            seen = load_seen(input, past, length - (SIZE - 1) + at, kept, CHANNELS, SIZE)
            # Threads write what others read, where past and present are one memory.
            tl.debug_barrier()
            tl.store(present_state + state + at, seen, mask=kept)
