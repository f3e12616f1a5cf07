"""GeneralizedDeltaRule in standard operators, token by token: a Scan over tokens."""

from __future__ import annotations

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.generalized_delta_rule.definition import DeltaRuleSizes
from linexport.plugins.ops.generalized_delta_rule.operands import DeltaRuleOperands


def write(b: Body, x: DeltaRuleOperands, sizes: DeltaRuleSizes) -> list[str]:
    """Append output (B, T, H * d_v) and present_state in float32, for T > 0.

    A Scan of no tokens has no outputs to speak of.
    """
    split = b.const([0, 0, sizes.heads, -1])
    tokens = [b.Transpose(b.Reshape(y, split), perm=[1, 0, 2, 3]) for y in x[:6]]
    S, output = b.Scan(x.state, *tokens, outputs=2, body=_token(b), num_scan_inputs=len(tokens))
    packed = b.const([0, 0, sizes.heads * sizes.d_v])
    return [b.Reshape(b.Transpose(output, perm=[1, 0, 2, 3]), packed), S]


def _token(outer: Body) -> object:
    """The Scan body: S (B, H, d_k, d_v) and one token, (B, H, d) each."""
    b = Body(outer)
    S, *token = (b.fresh(name) for name in ("S", "q", "k", "v", "g", "a", "b"))
    row, column = b.const([2]), b.const([3])
    q, v, a = (b.Unsqueeze(token[i], row) for i in (0, 2, 4))
    k, g, write = (b.Unsqueeze(token[i], column) for i in (1, 3, 5))
    found = b.MatMul(a, S)
    kept = b.Add(b.Mul(b.Exp(g), S), b.Mul(write, found))
    S_next = b.Add(kept, b.Mul(k, v))
    output = b.Squeeze(b.MatMul(q, S_next), row)
    return b.subgraph("token", [S, *token], [S_next, output])
