"""ONNX Runtime's GatedDeltaNet: the rules of LinearAttention, on heads that have an axis.

    GatedDeltaNet(q, k (B, T, G, d_k), v (B, T, H, d_v), cu_seqlens, g (B, T, H) or (B, T, H, d_k),
                  beta (B, T, H), S_0 (B, H, d_v, d_k))  ->  o (B, T, H, d_v), S_T

With cu_seqlens (B + 1), int32, there is one axis (n) in the place of (B, T): sequences are side by
side, and i is tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1. Without, rows have one length.

    S'  = S_{t-1} e^{g_t}                                S_{t-1} without a decay
    S_t = S' + beta_t (v_t - S' k_t) k_t^T               S' + v_t k_t^T without beta
    o_t = scale S_t q_t

G divides H, and a head of queries and keys serves H / G of values. ONNX Runtime has a kernel for
CUDA, which on an H100 took a sixth to a half of the time of LinearAttention's for 8,192 tokens and
needs no padding. For the CPU it has one from 1.32 on; without, ``definition`` is run.

Source: the schema of ``com.microsoft.GatedDeltaNet`` in ONNX Runtime 1.31; 1.32 has one more
attribute and more types of decay and beta.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.linear_attention.spec import AttentionSizes
from linexport.plugins.ops.op import attribute_value
from linexport.targets.lowering.ragged_rows import SequenceRows

OP = "GatedDeltaNet"

INPUTS = ("query", "key", "value", "cu_seqlens", "decay", "beta", "initial_state")
OUTPUTS = ("output", "final_state")


def call(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: tuple[str, str, str, str, str, str],
    ends: str = "",
) -> tuple[str, str]:
    """Write the operator between packed heads.

    Args:
        b: where to.
        spec: of the attention, which has as many heads of queries as of keys.
        sizes: of it.
        inputs: query, key (B, T, G d_k), value (B, T, H d_v), state (B, H, d_k, d_v), decay and
            beta, as LinearAttention's; "" for none.
        ends: cu_seqlens, where all but the state have (1, n) for (B, T); "" for none.

    Returns:
        The output (B, T, H d_v) and the state (B, H, d_k, d_v), in float32.
    """
    # In float16 it multiplies with fragments of that type, which sums of a sequence may leave.
    query, key, value, past, decay, beta = (x and b.Cast(x, to=TensorProto.FLOAT) for x in inputs)
    heads, d_k, d_v = spec.kv_num_heads, sizes.d_k, sizes.d_v
    lead = [-1] if ends else [0, 0]
    query, key = (b.Reshape(x, b.const([*lead, sizes.key_heads, d_k])) for x in (query, key))
    tokens = b.Shape(value, start=0, end=2)
    if beta and not sizes.beta_per_head:
        beta = b.Expand(beta, b.Concat(tokens, b.const([heads]), axis=0))
    if sizes.decay_per_channel:
        decay = b.Reshape(decay, b.const([*lead, heads, d_k]))
    elif ends and decay:
        decay = b.Reshape(decay, b.const([*lead, heads]))
    beta = b.Reshape(beta, b.const([*lead, heads])) if ends and beta else beta
    if past:
        past = b.Transpose(past, perm=[0, 1, 3, 2])
    else:  # from which the operator reads how many sequences there are
        state = b.Concat(b.Shape(value, start=0, end=1), b.const([heads, d_v, d_k]), axis=0)
        past = b.Expand(b.const(0.0), state)
    output, state = b.node(
        OP,
        *(query, key, b.Reshape(value, b.const([*lead, heads, d_v])), ends, decay, beta, past),
        outputs=2,
        domain=MICROSOFT,
        update_rule=spec.update_rule,
        scale=float(spec.scale),
    )
    packed = b.Reshape(output, b.const([1, -1, heads * d_v] if ends else [0, 0, heads * d_v]))
    return packed, b.Transpose(state, perm=[0, 1, 3, 2])


def definition(domain: str, name: str, node: onnx.NodeProto) -> onnx.FunctionProto:
    """Return what a node that ``call`` writes computes, in standard operators."""
    settings = {a.name: attribute_value(a) for a in node.attribute}
    rule, scale = settings["update_rule"], settings["scale"]
    b, given = Body(), {name: name for name in INPUTS}
    if not node.input[INPUTS.index("cu_seqlens")]:
        outputs = _recurrence(b, rule, scale, given)
    else:
        # A token of zeros changes no state: without decay, key and beta there is nothing to add.
        rows = SequenceRows.of(b, given["cu_seqlens"], given["value"])
        by_token = ["query", "key", "value"]
        by_token += ["decay"] if rule.startswith("gated") else []
        by_token += ["beta"] if rule.endswith("delta") else []
        output, last = _recurrence(
            b, rule, scale, given | {name: rows.padded(given[name]) for name in by_token}
        )
        outputs = rows.joined(output), last
    return b.function(domain, name, INPUTS, dict(zip(OUTPUTS, outputs, strict=True)))


def _recurrence(b: Body, rule: str, scale: float, given: Mapping[str, str]) -> tuple[str, str]:
    """Write the recurrence as a Scan over tokens; heads have an axis, and so have sequences."""
    query, key, value, _, decay, beta, past = (given[name] for name in INPUTS)
    shape, d_k = b.Shape(value), b.Shape(key, start=3, end=4)
    group = b.Div(b.Slice(shape, b.const([2]), b.const([3])), b.Shape(key, start=2, end=3))
    heads = b.Concat(b.Shape(value, start=0, end=3), d_k, axis=0)

    def served(x: str) -> str:
        """(B, T, G, d_k) as (B, T, H, d_k)."""
        repeated = b.Concat(b.Shape(x, start=0, end=3), group, d_k, axis=0)
        return str(b.Reshape(b.Expand(b.Unsqueeze(x, b.const([3])), repeated), heads))

    step = Body(b)
    state = step.fresh("S")
    sequences = [served(query), served(key), value]
    if rule.startswith("gated"):
        sequences.append(b.Exp(b.Reshape(decay, b.const([0, 0, 0, -1]))))
    if rule.endswith("delta"):
        sequences.append(b.Unsqueeze(beta, b.const([3])))
    names = [step.fresh("x") for _ in sequences]
    q, k, v, *gates = names
    column, row = step.const([3]), step.const([2])
    S = step.Mul(state, step.Unsqueeze(gates.pop(0), row)) if rule.startswith("gated") else state
    if rule.endswith("delta"):
        read = step.Squeeze(step.MatMul(S, step.Unsqueeze(k, column)), column)
        v = step.Mul(gates.pop(), step.Sub(v, read))
    S = step.Add(S, step.MatMul(step.Unsqueeze(v, column), step.Unsqueeze(k, row)))
    o = step.Squeeze(step.MatMul(S, step.Unsqueeze(q, column)), column)
    last, outputs = b.Scan(
        past,
        *sequences,
        outputs=2,
        body=step.subgraph("token", [state, *names], [S, step.Mul(o, step.const(scale))]),
        num_scan_inputs=len(sequences),
        scan_input_axes=[1] * len(sequences),
        scan_output_axes=[1],
    )
    return outputs, last
