"""The nodes that are checked and timed on a GPU."""

from __future__ import annotations

from gpu.attention import Attention
from gpu.case import Case
from gpu.layer import Layer
from gpu.others import Convolution, Exponentials, Map

PREFILL = {"batch": 8, "length": 8192}
LONG = {"batch": 1, "length": 131072}
DECODE = {"batch": 256, "length": 1}
SINGLE = {"batch": 2, "length": 8192, "dtype": "float32"}
HALF = {**PREFILL, "dtype": "float16"}
ELU1 = {"normalize": True, "feature_map": "elu1"}
RELU = {"normalize": True, "feature_map": "relu"}
QWEN = {"heads": 32, "shared": 16}
"""Heads of the values, and of the queries and keys, of Qwen3-Next and of Qwen3.5."""
CASES: tuple[Case, ...] = (
    Attention("prefill linear", **PREFILL, target=1.6, peer="linear"),
    Attention("prefill linear elu1 normalised", **PREFILL, **ELU1),
    Attention("prefill gated", rule="gated", **PREFILL, target=1.6, peer="simple_gla"),
    Attention("prefill gated per channel", rule="gated", **PREFILL, channel=True, peer="gla"),
    Attention("prefill delta", rule="delta", **PREFILL, peer="delta"),
    Attention("prefill gated delta", rule="gated_delta", **PREFILL, peer="gated_delta"),
    Attention(
        "prefill gated delta per channel", rule="gated_delta", **PREFILL, channel=True, peer="kda"
    ),
    Attention("bidirectional relu", **PREFILL, **RELU, causal=False),
    Attention("long linear", **LONG, target=2.0, peer="linear"),
    Attention("long gated", rule="gated", **LONG, target=2.0, peer="simple_gla"),
    Attention("long gated delta", rule="gated_delta", **LONG, peer="gated_delta"),
    Attention("decode linear", **DECODE, target=1.3, peer="linear step"),
    Attention(
        "decode gated delta", rule="gated_delta", **DECODE, target=1.3, peer="gated_delta step"
    ),
    Attention("decode gated delta B=1", rule="gated_delta", batch=1, length=1),
    Attention("decode gated delta of 2 tokens", rule="gated_delta", batch=1, length=2),
    Attention("decode gated delta of 5 tokens", rule="gated_delta", batch=1, length=5),
    Attention("Qwen3-Next", rule="gated_delta", **PREFILL, heads=32, shared=16),
    Attention("Mamba2", rule="gated", **PREFILL, heads=24, shared=1, value_width=64),
    Attention("grouped values", rule="gated", **PREFILL, shared=4),
    Attention("grouped queries", rule="gated", **PREFILL, heads=4, queries=16),
    Attention("grouped queries gated delta", rule="gated_delta", **PREFILL, heads=4, queries=16),
    Attention("grouped queries elu1", **PREFILL, **ELU1, heads=4, queries=16),
    Attention("ragged batch", rule="gated_delta", **PREFILL, masked=True),
    Attention("ragged batch elu1", **PREFILL, **ELU1, masked=True),
    Attention("prefill linear d=48", **PREFILL, heads=32, width=48),
    Attention("prefill linear d=64", **PREFILL, heads=32, width=64),
    Attention("prefill gated d=80", rule="gated", **PREFILL, width=80),
    Attention("prefill gated delta d=100", rule="gated_delta", **PREFILL, width=100),
    Attention("prefill gated d=256", rule="gated", batch=4, length=8192, width=256),
    Attention("prefill gated values d=80", rule="gated", **PREFILL, value_width=80),
    Attention("prefill elu1", **PREFILL, feature_map="elu1"),
    Attention("prefill gated elu1 normalised", rule="gated", **PREFILL, **ELU1),
    Attention("prefill elu1 d=256", batch=4, length=8192, width=256, **ELU1),
    Attention("prefill exp", **PREFILL, width=64, normalize=True, feature_map="exp"),
    Attention("prefill taylor2 d=16", **PREFILL, width=16, feature_map="taylor2"),
    Attention("prefill quadratic d=16", **PREFILL, width=16, feature_map="quadratic"),
    Attention("prefill favor+ d=64", **PREFILL, width=64, feature_map="favor+"),
    Attention("prefill favor+", **PREFILL, feature_map="favor+", normalize=True),
    Attention("prefill linear float16", **HALF),
    Attention("prefill elu1 float16", **HALF, **ELU1),
    Attention("prefill gated float16", rule="gated", **HALF),
    Attention("prefill gated per channel float16", rule="gated", **HALF, channel=True),
    Attention("prefill gated delta float16", rule="gated_delta", **HALF),
    Attention("prefill gated delta per channel float16", rule="gated_delta", **HALF, channel=True),
    Attention("prefill gated float16 d=256", rule="gated", **HALF, heads=8, width=256),
    Attention("prefill favor+ float16", **HALF, feature_map="favor+", normalize=True),
    Attention("prefill linear float32", **SINGLE),
    Attention("prefill gated float32", rule="gated", **SINGLE),
    Attention("prefill gated float32 d=64", rule="gated", **SINGLE, width=64),
    Attention("prefill gated float32 d=256", rule="gated", **SINGLE, heads=8, width=256),
    Attention("prefill gated elu1 float32", rule="gated", **SINGLE, **ELU1),
    Attention("prefill gated per channel float32", rule="gated", **SINGLE, channel=True),
    Attention("prefill delta float32", rule="delta", **SINGLE),
    Attention("prefill gated delta float32", rule="gated_delta", **SINGLE),
    Attention("prefill gated delta float32 d=64", rule="gated_delta", **SINGLE, width=64),
    Attention(
        "prefill gated delta per channel float32", rule="gated_delta", **SINGLE, channel=True
    ),
    Attention("prefill elu1 float32", **SINGLE, **ELU1),
    Attention("prefill exp float32 d=64", **SINGLE, width=64, normalize=True, feature_map="exp"),
    Attention("prefill favor+ float32", **SINGLE, feature_map="favor+", normalize=True),
    Attention("prefill taylor2 float32 d=16", **SINGLE, width=16, feature_map="taylor2"),
    Attention("grouped queries elu1 float32", **SINGLE, **ELU1, heads=4, queries=16),
    Attention("bidirectional relu float32", **SINGLE, **RELU, causal=False),
    Exponentials("exponentials", **PREFILL, width=64, dtype="float32"),
    Exponentials("exponentials step", **DECODE, width=64, dtype="float32"),
    Exponentials("exponentials bidirectional", **PREFILL, width=64, dtype="float32", causal=False),
    Exponentials(
        "exponentials decayed, ragged, grouped",
        **PREFILL,
        width=64,
        dtype="float32",
        shared=4,
        decayed=True,
        masked=True,
    ),
    Attention(
        "prefill gated per channel normalised float32",
        **PREFILL,
        rule="gated",
        width=64,
        channel=True,
        normalize=True,
        dtype="float32",
    ),
    Convolution("convolution", **PREFILL),
    Convolution("convolution step", **DECODE),
    Convolution("convolution float32", **SINGLE),
    Map("map favor+", **PREFILL),
    Map("map taylor2 d=16", **PREFILL, width=16, kind="taylor2"),
    Map("map quadratic d=16", **PREFILL, width=16, kind="quadratic"),
    Layer("layer step", batch=1, length=1, **QWEN),
    Layer("layer of 2 tokens", batch=1, length=2, **QWEN),
    Layer("layer of 3 tokens", batch=1, length=3, **QWEN),
    Layer("layer of 4 tokens", batch=1, length=4, **QWEN),
    Layer("layer of 5 tokens", batch=1, length=5, **QWEN),
    Layer("layer step B=16", batch=16, length=1, **QWEN),
    Layer("layer step B=256", **DECODE, **QWEN),
    Layer("layer prefill", **PREFILL, **QWEN),
    Layer("layer step float32", batch=1, length=1, **QWEN, dtype="float32"),
    Layer("layer of 4 tokens float32", batch=1, length=4, **QWEN, dtype="float32"),
    Layer("layer prefill float32", **SINGLE, **QWEN),
    Convolution("convolution beside layer step", batch=1, length=1, heads=64),
    Attention("attention beside layer step", rule="gated_delta", batch=1, length=1, **QWEN),
    Convolution("convolution beside layer of 4 tokens", batch=1, length=4, heads=64),
    Attention("attention beside layer of 4 tokens", rule="gated_delta", batch=1, length=4, **QWEN),
)
