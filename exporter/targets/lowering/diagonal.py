"""LinearAttention whose heads have values of width one and a decay per key channel (Mamba).

    S_t = exp(g_t) * S_{t-1} + v_t k_t,   y_t = S_t . q_t       S (B, H, d_k), v_t (B, H)

Every element of the state is a recurrence of its own, and there are as many decays as elements: the
chunk form would multiply them out for all pairs of its tokens, and a kernel made for matrices pads
d_v. So a Scan takes token after token, with all heads at once. A decay in two factors is multiplied
out for the token at hand, and heads are the innermost axis, along which there are many: ONNX
Runtime spreads the factors of a token over d_k = 16 in half the time so. One token alone is
computed where its state lies, without a Scan.

One layer of 1024 heads of 16, its decay in two factors, 512 tokens, on two cores: 9 ms, ONNX
Runtime's kernel 36, on padded heads 96, the chunk form 940; one token: 0.05, 0.11, 0.75 and 0.82.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import INPUTS, SCALE, absorbed_map, view
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
    q, k, v, g = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value, decay))
    if spec.scale != 1.0:
        q = b.Mul(q, b.const(float(spec.scale)))
    if key_mask:
        keep, zero = b.Unsqueeze(key_mask, b.const([2])), b.const(0.0)
        k, g = b.Where(keep, k, zero), b.Where(keep, g, zero)
    served = heads // groups
    state = b.const([groups, served, d_k])
    shape = b.Concat(b.Shape(query, start=0, end=1), state, axis=0)
    S = b.Reshape(past_state, shape) if past_state else b.Expand(b.const(0.0), shape)
    rates = b.Reshape(SCALE, state) if SCALE in node.shapes else ""
    tokens = _Tokens(q, k, v, g, rates, groups, served, d_k)
    one, several = Body(b), Body(b)
    last, output = b.If(
        b.Less(b.Squeeze(b.Shape(query, start=1, end=2)), b.const(2)),
        outputs=2,
        then_branch=one.subgraph("one", [], _at_once(one, S, tokens)),
        else_branch=several.subgraph("several", [], _scan(several, S, tokens)),
    )
    last = b.Reshape(last, b.const([0, heads, d_k, 1]))
    output = b.CastLike(b.Reshape(output, b.const([0, 0, heads])), query)
    return b, [output, last, b.const(np.zeros((1, heads, d_k), np.float32))]


class _Tokens(NamedTuple):
    """Packed query, key, value and decay (B, T, ...), and how they are heads.

    ``rates`` (groups, served, d_k) is the decay's second factor, "" if it has but one.
    """

    q: str
    k: str
    v: str
    g: str
    rates: str
    groups: int
    served: int
    d_k: int

    def split(self, b: Body, x: str, *heads: int) -> str:
        """(B, T, ...) as (B, T, groups, *heads)."""
        return str(b.Reshape(x, b.const([0, 0, self.groups, *heads])))


def _at_once(b: Body, S: str, x: _Tokens) -> list[str]:
    """The state (B, G, H / G, d_k) after one token or none, and outputs (B, T, G, H / G)."""
    first = b.const([1])
    g = x.split(b, x.g, x.served, 1 if x.rates else x.d_k)
    parts = (x.split(b, x.v, x.served, 1), x.split(b, x.k, 1, x.d_k), g)
    v, k, g = (b.ReduceSum(part, first, keepdims=0) for part in parts)  # zeros if there is none
    g = b.Mul(g, x.rates) if x.rates else g
    present = b.Add(b.Mul(b.Exp(g), S), b.MatMul(v, k))
    q = b.Transpose(x.split(b, x.q, x.d_k), perm=[0, 2, 3, 1])
    return [present, b.Transpose(b.MatMul(present, q), perm=[0, 3, 1, 2])]


def _scan(b: Body, S: str, x: _Tokens) -> list[str]:
    """The final state and the outputs of several tokens, by a Scan of states (B, G, d_k, H / G)."""
    sequences = [x.split(b, x.q, 1, x.d_k), x.split(b, x.k, x.d_k, 1), x.split(b, x.v, 1, x.served)]
    rates = ""
    if x.rates:
        rates = b.Transpose(x.rates, perm=[0, 2, 1])
        sequences.append(x.split(b, x.g, 1, x.served))
    else:
        sequences.append(b.Transpose(x.split(b, x.g, x.served, x.d_k), perm=[0, 1, 2, 4, 3]))
    step = Body(b)
    past, t = step.fresh("S"), step.fresh("t")
    q, k, v, g = (step.Gather(sequence, t, axis=1) for sequence in sequences)
    g = step.Mul(g, rates) if rates else g
    # A product of matrices: Mul takes twice as long to spread the one over the other.
    present = step.Add(step.Mul(step.Exp(g), past), step.MatMul(k, v))
    body = step.subgraph("token", [past, t], [present, step.MatMul(q, present)])
    length = b.Squeeze(b.Shape(x.q, start=1, end=2))
    last, outputs = b.Scan(
        b.Transpose(S, perm=[0, 1, 3, 2]),
        b.Range(b.const(0), length, b.const(1)),
        outputs=2,
        body=body,
        num_scan_inputs=1,
    )
    return [b.Transpose(last, perm=[0, 1, 3, 2]), b.Transpose(outputs, perm=[1, 0, 2, 3, 4])]
