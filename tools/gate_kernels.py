#!/usr/bin/env python3
"""Assemble every shipped kernel: one row a kernel, and the gate it must pass.

    python tools/gate_kernels.py [--sm 80 87 ...] [--width 64 128]
                                 [--dtype float32 float16 bfloat16]
                                 [--case NAME ...] [--json FILE]

Needs no GPU. Cases are nodes of every op and rule whose kernels differ, with heads of ``width``
behind the feature map. Prints the rows that fail and a summary a compute capability; all rows go
into the JSON, with the blocks that a multiprocessor holds, asynchronous copies, and whether it is
the kernel that was planned: one that would spill is another. Exit code 0: all pass; 6: some do not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.layer import gated_delta_layer

from linexport.errors import BuildError, LinexportError
from linexport.models import feature_maps as feature_maps  # registers their formulas
from linexport.plugins.kernels.architectures import ARCHITECTURES
from linexport.plugins.kernels.compile import compile_kernels
from linexport.plugins.kernels.fit import fitting
from linexport.plugins.kernels.gate import LARGEST_SHARED, failures, instructions, occupancy
from linexport.plugins.kernels.launch import TYPES
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.plans import attention_layer
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec
from linexport.plugins.ops.op import Node

HEADS = 4
NARROW = {
    ("taylor2", 64): 9,
    ("taylor2", 128): 14,
    ("quadratic", 64): 10,
    ("quadratic", 128): 15,
}
"""Widths of a head whose products fill a block of 64 or 128 features."""


def attention(
    width: int,
    rule: str = "linear",
    *,
    channel: bool = False,
    normalize: bool = False,
    causal: bool = True,
    feature_map: str = "identity",
    queries: int = HEADS,
    masked: bool = False,
) -> Node:
    """A LinearAttention node with a past, d_k = d_v = ``width`` or little less."""
    spec = LinearAttentionSpec(
        queries, HEADS, rule, causal=causal, normalize=normalize, eps=1e-6 * normalize
    )
    before = NARROW.get((feature_map, width), width)
    d_k = {
        "taylor2": 1 + before + before * (before + 1) // 2,
        "quadratic": before * (before + 1) // 2,
    }.get(feature_map, width)
    shapes: dict[str, Any] = {
        "query": ("B", "T", queries * before),
        "key": ("B", "T", HEADS * before),
        "value": ("B", "T", HEADS * width),
    }
    if causal:
        shapes["past_state"] = ("B", HEADS, d_k, width)
        if normalize:
            shapes["past_normalizer"] = ("B", HEADS, d_k)
    if spec.has_decay:
        shapes["decay"] = ("B", "T", HEADS * (d_k if channel else 1))
    if spec.has_beta:
        shapes["beta"] = ("B", "T", HEADS)
    if masked:
        shapes["key_mask"] = ("B", "T")
    names = [name if name in shapes else "" for name in INPUTS]
    if feature_map == "favor+":
        names.append("parameter_0")
        shapes["parameter_0"] = (width, width)
    attributes = {**spec.attributes(), "feature_map": feature_map}
    return Node("LinearAttention", attributes, tuple(names), shapes)


def convolution(width: int) -> Node:
    """Four taps, with bias, SiLU and a past."""
    channels = HEADS * width
    shapes: dict[str, Any] = {
        "input": ("B", "T", channels),
        "weight": (channels, 1, 4),
        "bias": (channels,),
        "past_state": ("B", channels, 3),
    }
    return Node("CausalConvTokens", {"activation": "silu"}, tuple(shapes), shapes)


def exponentials(width: int, *optional: str, causal: bool = True) -> Node:
    """A StabilizedExp node of ``width`` features, grouped queries and the ``optional`` inputs."""
    shapes: dict[str, Any] = {
        "query": ("B", "T", 2 * HEADS * width),
        "key": ("B", "T", HEADS * width),
        "past_key_max": ("B", HEADS, width),
        "key_mask": ("B", "T"),
        "decay": ("B", "T", HEADS * width),
    }
    names = tuple(name if name in ("query", "key", *optional) else "" for name in shapes)
    shapes = {name: shapes[name] for name in names if name}
    attributes = {"q_num_heads": 2 * HEADS, "k_num_heads": HEADS, "causal": int(causal)}
    return Node("StabilizedExp", attributes, names, shapes)


def feature_map(kind: str, width: int, log: bool = False) -> Node:
    """On its own, ``width`` features a head."""
    before = NARROW.get((kind, width), width)
    shapes: dict[str, Any] = {"x": ("B", "T", HEADS * before)}
    if kind == "favor+":
        shapes["parameter_0"] = (width, width)
    attributes = {"kind": kind, "num_heads": HEADS, "log": int(log)}
    return Node("FeatureMap", attributes, tuple(shapes), shapes)


MAPS = ("relu", "elu1", "exp", "taylor2", "quadratic", "favor+")
ATTENTION: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear normalised": {"normalize": True},
    "linear masked, grouped": {"normalize": True, "masked": True, "queries": 2 * HEADS},
    **{f"linear {kind}": {"normalize": True, "feature_map": kind} for kind in MAPS},
    "gated": {"rule": "gated"},
    "gated normalised elu1": {"rule": "gated", "normalize": True, "feature_map": "elu1"},
    "gated grouped": {"rule": "gated", "queries": 2 * HEADS},
    "gated per channel": {"rule": "gated", "channel": True},
    "gated per channel normalised": {"rule": "gated", "channel": True, "normalize": True},
    "gated elu1 masked, grouped": {
        "rule": "gated",
        "normalize": True,
        "feature_map": "elu1",
        "masked": True,
        "queries": 2 * HEADS,
    },
    "delta": {"rule": "delta"},
    "gated delta": {"rule": "gated_delta"},
    "gated delta masked, grouped": {"rule": "gated_delta", "masked": True, "queries": 2 * HEADS},
    "gated delta per channel": {"rule": "gated_delta", "channel": True},
    "bidirectional": {"causal": False},
    "bidirectional elu1": {"causal": False, "normalize": True, "feature_map": "elu1"},
    "bidirectional favor+": {"causal": False, "normalize": True, "feature_map": "favor+"},
}


LAYER = "gated delta layer"


def nodes(width: int) -> dict[str, Node]:
    """Every case of a node at one width, by name; a layer, ``LAYER``, depends on the type."""
    return {
        **{name: attention(width, **options) for name, options in ATTENTION.items()},
        **{f"map {kind}": feature_map(kind, width) for kind in MAPS},
        "logarithm of favor+": feature_map("favor+", width, log=True),
        "convolution": convolution(width),
        "exponentials": exponentials(width, "past_key_max"),
        "exponentials decayed, masked": exponentials(width, "past_key_max", "key_mask", "decay"),
        "exponentials bidirectional": exponentials(width, causal=False),
    }


def rows(
    cases: dict[str, Node],
    width: int,
    dtype: str,
    sm: int,
    layered: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield the row of each kernel once, under the first case that has it; ``layered``: LAYER's."""
    first: dict[str, str] = {}
    kernels = {}
    resident: dict[str, int] = {}
    layer, _ = gated_delta_layer(dtype, width, width, HEADS // 2, HEADS)
    plans = {case: plan_launches(node, dtype, sm) for case, node in cases.items()}
    if layered:
        plans[LAYER] = attention_layer.plan(layer, dtype, sm)
    chosen = fitting([kernel for plan in plans.values() for kernel in plan.kernels()], sm)
    for case, plan in plans.items():
        fitted = plan.with_kernels(chosen)
        resident |= {kernel.name: fitted.resident for kernel in fitted.over_segments()}
        for kernel in fitted.kernels():
            kernels[kernel.name] = kernel
            first.setdefault(kernel.name, case)
    binaries = compile_kernels(kernels.values(), sm)
    for name, kernel in kernels.items():
        binary, tile = binaries[name], dict(kernel.constants)
        found = instructions(binary)
        yield {
            "sm": sm,
            "width": width,
            "dtype": dtype,
            "case": first[name],
            "kernel": kernel.function,
            "tile": {n: tile[n] for n in ("CHUNK", "BLOCK_K", "BLOCK_V") if n in tile},
            "warps": kernel.warps,
            "stages": kernel.stages,
            "as_planned": kernel in chosen,
            "registers": binary.registers,
            "spilled": binary.spilled,
            "shared": binary.shared,
            "occupancy": occupancy(binary),
            "resident": resident.get(name, 1),
            **asdict(found),
            "failures": failures(kernel, binary, found, resident.get(name, 1)),
        }


def line(row: dict[str, Any]) -> str:
    """A failing row."""
    tile = "x".join(str(n) for n in row["tile"].values())
    return (
        f"sm_{row['sm']} {row['dtype']:8} {row['width']:3} {row['case']:28} {row['kernel']:28} "
        f"{tile}, {row['warps']} warps, {row['stages']} stages: {'; '.join(row['failures'])}"
    )


SUMMARY = """\
| capability | kernels | failing | bytes spilled | registers, most | shared, most | allowed | with \
asynchronous copies | not as planned |
|---|---|---|---|---|---|---|---|---|"""


def summary(sm: int, found: list[dict[str, Any]]) -> str:
    """A row of the table, in Markdown."""
    numbers = (
        len(found),
        sum(bool(row["failures"]) for row in found),
        sum(row["spilled"] for row in found),
        max(row["registers"] for row in found),
        max(row["shared"] for row in found),
        LARGEST_SHARED[sm],
        sum(row["copies"] > 0 for row in found),
        sum(not row["as_planned"] for row in found),
    )
    return f"| {sm / 10:.1f} | {' | '.join(f'{n:,}' for n in numbers)} |"


def main() -> int:
    """Print as it goes; exit code 0: all pass, 6: some do not."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--sm", type=int, nargs="+", default=tuple(ARCHITECTURES))
    options.add_argument("--width", type=int, nargs="+", default=(64, 128))
    options.add_argument("--dtype", nargs="+", default=tuple(TYPES), choices=TYPES)
    options.add_argument("--case", nargs="+", help="these only", choices=[*nodes(64), LAYER])
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    found: list[dict[str, Any]] = []
    table = [SUMMARY]
    try:
        for sm in given.sm:
            for width in given.width:
                every = nodes(width)
                cases = {name: every[name] for name in given.case or every if name != LAYER}
                layered = given.case is None or LAYER in given.case
                for dtype in given.dtype:
                    for row in rows(cases, width, dtype, sm, layered):
                        found.append(row)
                        if row["failures"]:
                            print(line(row), flush=True)
            table.append(summary(sm, [row for row in found if row["sm"] == sm]))
    except LinexportError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(*table, sep="\n")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return BuildError.exit_code if any(row["failures"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
