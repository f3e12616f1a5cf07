"""The chunk form of GeneralizedDeltaRule at any length: tokens padded, and cut into blocks.

A block is a run of chunks that are computed at once (``chunks``). A Scan takes block after block,
so that a chunk's operands remain in the processor's caches and memory does not grow with
the length; or all tokens are one block.
"""

from __future__ import annotations

from linexport.plugins.ops.body import Body, ceil_div
from linexport.plugins.ops.generalized_delta_rule import chunks
from linexport.plugins.ops.generalized_delta_rule.definition import DeltaRuleSizes
from linexport.plugins.ops.generalized_delta_rule.operands import DeltaRuleOperands

TOKENS = 128
"""In a block at most. Measured on the CPU: 64 are as good for wide heads, 512 a tenth slower."""


def write(b: Body, x: DeltaRuleOperands, sizes: DeltaRuleSizes, at_once: bool) -> list[str]:
    """Append output (B, T, H * d_v) and present_state in float32.

    Args:
        b: the body to append to.
        x: operands of a node.
        sizes: of the node.
        at_once: all tokens are one block, without the Scan over blocks.
    """
    # M blocks of N chunks of C tokens, M N C >= T > 0; one chunk for T = 0.
    one, C = b.const([1]), b.const([chunks.TOKENS])
    count = one if at_once else b.Max(ceil_div(b, x.length, TOKENS), one)
    size = b.Mul(b.Max(ceil_div(b, x.length, b.Mul(count, C)), one), C)
    padding = b.Sub(b.Mul(count, size), x.length)
    pads = b.Concat(b.const([0, 0, 0, 0]), padding, b.const([0]), axis=0)
    # Tokens of zeros, decay 1, leave the state as it was.
    padded = [b.Pad(y, pads) for y in x[:6]]
    if at_once:
        S, output = chunks.write(b, x.state, padded, sizes)
    else:
        shape = b.Concat(x.batch, count, size, b.const([-1]), axis=0)
        cut = [b.Transpose(b.Reshape(y, shape), perm=[1, 0, 2, 3]) for y in padded]
        S, output = b.Scan(
            x.state, *cut, outputs=2, body=_block(b, sizes), num_scan_inputs=len(cut)
        )
        width = b.const([sizes.heads * sizes.d_v])
        shape = b.Concat(x.batch, b.Mul(count, size), width, axis=0)
        output = b.Reshape(b.Transpose(output, perm=[1, 0, 2, 3]), shape, allowzero=1)
    return [b.Slice(output, b.const([0]), x.length, one), S]


def _block(outer: Body, sizes: DeltaRuleSizes) -> object:
    """The Scan body: S (B, H, d_k, d_v) and a block, (B, L, H * d) each."""
    b = Body(outer)
    S, *block = (b.fresh(name) for name in ("S", "q", "k", "v", "g", "a", "b"))
    return b.subgraph("block", [S, *block], chunks.write(b, S, block, sizes))
