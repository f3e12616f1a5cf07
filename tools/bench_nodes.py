"""Operators that only ONNX Runtime has beside the nodes that target ort has in their place.

    python tools/bench_nodes.py [--json FILE]

Sizes are those of a layer of width 1024 with 16 heads of 128; in attention, 8 query heads on 2 for
keys and values, after 512 tokens. Each pair computes the same, on one thread and in turns. The
times are those of the processor, which other processes change least. A pass of target ort takes an
operator only where it is faster, for one token and for 512.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import measurement
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, parser

LENGTHS = {1: 200, 512: 15}
"""Tokens, and how often each form is timed."""

PAST = 512
TOLERANCE = 1e-5
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64}

random = np.random.default_rng(0)


@dataclass(frozen=True)
class Pair:
    """One computation in two forms.

    Attributes:
        inputs: shapes of float32 inputs; a size "t" is the number of tokens.
        outputs: names.
        constants: values by name.
        nodes: as artifacts have them, one a line.
        operator: the same with the operator.
        opset: that has the operator.
        integers: inputs that count tokens, see ``drawn``.
    """

    inputs: Mapping[str, list[int | str]]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    nodes: str
    operator: str
    opset: int = 20
    integers: tuple[str, ...] = ()


def normal(*shape: int) -> np.ndarray:
    """Return float32 numbers of standard deviation 0.1."""
    return (0.1 * random.standard_normal(shape)).astype(np.float32)


def sizes(*values: int) -> np.ndarray:
    """Return a shape, or other int64 numbers."""
    return np.array(values, np.int64)


def skip_norm() -> Pair:
    """A residual and the norm of it."""
    return Pair(
        {"a": [1, "t", 1024], "b": [1, "t", 1024]},
        ("y", "s"),
        {"w": normal(1024)},
        """s = Add(a, b)
        y = SimplifiedLayerNormalization<axis = -1, epsilon = 0.000001>(s, w)""",
        """y, m, v, s = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.000001>
            (a, b, w)""",
    )


def gated_norm() -> Pair:
    """A norm of every head times a gate."""
    return Pair(
        {"x": [1, "t", 2048], "g": [1, "t", 2048]},
        ("y",),
        {"w": normal(128), "rows": sizes(-1, 128), "packed": sizes(1, -1, 2048)},
        """x2 = Reshape(x, rows)
        g2 = Reshape(g, rows)
        n = SimplifiedLayerNormalization<axis = -1, epsilon = 0.000001>(x2, w)
        a = com.microsoft.QuickGelu<alpha = 1.0>(g2)
        p = Mul(n, a)
        y = Reshape(p, packed)""",
        'y = com.microsoft.GatedRMSNorm<epsilon = 0.000001, activation = "silu">(x, w, g)',
    )


def attention_gate() -> Pair:
    """Decay and write strength of the gated delta rule."""
    return Pair(
        {"a": [1, "t", 16], "b": [1, "t", 16]},
        ("decay", "beta"),
        {"bias": normal(16), "scale": normal(16)},
        """s = Add(a, bias)
        p = Softplus(s)
        decay = Mul(p, scale)
        beta = Sigmoid(b)""",
        "decay, beta = com.microsoft.LinearAttentionGate(a, bias, scale, b)",
    )


def rotary() -> Pair:
    """A quarter of the channels of every head turned."""
    return Pair(
        {"x": [1, 8, "t", 128], "cos": [1, "t", 16], "sin": [1, "t", 16]},
        ("y",),
        {"turned": sizes(32, 96), "halves": sizes(16, 16), "rows": sizes(-1, 16), "one": sizes(1)},
        """cos2 = Concat<axis = -1>(cos, cos)
        sin2 = Concat<axis = -1>(sin, sin)
        cos4 = Unsqueeze(cos2, one)
        sin4 = Unsqueeze(sin2, one)
        r, rest = Split<axis = 3>(x, turned)
        r1, r2 = Split<axis = 3>(r, halves)
        n = Neg(r2)
        c = Concat<axis = -1>(n, r1)
        m = Mul(r, cos4)
        k = Mul(c, sin4)
        a = Add(m, k)
        y = Concat<axis = -1>(a, rest)""",
        """cos1 = Reshape(cos, rows)
        sin1 = Reshape(sin, rows)
        y = com.microsoft.RotaryEmbedding<num_heads = 8, rotary_embedding_dim = 32>
            (x, positions, cos1, sin1)""",
        integers=("positions",),
    )


def attention(operator: str, opset: int = 20) -> Pair:
    """Softmax attention with a cache, rotary embeddings aside."""
    return Pair(
        {
            "q": [1, "t", 1024],
            "k": [1, "t", 256],
            "v": [1, "t", 256],
            "pk": [1, 2, PAST, 128],
            "pv": [1, 2, PAST, 128],
            "mask": [1, 1, "t", "s"],
        },
        ("y", "key", "value"),
        {
            "queries": sizes(0, 0, 8, 128),
            "keys": sizes(0, 0, 2, 128),
            "group": sizes(0, 2, -1, 128),
            "packed": sizes(0, 0, 1024),
            "heads": sizes(1, 8, 1, 1),
        },
        """q4 = Reshape(q, queries)
        k4 = Reshape(k, keys)
        v4 = Reshape(v, keys)
        qt = Transpose<perm = [0, 2, 1, 3]>(q4)
        kt = Transpose<perm = [0, 2, 1, 3]>(k4)
        vt = Transpose<perm = [0, 2, 1, 3]>(v4)
        key = Concat<axis = 2>(pk, kt)
        value = Concat<axis = 2>(pv, vt)
        rows = Reshape(qt, group)
        scores = com.microsoft.FusedMatMul<transB = 1, alpha = 0.08838834764>(rows, key)
        one_head = Shape(mask)
        all_heads = Mul(one_head, heads)
        scores4 = Reshape(scores, all_heads)
        masked = Add(scores4, mask)
        weights = Softmax<axis = -1>(masked)
        grouped = Shape(scores)
        weights3 = Reshape(weights, grouped)
        out = MatMul(weights3, value)
        by_head = Shape(qt)
        out4 = Reshape(out, by_head)
        tokens = Transpose<perm = [0, 2, 1, 3]>(out4)
        y = Reshape(tokens, packed)""",
        operator,
        opset,
        ("last", "total") if "last" in operator else (),
    )


def convolution() -> Pair:
    """The short convolution of every channel."""
    weight = normal(4096, 1, 4)
    return Pair(
        {"x": [1, "t", 4096], "past": [1, 4096, 3]},
        ("y", "present"),
        {
            "w": weight,
            "w4": weight[:, :, None],
            "one": sizes(1),
            "last": sizes(-3),
            "end": sizes(2**62),
            "rows": sizes(0, -1, 4096),
        },
        """before = Transpose<perm = [0, 2, 1]>(past)
        seen = Concat<axis = 1>(before, x)
        u = Unsqueeze(seen, one)
        i = Transpose<perm = [0, 3, 1, 2]>(u)
        c = Conv<group = 4096>(i, w4)
        a = com.microsoft.QuickGelu<alpha = 1.0>(c)
        o = Transpose<perm = [0, 2, 3, 1]>(a)
        y = Reshape(o, rows)
        z = Slice(seen, last, end, one)
        present = Transpose<perm = [0, 2, 1]>(z)""",
        """xt = Transpose<perm = [0, 2, 1]>(x)
        yt, present = com.microsoft.CausalConvWithState<activation = "silu">(xt, w, , past)
        y = Transpose<perm = [0, 2, 1]>(yt)""",
    )


def joined() -> Pair:
    """A gated feed-forward layer's first two products."""
    gate, up = normal(1024, 3584), normal(1024, 3584)
    both = np.concatenate([gate, up], 1)
    return Pair(
        {"x": [1, "t", 1024]},
        ("y",),
        {"gate": gate, "up": up, "both": both, "halves": sizes(3584, 3584)},
        """g = MatMul(x, gate)
        u = MatMul(x, up)
        a = com.microsoft.QuickGelu<alpha = 1.0>(g)
        y = Mul(a, u)""",
        """b = MatMul(x, both)
        g, u = Split<axis = -1>(b, halves)
        a = com.microsoft.QuickGelu<alpha = 1.0>(g)
        y = Mul(a, u)""",
    )


def pairs() -> dict[str, Pair]:
    """Return all pairs, by what takes the nodes' place."""
    grouped = """y, key, value = com.microsoft.GroupQueryAttention<num_heads = 8, kv_num_heads = 2>
            (q, k, v, pk, pv, last, total, , , , mask)"""
    standard = """y, key, value = Attention<q_num_heads = 8, kv_num_heads = 2>
            (q, k, v, mask, pk, pv)"""
    return {
        "RotaryEmbedding": rotary(),
        "LinearAttentionGate": attention_gate(),
        "SkipSimplifiedLayerNormalization": skip_norm(),
        "GatedRMSNorm": gated_norm(),
        "GroupQueryAttention": attention(grouped),
        "Attention of opset 23": attention(standard, 23),
        "CausalConvWithState": convolution(),
        "one product for two of an input": joined(),
    }


def opened(pair: Pair, body: str, feeds: Mapping[str, np.ndarray]) -> onnxruntime.InferenceSession:
    """Open one form on one thread."""
    head = f'<ir_version: 10, opset_import: ["": {pair.opset}, "com.microsoft": 1]>'
    model = parser.parse_model(f"{head} form () => () {{ {body} }}")
    used = {name for node in model.graph.node for name in node.input}
    model.graph.input.extend(
        helper.make_tensor_value_info(name, TYPES[value.dtype.name], [None] * value.ndim)
        for name, value in feeds.items()
        if name in used
    )
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in pair.outputs
    )
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name)
        for name, value in pair.constants.items()
        if name in used
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def drawn(pair: Pair, tokens: int) -> dict[str, np.ndarray]:
    """Return inputs for so many tokens."""
    total = PAST + tokens
    known = {"t": tokens, "s": total}
    feeds = {
        name: normal(*(size if isinstance(size, int) else known[size] for size in shape))
        for name, shape in pair.inputs.items()
    }
    if "mask" in feeds:
        seen = np.arange(total) <= np.arange(PAST, total)[:, None]
        feeds["mask"] = np.where(seen, 0, -3e38).astype(np.float32)[None, None]
    numbers = {
        "positions": np.arange(tokens, dtype=np.int64)[None],
        "last": np.array([total - 1], np.int32),
        "total": np.array(total, np.int32),
    }
    return {**feeds, **{name: numbers[name] for name in pair.integers}}


def measure(pair: Pair, tokens: int, repeats: int) -> dict[str, float]:
    """Return the median microseconds of both forms.

    Raises:
        SystemExit: they differ.
    """
    feeds = drawn(pair, tokens)
    forms = {"nodes": pair.nodes, "operator": pair.operator}
    calls = {}
    for form, body in forms.items():
        session = opened(pair, body, feeds)
        given = {i.name: feeds[i.name] for i in session.get_inputs()}
        calls[form] = (session, given)
    expected, got = (session.run(None, given) for session, given in calls.values())
    for a, b in zip(expected, got, strict=True):
        if not np.abs(a - b).max() <= TOLERANCE * np.abs(a).max():
            raise SystemExit(f"the forms differ by {np.abs(a - b).max():.1e}")
    times: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(repeats):
        for form, (session, given) in calls.items():
            session.run(None, given)
            start = time.thread_time()
            session.run(None, given)
            times[form].append(1e6 * (time.thread_time() - start))
    return {form: round(statistics.median(values), 1) for form, values in times.items()}


def main() -> None:
    """Measure all pairs, and print how many times as fast as the nodes each operator is."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measurement.add_option(options)
    given = options.parse_args()
    rows = []
    for name, pair in pairs().items():
        found = {str(t): measure(pair, t, repeats) for t, repeats in LENGTHS.items()}
        rows.append({"operator": name, "microseconds": found})
        speeds = [f"{f['nodes'] / f['operator']:.2f}" for f in found.values()]
        print(f"{name}: {' and '.join(speeds)} times as fast", flush=True)
    measurement.write(given.json, rows)


if __name__ == "__main__":
    main()
