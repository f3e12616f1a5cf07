"""The op ``linexport.StabilizedExp``: exponential features whose attention cannot overflow.

With key exponents a_t, query exponents b_t and decay g_t <= 0, for every feature j on its own,

    m_t = max(m_{t-1} + g_t, a_t)            running maximum, m_0 = past_key_max or LOWEST
    key_features    exp(a_t - m_t)
    decay           g_t + m_{t-1} - m_t                                  <= 0
    query_features  exp(b_t + m_t - max_j (b_t + m_t))

Gated linear attention on these has state exp(-m_t) S_t and normaliser z = exp(-m_t) z_t, so that
the ratio of numerator and denominator is that of exp(b) and exp(a), exactly. Every normaliser is at
least 1 and the largest query feature is 1: the denominator is at least 1 at any scale of the
inputs. One maximum for all features is not enough: where the best feature of a query is not that of
the keys, all products underflow.

``causal = 0`` takes the maximum over the whole sequence, and there is nothing to decay. A masked
token has the exponent LOWEST. A query head has the maximum of its key head; heads are shared as in
LinearAttention, and query_features has the larger number of heads.
Source: the running maximum of online softmax, Milakov and Gimelshein 2018, per feature.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import defs, helper

from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Inputs,
    Node,
    Op,
    StatePort,
    parameter,
    reads_causal,
)
from linexport.plugins.ops.shapes import (
    PartialShape,
)
from linexport.plugins.ops.stabilized_exp.definition import (
    INPUTS,
    LOWEST,
    Array,
    check,
    eager,
    heads_of,
    stabilized_exp,
    width_of,
)
from linexport.plugins.ops.stabilized_exp.portable import portable

__all__ = ["INPUTS", "LOWEST", "OP", "check", "stabilized_exp", "width_of"]


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    heads = (attributes["q_num_heads"], attributes["k_num_heads"])
    return stabilized_exp(*heads, reads_causal(attributes), **inputs)


def _infer(node: Node) -> Sequence[PartialShape]:
    features, (batch, length, _) = width_of(node), node.shapes["query"]
    query_heads, heads = (int(node.attributes[n]) for n in ("q_num_heads", "k_num_heads"))
    keys = (batch, length, heads * features)
    query = (batch, length, max(query_heads, heads) * features)
    return [query, keys, keys, (batch, heads, features)]


def _describe(node: Node) -> str:
    query_heads, heads = heads_of(node.attributes)
    kind = "causal" if reads_causal(node.attributes) else "bidirectional"
    return f"{kind}, {query_heads} query, {heads} key heads of {width_of(node)}"


def _states(node: Node) -> list[StatePort]:
    if not reads_causal(node.attributes):
        return []
    shape = (int(node.attributes["k_num_heads"]), width_of(node))
    return [StatePort(2, 3, "key_max", shape, initial_value=LOWEST)]


_FLOAT = ["tensor(float)"]

OP = Op(
    schema=defs.OpSchema(
        "StabilizedExp",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("query", "T", "(B, T, H_q * M), exponents"),
            parameter("key", "T", "(B, T, H_k * M), exponents"),
            parameter("past_key_max", "T", "(B, H_k, M)", "Optional"),
            parameter("key_mask", "tensor(bool)", "(B, T), False: padded token", "Optional"),
            parameter("decay", "T", "(B, T, H_k) or (B, T, H_k * M), log space", "Optional"),
        ],
        outputs=[
            parameter("query_features", "T", "(B, T, max(H_q, H_k) * M)"),
            parameter("key_features", "T", "(B, T, H_k * M)"),
            parameter("present_decay", "T", "(B, T, H_k * M), for LinearAttention", "Optional"),
            parameter("present_key_max", "T", "(B, H_k, M)", "Optional"),
        ],
        type_constraints=[("T", _FLOAT, "Exponents carry all digits of float32.")],
        attributes=[
            defs.OpSchema.Attribute("q_num_heads", defs.OpSchema.AttrType.INT, "H_q."),
            defs.OpSchema.Attribute("k_num_heads", defs.OpSchema.AttrType.INT, "H_k."),
            defs.OpSchema.Attribute("causal", helper.make_attribute("causal", 1)),
        ],
    ),
    infer=_infer,
    portable=portable,
    torch_schema="""stabilized_exp(
        Tensor query, Tensor key, Tensor? past_key_max, Tensor? key_mask, Tensor? decay,
        int q_num_heads, int k_num_heads, int causal
    ) -> (Tensor, Tensor, Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys(
        ("query", "key", "key_mask", "decay", "query_features", "key_features", "present_decay"), 1
    ),
    causal=reads_causal,
    states=_states,
    kernels="linexport.plugins.kernels.plans.stabilized_exp",
    describe=_describe,
    summary="Exponential features, kept from overflowing.",
)
