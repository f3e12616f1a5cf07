"""What hybrids have between two products: gates, convolution, recurrence and gated output."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from linexport.plugins.ops.registry import attach_functions, register_schemas
from tests.support.runtimes import Arrays

HEADS, KEYS, VALUES = 3, 8, 20
"""Heads, and the widths of one."""

CHANNELS = HEADS * (2 * KEYS + VALUES)
STATES = {"past_conv": (CHANNELS, 3), "past_state": (HEADS, KEYS, VALUES)}

TEXT = """
    <ir_version: 10, opset_import: ["": 20, "linexport": 1]>
    mixer (float[B, T, {channels}] x, float[B, T, {heads}] a, float[B, T, {values}] z,
           float[B, {channels}, 3] past_conv, float[B, {heads}, {key}, {value}] past_state)
        => (float[B, T, {values}] y, float[B, {channels}, 3] present_conv,
            float[B, {heads}, {key}, {value}] present_state)
        <float[B, {channels}, T] xt, float[B, {channels}, T] ct, float[B, T, {channels}] c,
         float[B, T, {keys}] q,
         float[B, T, {keys}] k, float[B, T, {values}] v, float[B, T, {heads}] decay,
         float[B, T, {heads}] beta, float[B, T, {values}] o>
    {{
        s = Sigmoid(x)
        xs = Mul(x, s)
        xt = Transpose<perm = [0, 2, 1]>({into})
        ct, present_conv = linexport.CausalConvWithState<activation = "silu">(xt, w, b, past_conv)
        c = Transpose<perm = [0, 2, 1]>(ct)
        q, k, v = Split<axis = -1>(c, sizes)
        g = Softplus(a)
        decay = Neg(g)
        beta = Sigmoid(a)
        o, present_state = linexport.LinearAttention<q_num_heads = {heads}, kv_num_heads = {heads},
            update_rule = "gated_delta", scale = 0.5>(q, k, v, past_state, , decay, beta)
        gate = Sigmoid(z)
        open = Mul(z, gate)
        y = Mul(o, open)
    }}
"""


def weights() -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "w": np.float32(rng.normal(size=(CHANNELS, 1, 4)) / 2),
        "b": np.float32(rng.normal(size=CHANNELS)),
    }


def mixer(opaque: bool = False) -> onnx.ModelProto:
    """The nodes as conversions write them; ``opaque`` puts one among them that no program has."""
    register_schemas()
    text = TEXT.format(
        heads=HEADS,
        key=KEYS,
        value=VALUES,
        keys=HEADS * KEYS,
        values=HEADS * VALUES,
        channels=CHANNELS,
        into="e" if opaque else "xs",
    )
    model = parser.parse_model(text)
    if opaque:
        model.graph.node.insert(2, helper.make_node("Elu", ["xs"], ["e"]))
        shape = ["B", "T", CHANNELS]
        model.graph.value_info.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, shape))
    sizes = np.array([HEADS * KEYS, HEADS * KEYS, HEADS * VALUES])
    constants = weights() | {"sizes": sizes}
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    attach_functions(model)
    return model


def feeds(batch: int, length: int) -> Arrays:
    rng = np.random.default_rng(length)
    widths = {"x": CHANNELS, "a": HEADS, "z": HEADS * VALUES}
    shapes: dict[str, tuple[int, ...]] = {n: (batch, length, w) for n, w in widths.items()}
    shapes |= {name: (batch, *shape) for name, shape in STATES.items()}
    return {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}


def reference(given: Arrays) -> list[np.ndarray]:
    """Output and states in float64."""
    x, a, z, past_conv, past_state = (np.float64(v) for v in given.values())

    def sigmoid(v: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-v))

    xs = (x * sigmoid(x)).transpose(0, 2, 1)
    own = weights()
    c, present_conv = causal_conv("silu", xs, own["w"], own["b"], past_conv)
    q, k, v = np.split(c.transpose(0, 2, 1), [HEADS * KEYS, 2 * HEADS * KEYS], axis=-1)
    spec = LinearAttentionSpec(HEADS, HEADS, "gated_delta", scale=0.5)
    decay = -np.log1p(np.exp(a))
    o, present_state, _ = linear_attention(spec, q, k, v, past_state, decay=decay, beta=sigmoid(a))
    return [o * z * sigmoid(z), present_conv, present_state]
