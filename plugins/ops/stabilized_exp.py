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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import defs, helper

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Node,
    Op,
    StatePort,
    parameter,
    reads_causal,
)
from linexport.plugins.ops.shapes import (
    Shape,
    one_of,
    rank,
    same_dim,
    same_sequence,
    static_width,
    width_per_head,
)

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = -1e30
"""The maximum of no keys: finite, so that differences are; far below any exponent."""

INPUTS = ("query", "key", "past_key_max", "key_mask", "decay")

Array = NDArray[np.float64]


def check(
    q_num_heads: object,
    k_num_heads: object,
    causal: object,
    query: Shape,
    key: Shape,
    past_key_max: Shape | None = None,
    key_mask: Shape | None = None,
    decay: Shape | None = None,
) -> int:
    """M, once attributes and shapes have been compared.

    Raises:
        OpError: they contradict each other.
    """
    for name, heads in (("q_num_heads", q_num_heads), ("k_num_heads", k_num_heads)):
        if not isinstance(heads, int) or heads < 1:
            raise OpError(f"StabilizedExp has {name} {heads!r}; expected at least 1.")
    assert isinstance(q_num_heads, int)
    assert isinstance(k_num_heads, int)
    larger, smaller = max(q_num_heads, k_num_heads), min(q_num_heads, k_num_heads)
    if larger % smaller:
        raise OpError(f"{larger} heads do not share {smaller}: expected a multiple.")
    features = width_per_head("query", query, q_num_heads)
    if static_width("key", key) != features * k_num_heads:
        raise OpError(f"key has width {key[-1]}; expected {k_num_heads} heads of {features}.")
    if not causal and (past_key_max is not None or decay is not None):
        raise OpError("causal=0 reads the whole sequence at once; it takes no past and no decay.")
    batch, length = query[0], query[1]
    for name, other, dims in (("key", key, 3), ("key_mask", key_mask, 2), ("decay", decay, 3)):
        if other is not None:
            same_sequence(name, other, batch, length, dims)
    if past_key_max is not None:
        rank("past_key_max", past_key_max, 3)
        same_dim("past_key_max", "batch", past_key_max[0], batch)
        same_dim("past_key_max", "heads", past_key_max[1], k_num_heads)
        same_dim("past_key_max", "features", past_key_max[2], features)
    if decay is not None:
        widths = (k_num_heads, k_num_heads * features)
        one_of("decay", static_width("decay", decay), widths)
    return features


def stabilized_exp(
    q_num_heads: int,
    k_num_heads: int,
    causal: bool,
    query: Array,
    key: Array,
    past_key_max: Array | None = None,
    key_mask: NDArray[np.bool_] | None = None,
    decay: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The definition above in float64, token by token.

    query_features (B, T, max(H_q, H_k) * M), key_features and decay (B, T, H_k * M), and
    present_key_max (B, H_k, M).

    Raises:
        OpError: shapes that do not fit.
    """
    optional = (None if x is None else x.shape for x in (past_key_max, key_mask, decay))
    features = check(q_num_heads, k_num_heads, causal, query.shape, key.shape, *optional)
    batch, length = query.shape[:2]
    heads, served = k_num_heads, max(q_num_heads, k_num_heads)
    a = np.float64(key).reshape(batch, length, heads, features)
    b = np.float64(query).reshape(batch, length, q_num_heads, features)
    b = np.repeat(b, served // q_num_heads, axis=2)
    g = np.zeros(a.shape)
    if decay is not None:
        per_head = decay.shape[2] // heads
        g = g + np.float64(decay).reshape(batch, length, heads, per_head)
    if key_mask is not None:
        a = np.where(key_mask[:, :, None, None], a, LOWEST)
        g = np.where(key_mask[:, :, None, None], g, 0.0)
    m = np.full((batch, heads, features), LOWEST)
    if past_key_max is not None:
        m = np.asarray(past_key_max, np.float64)
    if not causal:
        m = a.max(1, initial=LOWEST)
    phi_q, phi_k, decays = np.zeros(b.shape), np.zeros(a.shape), np.zeros(a.shape)
    for t in range(length):
        before = m
        if causal:
            m = np.maximum(m + g[:, t], a[:, t])
            decays[:, t] = g[:, t] + before - m
        phi_k[:, t] = np.exp(a[:, t] - m)
        exponent = b[:, t] + np.repeat(m, served // heads, axis=1)
        phi_q[:, t] = np.exp(exponent - exponent.max(-1, keepdims=True))
    packed = (x.reshape(batch, length, x.shape[2] * features) for x in (phi_q, phi_k, decays))
    return (*packed, m)  # type: ignore[return-value]


def eager(
    query: Tensor,
    key: Tensor,
    past_key_max: Tensor | None,
    key_mask: Tensor | None,
    decay: Tensor | None,
    q_num_heads: int,
    k_num_heads: int,
    causal: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the op's outputs, in differentiable PyTorch and at least float32.

    The maximum is taken without a gradient: attention that normalises does not depend on it.
    """
    import torch

    inputs = (query, key, past_key_max, key_mask, decay)
    shapes = (None if x is None else tuple(x.shape) for x in inputs)
    features = check(q_num_heads, k_num_heads, causal, *shapes)  # type: ignore[arg-type]
    dtype = torch.promote_types(query.dtype, torch.float32)
    b, a = query.to(dtype), key.to(dtype)
    if decay is not None:
        decay = decay.to(dtype).unflatten(-1, (k_num_heads, -1))
        decay = decay.expand(*decay.shape[:-1], features).flatten(-2)
    if key_mask is not None:
        a = torch.where(key_mask[..., None], a, LOWEST)
        decay = None if decay is None else torch.where(key_mask[..., None], decay, 0.0)
    start = a.new_full((a.shape[0], 1, a.shape[2]), LOWEST)
    if past_key_max is not None:
        start = past_key_max.to(dtype).flatten(1).unsqueeze(1)
    with torch.no_grad():
        seen = torch.cat([start, a], 1)
        running = seen.cummax(1).values if decay is None else _decayed_max(seen, decay)
        maximum = running[:, 1:] if causal else running[:, -1:].expand_as(a)
        lost = running[:, :-1] - maximum if causal else torch.zeros_like(a)
    served = max(q_num_heads, k_num_heads)
    heads = b.unflatten(-1, (q_num_heads, features))
    heads = heads.repeat_interleave(served // q_num_heads, 2).unflatten(2, (k_num_heads, -1))
    exponent = heads + maximum.unflatten(-1, (k_num_heads, 1, features))
    exponent = exponent - exponent.detach().amax(-1, keepdim=True)
    return (
        exponent.exp().flatten(2),
        (a - maximum).exp(),
        lost if decay is None else decay + lost,
        running[:, -1].unflatten(-1, (k_num_heads, features)),
    )


def _decayed_max(seen: Tensor, decay: Tensor) -> Tensor:
    """Return m_t = max(m_{t-1} + g_t, a_t) for a_0, a_1 ... and g_1, g_2 ...

    Over windows whose length doubles, so that decays are added up and never subtracted.
    """
    import torch

    g = torch.cat([torch.zeros_like(seen[:, :1]), decay], 1)
    m, size = seen, 1
    while size < seen.shape[1]:
        reached = torch.maximum(m[:, size:], m[:, :-size] + g[:, size:])
        m = torch.cat([m[:, :size], reached], 1)
        g = torch.cat([g[:, :size], g[:, size:] + g[:, :-size]], 1)
        size *= 2
    return m


def _heads(attributes: Attributes) -> tuple[object, object]:
    return attributes.get("q_num_heads"), attributes.get("k_num_heads")


def _oracle(attributes: Attributes, inputs: Mapping[str, Any]) -> tuple[Array, ...]:
    heads = (attributes["q_num_heads"], attributes["k_num_heads"])
    return stabilized_exp(*heads, reads_causal(attributes), **inputs)


def _features(node: Node) -> int:
    return check(*_heads(node.attributes), reads_causal(node.attributes), **node.shapes)


def _infer(node: Node) -> Sequence[Shape]:
    features, (batch, length, _) = _features(node), node.shapes["query"]
    query_heads, heads = (int(node.attributes[n]) for n in ("q_num_heads", "k_num_heads"))
    keys = (batch, length, heads * features)
    query = (batch, length, max(query_heads, heads) * features)
    return [query, keys, keys, (batch, heads, features)]


def _describe(node: Node) -> str:
    query_heads, heads = _heads(node.attributes)
    kind = "causal" if reads_causal(node.attributes) else "bidirectional"
    return f"{kind}, {query_heads} query, {heads} key heads of {_features(node)}"


def _states(node: Node) -> list[StatePort]:
    if not reads_causal(node.attributes):
        return []
    shape = (int(node.attributes["k_num_heads"]), _features(node))
    return [StatePort(2, 3, "key_max", shape, initial_value=LOWEST)]


def _portable(node: Node) -> tuple[Body, list[str]]:
    """The running maximum by a Scan over tokens.

    Its body is a maximum and a difference. Measured on ONNX Runtime, that is faster at every length
    and width than shifts by powers of two within chunks, which pass over memory again and again.
    """
    b = Body()
    features = _features(node)
    query_heads, heads = (int(node.attributes[n]) for n in ("q_num_heads", "k_num_heads"))
    query, key, past, mask, decay = node.inputs
    width = heads * features
    if mask:
        keep = b.Unsqueeze(mask, b.const([2]))
        key = b.Where(keep, key, b.const(LOWEST))
        decay = decay and b.Where(keep, decay, b.const(0.0))
    if decay and node.shapes["decay"][-1] != width:
        decay = b.Gather(decay, b.const(np.repeat(np.arange(heads), features)), axis=2)
    if reads_causal(node.attributes):
        batch = b.Shape(key, start=0, end=1)
        start = b.Expand(b.const(LOWEST), b.Concat(batch, b.const([width]), axis=0))
        if past:
            start = b.Reshape(past, b.const([0, width]))
        last, maximum, decay = _running(b, start, key, decay)
    else:
        lowest = b.Expand(b.const(LOWEST), b.Concat(*_row(b, key, width), axis=0))
        maximum = b.ReduceMax(b.Concat(lowest, key, axis=1), b.const([1]), keepdims=1)
        last, decay = b.Squeeze(maximum, b.const([1])), b.Mul(key, b.const(0.0))
    key_features = b.Exp(b.Sub(key, maximum))
    served = max(query_heads, heads)
    split = b.Reshape(query, b.const([0, 0, query_heads, features]))
    if query_heads != served:
        index = b.const(np.repeat(np.arange(query_heads), served // query_heads))
        split = b.Gather(split, index, axis=2)
    grouped = b.Reshape(split, b.const([0, 0, heads, served // heads, features]))
    exponent = b.Add(grouped, b.Reshape(maximum, b.const([0, 0, heads, 1, features])))
    exponent = b.Sub(exponent, b.ReduceMax(exponent, b.const([-1]), keepdims=1))
    query_features = b.Reshape(b.Exp(exponent), b.const([0, 0, served * features]))
    present = b.Reshape(last, b.const([0, heads, features]))
    return b, [query_features, key_features, decay, present]


def _row(b: Body, key: str, width: int) -> tuple[str, str, str]:
    """The shape (B, 1, width)."""
    return b.Shape(key, start=0, end=1), b.const([1]), b.const([width])


def _running(b: Body, start: str, key: str, decay: str) -> tuple[str, str, str]:
    """Last maximum (B, H*M), all of them and the decays (B, T, H*M).

    Where there are no tokens there is no Scan: ONNX Runtime's divides by their number.
    """
    some, none = Body(b), Body(b)
    cell = Body(some)
    m, a, g = (cell.fresh(n) for n in "mag")
    before = cell.Add(m, g) if decay else m
    after = cell.Max(before, a)
    scanned = [a, *([g] if decay else [])]
    outputs = [after, cell.Identity(after), cell.Sub(before, after)]
    found = some.Scan(
        start,
        *(some.Transpose(x, perm=[1, 0, 2]) for x in (key, decay) if x),
        outputs=3,
        body=cell.subgraph("token", [m, *scanned], outputs),
        num_scan_inputs=len(scanned),
    )
    found = [found[0], *(some.Transpose(x, perm=[1, 0, 2]) for x in found[1:])]
    kept = [none.Identity(x) for x in (start, key, key)]
    length = b.Squeeze(b.Shape(key, start=1, end=2), b.const([0]))
    last, maximum, decays = b.If(
        b.Greater(length, b.const(0)),
        outputs=3,
        then_branch=some.subgraph("tokens", [], found),
        else_branch=none.subgraph("nothing", [], kept),
    )
    return last, maximum, decays


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
    portable=_portable,
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
    describe=_describe,
    summary="Exponential features, kept from overflowing.",
)
