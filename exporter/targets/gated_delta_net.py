"""ONNX Runtime's GatedDeltaNet: the rules of LinearAttention, on heads that have an axis.

    GatedDeltaNet(q, k (B, T, G, d_k), v (B, T, H, d_v), cu_seqlens, g (B, T, H) or (B, T, H, d_k),
                  beta (B, T, H), S_0 (B, H, d_v, d_k))  ->  o (B, T, H, d_v), S_T

    S'  = S_{t-1} e^{g_t}                                S_{t-1} without a decay
    S_t = S' + beta_t (v_t - S' k_t) k_t^T               S' + v_t k_t^T without beta
    o_t = scale S_t q_t

G divides H, and a head of queries and keys serves H / G of values. ONNX Runtime has a kernel for
CUDA, which on an H100 took a sixth to a half of the time of LinearAttention's for 8,192 tokens and
needs no padding. For the CPU it has one from 1.32 on; without, ``defined`` writes the operator in
standard ones.

Source: the schema of ``com.microsoft.GatedDeltaNet`` in ONNX Runtime 1.31; 1.32 has one more
attribute and more types of decay and beta.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper

from linexport.graph.walk import nodes_within
from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.linear_attention.spec import AttentionSizes

OP = "GatedDeltaNet"

INPUTS = ("query", "key", "value", "cu_seqlens", "decay", "beta", "initial_state")

DEFINED = "linexport.onnxruntime"
"""Domain of the functions that stand for it."""


def call(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: tuple[str, str, str, str, str, str],
) -> tuple[str, str]:
    """Write the operator between packed heads.

    Args:
        b: where to.
        spec: of the attention, which has as many heads of queries as of keys.
        sizes: of it.
        inputs: query, key (B, T, G d_k), value (B, T, H d_v), state (B, H, d_k, d_v), decay and
            beta, as LinearAttention's; "" for none.

    Returns:
        The output (B, T, H d_v) and the state (B, H, d_k, d_v), in float32.
    """
    # In float16 it multiplies with fragments of that type, which sums of a sequence may leave.
    query, key, value, past, decay, beta = (x and b.Cast(x, to=TensorProto.FLOAT) for x in inputs)
    heads, d_k, d_v = spec.kv_num_heads, sizes.d_k, sizes.d_v
    query, key = (b.Reshape(x, b.const([0, 0, sizes.key_heads, d_k])) for x in (query, key))
    tokens = b.Shape(value, start=0, end=2)
    if sizes.decay_per_channel:
        decay = b.Reshape(decay, b.const([0, 0, heads, d_k]))
    if beta and not sizes.beta_per_head:
        beta = b.Expand(beta, b.Concat(tokens, b.const([heads]), axis=0))
    if past:
        past = b.Transpose(past, perm=[0, 1, 3, 2])
    else:  # from which the operator reads how many sequences there are
        state = b.Concat(b.Shape(value, start=0, end=1), b.const([heads, d_v, d_k]), axis=0)
        past = b.Expand(b.const(0.0), state)
    output, state = b.node(
        OP,
        *(query, key, b.Reshape(value, b.const([0, 0, heads, d_v])), "", decay, beta, past),
        outputs=2,
        domain=MICROSOFT,
        update_rule=spec.update_rule,
        scale=float(spec.scale),
    )
    packed = b.Reshape(output, b.const([0, 0, heads * d_v]))
    return packed, b.Transpose(state, perm=[0, 1, 3, 2])


def is_in(model: onnx.ModelProto) -> bool:
    """Return whether a graph or function of a model has the operator."""
    return next(_calls(model), None) is not None


def defined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every GatedDeltaNet a function of standard operators.

    The very model where it has none. Nodes are those that ``call`` writes.
    """
    if not is_in(model):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    functions: dict[tuple[str, float], onnx.FunctionProto] = {}
    for owner, node in _calls(changed):
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        rule, scale = settings["update_rule"].decode(), settings["scale"]
        # Names of their own: ONNX Runtime does not see overloads of nodes within functions.
        if (rule, scale) not in functions:
            name = f"{OP}_{rule}_{len(functions)}"
            functions[rule, scale] = _definition(name, rule, scale)
        function = functions[rule, scale]
        node.domain, node.op_type = function.domain, function.name
        del node.attribute[:]
        if DEFINED not in {o.domain for o in owner.opset_import}:
            owner.opset_import.append(helper.make_opsetid(DEFINED, 1))
    changed.functions.extend(functions.values())
    if DEFINED not in {o.domain for o in changed.opset_import}:
        changed.opset_import.append(helper.make_opsetid(DEFINED, 1))
    return changed


def _calls(
    model: onnx.ModelProto,
) -> Iterator[tuple[onnx.ModelProto | onnx.FunctionProto, onnx.NodeProto]]:
    """Yield every node of the operator with what declares its domains."""
    owners: list[tuple[onnx.ModelProto | onnx.FunctionProto, Iterator[onnx.NodeProto]]] = [
        (model, nodes_within(model.graph.node)),
        *((f, nodes_within(f.node)) for f in model.functions),
    ]
    for owner, nodes in owners:
        for node in nodes:
            if (node.domain, node.op_type) == (MICROSOFT, OP):
                yield owner, node


def _definition(name: str, rule: str, scale: float) -> onnx.FunctionProto:
    """Return the recurrence as a Scan over tokens."""
    b = Body()
    query, key, value, _, decay, beta, past = INPUTS
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
    return b.function(DEFINED, name, INPUTS, {"output": outputs, "final_state": last})
