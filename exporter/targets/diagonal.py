"""LinearAttention whose heads have values of width one and a decay per key channel (Mamba).

    S_t = exp(g_t) * S_{t-1} + v_t k_t,   y_t = S_t . q_t       S (B, H, d_k), v_t (B, H)

Every element of the state is a recurrence of its own, and there are as many decays as elements: the
chunk form would multiply them out for all pairs of its tokens, and a kernel made for matrices pads
d_v. So a Scan takes token after token, with all heads at once; the sequences are read where they
lie. One layer of 1024 heads of 16, 512 tokens, on two cores: 11 ms, ONNX Runtime's kernel 45, on
padded heads 139, the chunk form 26 times as long as the kernel; one token: 0.03, 0.11 and 0.71.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import INPUTS, absorbed_map, view
from linexport.plugins.ops.op import Node

REASON = "values of width one: element by element, a token at a time"


def fits(node: Node) -> bool:
    """The node is of that kind, with as many heads of queries as of keys."""
    spec, sizes = view(node)
    per_element = spec.update_rule == "gated" and sizes.decay_per_channel and sizes.d_v == 1
    plain = not spec.normalize and absorbed_map(node) is None
    return per_element and plain and spec.q_num_heads == sizes.key_heads


def by_element(node: Node) -> tuple[Body, list[str]]:
    """See above; in float32. No normaliser is kept, as nothing is normalised."""
    spec, sizes = view(node)
    b = Body()
    query, key, value, past_state, _, decay, _, key_mask = node.inputs[: len(INPUTS)]
    heads, groups, d_k = spec.kv_num_heads, sizes.key_heads, sizes.d_k
    served = heads // groups
    q, k, v, g = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value, decay))
    if spec.scale != 1.0:
        q = b.Mul(q, b.const(float(spec.scale)))
    if key_mask:
        keep, zero = b.Unsqueeze(key_mask, b.const([2])), b.const(0.0)
        k, g = b.Where(keep, k, zero), b.Where(keep, g, zero)
    layouts = ([groups, d_k, 1], [groups, 1, d_k], [groups, served, 1], [groups, served, d_k])
    tokens = [
        b.Reshape(x, b.const([0, 0, *layout]))
        for x, layout in zip((q, k, v, g), layouts, strict=True)
    ]
    batch, length = b.Shape(query, start=0, end=1), b.Shape(query, start=1, end=2)
    shape = b.Concat(batch, b.const([groups, served, d_k]), axis=0)
    if past_state:
        S = b.Reshape(b.Cast(past_state, to=TensorProto.FLOAT), shape)
    else:
        S = b.Expand(b.const(0.0), shape)
    # ONNX Runtime scans over one token at least.
    none, some = Body(b), Body(b)
    last, output = b.If(
        b.Equal(b.Squeeze(length), b.const(0)),
        outputs=2,
        then_branch=none.subgraph(
            "none",
            [],
            [
                none.Identity(S),
                none.Expand(
                    none.const(0.0),
                    none.Concat(length, batch, none.const([groups, served, 1]), axis=0),
                ),
            ],
        ),
        else_branch=some.subgraph("some", [], _scan(some, S, tokens, length)),
    )
    output = b.Transpose(output, perm=[1, 0, 2, 3, 4])
    output = b.Reshape(output, b.Concat(batch, length, b.const([heads]), axis=0))
    state = b.Reshape(last, b.Concat(batch, b.const([heads, d_k, 1]), axis=0))
    normalizer = b.const(np.zeros((1, heads, d_k), np.float32))
    return b, [b.CastLike(output, query), state, normalizer]


def _scan(b: Body, S: str, tokens: Sequence[str], length: str) -> list[str]:
    """The last state (B, G, H / G, d_k), and outputs (T, B, G, H / G, 1)."""
    step = Body(b)
    past, t = step.fresh("S"), step.fresh("t")
    q, k, v, g = (step.Gather(x, t, axis=1) for x in tokens)
    # A product of matrices: Mul takes twice as long to spread the one over the other.
    present = step.Add(step.Mul(step.Exp(g), past), step.MatMul(v, k))
    body = step.subgraph("token", [past, t], [present, step.MatMul(present, q)])
    numbers = b.Range(b.const(0), b.Squeeze(length), b.const(1))
    return list(b.Scan(S, numbers, outputs=2, body=body, num_scan_inputs=1))
