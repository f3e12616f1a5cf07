"""A causal lowering applied to one block of tokens after another, the state carried between them.

    for each block i:  output_i, state, normalizer = write(inputs of block i, state, normalizer)
    output = Concat(output_0, output_1, ...)

A long sequence is bound by memory when every operator of the lowering passes over all of it. Cut
into blocks that stay in cache, only inputs and output touch memory: feature maps and normaliser
then cost next to nothing compared with the kernel, where at 16384 tokens they took half its time
(``tools/bench_attention.py``). Up to one block the lowering runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnx import TensorProto, helper

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.linear_attention.spec import AttentionSizes

CACHED = 2**17
"""Elements of the widest tensor of a block, 512 KiB in float32: several of them stay in the cache
of a core. With four times as many, 4096 tokens take a sixth longer."""

SMALLEST = 128
"""Tokens in a block at least: every turn of the loop copies the state, and that shows below."""

STATES = slice(3, 5)
"""Places of past_state and past_normalizer among the op's inputs; the others are per token."""

Write = Callable[[Body, Sequence[str]], list[str]]
"""``write(body, inputs)`` appends the lowering and returns output, state and normalizer."""


def blocked(
    inputs: Sequence[str], spec: LinearAttentionSpec, sizes: AttentionSizes, write: Write
) -> tuple[Body, list[str]]:
    """A body of the op's eight inputs ("" for an absent one) that applies ``write`` in blocks."""
    b = Body()
    tokens = b.const([tokens_per_block(spec, sizes)])
    length = b.Shape(inputs[0], start=1, end=2)
    whole, parts = Body(b), Body(b)
    outputs = b.If(
        b.Squeeze(b.LessOrEqual(length, tokens), b.const([0])),
        outputs=3,
        then_branch=whole.subgraph("whole", [], write(whole, inputs)),
        else_branch=parts.subgraph(
            "parts", [], _loop(parts, inputs, spec, sizes, tokens, length, write)
        ),
    )
    return b, list(outputs)


def tokens_per_block(spec: LinearAttentionSpec, sizes: AttentionSizes) -> int:
    """How many tokens stay in cache."""
    widths = (spec.q_num_heads * sizes.d_k, spec.kv_num_heads * sizes.d_k)
    return max(SMALLEST, CACHED // max(*widths, spec.output_heads * sizes.d_v))


def _loop(
    b: Body,
    inputs: Sequence[str],
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    tokens: str,
    length: str,
    write: Write,
) -> list[str]:
    batch, heads = b.Shape(inputs[0], start=0, end=1), spec.kv_num_heads
    past_state, past_normalizer = inputs[STATES]
    state = past_state or _zeros(b, batch, heads, sizes.d_k, sizes.d_v)
    normalizer = past_normalizer or _zeros(b, batch, heads, sizes.d_k)
    # No tokens, of the output's width and type: what the blocks are appended to.
    none, axes = b.const([0, 0]), b.const([1, 2])
    empty = b.Slice(inputs[0], none, b.const([0, 1]), axes)
    width = b.const([0, spec.output_heads * sizes.d_v])
    empty = b.Expand(empty, b.Concat(batch, width, axis=0))

    step = Body(b)
    index, going, S, z, seen = (step.fresh(n) for n in ("i", "going", "S", "z", "seen"))
    start = step.Mul(step.Reshape(index, step.const([1])), tokens)
    end = step.Min(step.Add(start, tokens), length)
    first = step.const([0])
    places = step.Range(step.Squeeze(start, first), step.Squeeze(end, first), step.const(1))
    per_token = list(inputs)
    per_token[STATES] = ["", ""]
    # Not Slice, for which ONNX Runtime uses one thread.
    block = [x and step.Gather(x, places, axis=1) for x in per_token]
    block[STATES] = [S, z if spec.normalize else ""]
    output, *states = write(step, block)
    # ONNX Runtime wants the first two typed.
    typed = helper.make_tensor_value_info
    graph = step.subgraph(
        "block",
        [typed(index, TensorProto.INT64, []), typed(going, TensorProto.BOOL, []), S, z, seen],
        [step.Identity(going), *states, step.SequenceInsert(seen, output)],
    )
    count = b.Div(b.Add(length, b.Sub(tokens, b.const([1]))), tokens)
    state, normalizer, blocks = b.Loop(
        b.Squeeze(count, b.const([0])),
        b.const(True),
        state,
        normalizer,
        b.SequenceConstruct(empty),
        outputs=3,
        body=graph,
    )
    return [b.ConcatFromSequence(blocks, axis=1), state, normalizer]


def _zeros(b: Body, batch: str, *sizes: int) -> str:
    return str(b.Expand(b.const(0.0), b.Concat(batch, b.const(list(sizes)), axis=0)))
