"""Forms of a mixture of experts in ONNX Runtime: milliseconds, interleaved medians.

    python tools/bench_experts.py [--experts 8] [--chosen 2] [--hidden 512] [--inner 256]
                                  [--activation silu] [--ungated]
                                  [--tokens 1,16,64,512] [--prefer 0] [--threads 2]
                                  [--json FILE]

    portable       the op's own body: pairs sorted by expert, a Scan over the experts
    library        the CPU library
    every_expert   all tokens through all experts
    gathered       the weights of k experts gathered for every token (gated SiLU)
    kernel         com.microsoft.MoE, routed by logarithms of the weights (gated SiLU)
    int8, int4     weights in 8 or 4 bits, as quantised artifacts have them: com.microsoft.QMoE, or
                   com.microsoft.MatMulNBits for each expert
    twice          int4 by QMoE where artifacts do not have it (relu2): g sigmoid(a g) v with both
                   rows the same and a large a

``--prefer S`` makes expert i likelier by (i + 1)^-S, as routers that do not spread tokens do.
"""

from __future__ import annotations

import argparse
from typing import Any

import measurement
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops import mixture_of_experts as op
from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.op import DOMAIN, Node
from linexport.quantization.block_quantisation import Grid, nearest
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.experts import find_experts
from linexport.quantization.rewrite import quantised_model
from linexport.targets.base import OrtSession
from linexport.timing.latency import Settings, interleaved

LIBRARY = "library"
BITS = {"int8": 8, "int4": 4, "twice": 4}

STEEP = 1e30
"""A slope that makes a sigmoid a step: g sigmoid(a g) g is then relu(g)^2."""

LARGEST = 2**32
"""Bytes of gathered weights above which that form is not measured."""


def body_of(form: str, attributes: dict[str, Any], shapes: dict[str, Any]) -> tuple[Body, str]:
    """Nodes of a form, and its output."""
    node = Node("MixtureOfExperts", attributes, op.INPUTS, shapes)
    if form in ("portable", "every_expert"):
        write = op.OP.portable if form == "portable" else op.every_expert
        body, [y] = write(node)
        return body, y
    return (_gathered if form == "gathered" else _kernel)(shapes)


def _gathered(shapes: dict[str, Any]) -> tuple[Body, str]:
    b = Body()
    x = b.Unsqueeze("x", b.const([1, 3]))
    h = b.MatMul(b.Gather("up", "index"), x)
    gate, value = b.Split(h, outputs=2, axis=2, num_outputs=2)
    h = b.Mul(b.Mul(gate, b.Sigmoid(gate)), value)
    y = b.Squeeze(b.MatMul(b.Gather("down", "index"), h), b.const([3]))
    share = b.Unsqueeze("weight", b.const([1]))
    return b, b.Squeeze(b.MatMul(share, y), b.const([1]))


def _kernel(shapes: dict[str, Any]) -> tuple[Body, str]:
    b = Body()
    experts, inner = shapes["down"][0], shapes["down"][2]
    tokens = b.Shape("x", start=0, end=1)
    never = b.Expand(b.const(-1e30), b.Concat(tokens, b.const([experts]), axis=0))
    rows = np.arange(2 * inner).reshape(2, inner).T.ravel()
    y = b.node(
        "MoE",
        "x",
        b.ScatterElements(never, "index", b.Log("weight"), axis=1),
        b.Gather("up", b.const(rows), axis=1),
        "",
        "down",
        domain=MICROSOFT,
        k=shapes["index"][1],
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
    )
    return b, b.Mul(y, b.ReduceSum("weight", b.const([1]), keepdims=1))


def _quantised(
    model: onnx.ModelProto, weights: dict[str, np.ndarray], bits: int
) -> onnx.ModelProto:
    found, _ = find_experts(model, weights)
    made = {
        w.name: Chosen(w, nearest(w.matrix(weights[w.name]), Grid(bits, w.block)), "nearest")
        for w in found
    }
    return quantised_model(model, made)


def session(
    form: str,
    attributes: dict[str, Any],
    shapes: dict[str, Any],
    weights: dict[str, np.ndarray],
    threads: int,
) -> OrtSession:
    """A form with its weights in the model."""
    if form == "twice":
        attributes = {"activation": "silu", "gated": 1}
        weights = {**weights, "up": np.concatenate([weights["up"]] * 2, 1)}
    if form in (LIBRARY, *BITS):
        nodes = [helper.make_node(op.OP.name, list(op.INPUTS), ["y"], domain=DOMAIN, **attributes)]
    else:
        body, y = body_of(form, attributes, shapes)
        nodes = [*body.nodes, helper.make_node("Identity", [y], ["y"])]
    typed = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        form,
        [
            typed(n, TensorProto.INT64 if n == "index" else TensorProto.FLOAT, shapes[n])
            for n in ("x", "index", "weight")
        ],
        [typed("y", TensorProto.FLOAT, ["N", shapes["down"][1]])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if form in BITS:
        model = _quantised(model, weights, BITS[form])
    if form == "twice":
        [slope] = [a for n in model.graph.node for a in n.attribute if a.name == "activation_alpha"]
        slope.f = STEEP
    native = form == LIBRARY
    return OrtSession(model.SerializeToString(), threads, taking_turns=True, native=native)


def main() -> None:
    """Print a row for every number of tokens."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--experts", type=int, default=8)
    options.add_argument("--chosen", type=int, default=2)
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--inner", type=int, default=256)
    options.add_argument("--activation", choices=op.ACTIVATIONS, default="silu")
    options.add_argument("--ungated", action="store_true")
    options.add_argument("--tokens", default="1,16,64,512")
    options.add_argument("--prefer", type=float, default=0.0)
    options.add_argument("--threads", type=int, default=2)
    measurement.add_option(options)
    given = options.parse_args()
    experts, chosen, hidden, inner = given.experts, given.chosen, given.hidden, given.inner
    shapes = {
        "x": ("N", hidden),
        "index": ("N", chosen),
        "weight": ("N", chosen),
        "up": (experts, inner if given.ungated else 2 * inner, hidden),
        "down": (experts, hidden, inner),
    }
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.standard_normal(shapes[name]) / shapes[name][2] ** 0.5).astype(np.float32)
        for name in ("up", "down")
    }
    function = op.ExpertFunction(given.activation, not given.ungated)
    attributes = {"activation": given.activation, "gated": int(function.gated)}
    names = ["portable", LIBRARY, "every_expert", "int8", "int4"]
    more = {
        op.ExpertFunction("silu", True): ["gathered", "kernel"],
        op.ExpertFunction("relu2", False): ["twice"],
    }
    names += more.get(function, [])
    forms = {form: session(form, attributes, shapes, weights, given.threads) for form in names}
    one = sum(array[0].nbytes for array in weights.values())
    rows = []
    for tokens in map(int, given.tokens.split(",")):
        liking = rng.gumbel(size=(tokens, experts)) - given.prefer * np.log1p(np.arange(experts))
        x = {
            "x": rng.standard_normal((tokens, hidden)).astype(np.float32),
            "index": np.argsort(-liking, 1)[:, :chosen].astype(np.int64),
            "weight": rng.uniform(0.1, 1, (tokens, chosen)).astype(np.float32),
        }
        wide = {n: a if n == "index" else a.astype(np.float64) for n, a in x.items()}
        want = op.mixture_of_experts(function, **wide, **weights)
        calls = {}
        for form, opened in forms.items():
            if form == "gathered" and tokens * chosen * one > LARGEST:
                continue
            error = np.abs(opened.run(x)["y"] - want).max() / np.abs(want).max()
            assert error < (0.3 if form in BITS else 1e-5), (form, error)
            calls[form] = lambda opened=opened, x=x: opened.run(x)
        times = interleaved(calls, Settings(repeats=15, lead_in=1))
        medians = {form: round(float(np.median(t)), 2) for form, t in times.items()}
        rows.append({"tokens": tokens, "ms": medians})
        print(f"{tokens} tokens, {experts} experts, {chosen} chosen: {medians}", flush=True)
    record = {"experts": experts, "chosen": chosen, **attributes, "rows": rows}
    measurement.write(given.json, record)


if __name__ == "__main__":
    main()
