"""Causal elu+1 linear attention: artifact, bare kernel, other formulations, softmax.

    python tools/bench_attention.py [--lengths 512,1024,4096,16384] [--json FILE]

One head layout (H = 8, d = 64, B = 1) at several lengths, then widths off the kernel's fast path,
then peak memory. All baselines of a row take turns in one process; p50 of each, and ratios.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import torch
from onnx import TensorProto, helper

import linexport
from linexport import models
from linexport.targets.base import OrtSession
from linexport.timing.latency import Settings, interleaved
from linexport.timing.peak_memory import peak_megabytes

HEADS, WIDTH = 8, 64
SETTINGS = Settings(warmup=3, repeats=15, seconds=4.0)
ODD_WIDTHS = {48: 64, 63: 64, 80: 96, 100: 128}
"""Widths off the fast path, and the aligned width each is compared with."""


class Cumsum(torch.nn.Module):
    """The usual formulation: a cumulative sum over outer products."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, WIDTH)) for x in (q, k, v))
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        states = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        top = (q.unsqueeze(-2) @ states).squeeze(-2)
        below = (q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-6
        return (top / below).flatten(2)


class MaskedQuadratic(torch.nn.Module):
    """The other usual formulation: all pairs, then a triangular mask."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for x in (q, k, v))
        q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        scores = (q @ k.transpose(-1, -2)).tril()
        out = scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)
        return out.transpose(1, 2).flatten(2)


def plain_export(module: torch.nn.Module, folder: Path) -> OrtSession:
    """``torch.onnx.export`` with a dynamic batch and length."""
    dynamic = torch.export.Dim.DYNAMIC
    example = tuple(torch.randn(2, 16, HEADS * WIDTH) for _ in range(3))
    program = torch.onnx.export(
        module.eval(), example, dynamo=True, dynamic_shapes=({0: dynamic, 1: dynamic},) * 3
    )
    assert program is not None
    path = folder / f"{type(module).__name__}.onnx"
    program.save(str(path))
    return OrtSession(path, taking_turns=True)


def single_node(op_type: str, outputs: list[str], **attributes: Any) -> OrtSession:
    """One com.microsoft operator on packed query, key and value."""
    width = HEADS * WIDTH
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "T", width]) for n in "qkv"]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    node = helper.make_node(op_type, list("qkv"), outputs, domain="com.microsoft", **attributes)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "bare", inputs, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return OrtSession(model.SerializeToString(), taking_turns=True)


def artifact(folder: Path, target: str, width: int = WIDTH) -> Path:
    """Folder of the reference layer, converted once."""
    source, output = folder / f"layer-{width}.pt", folder / f"{target}-{width}"
    if not output.exists():
        config = {"num_heads": HEADS, "head_dim": width}
        models.save(models.build("linear_attention_layer", config), source)
        linexport.convert(source, output, target=target, bench=False)
    return output


def opened(folder: Path, target: str, width: int = WIDTH) -> OrtSession:
    """Its model, for taking turns with other sessions."""
    path = artifact(folder, target, width) / "model.onnx"
    return OrtSession(path, taking_turns=True)


def inputs(length: int, width: int = WIDTH) -> dict[str, np.ndarray]:
    """Query, key and value of unit variance."""
    random = np.random.default_rng(0)
    shape = (1, length, HEADS * width)
    names = ("query", "key", "value")
    return {name: random.standard_normal(shape, np.float32) for name in names}


def zero_state(width: int = WIDTH) -> dict[str, np.ndarray]:
    """Return the artifact's past states of an empty sequence, all zero."""
    return {
        "past_state_0": np.zeros((1, HEADS, width, width), np.float32),
        "past_normalizer_0": np.zeros((1, HEADS, width), np.float32),
    }


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds, p50."""
    return {n: float(np.median(t)) for n, t in interleaved(calls, SETTINGS).items()}


def by_length(folder: Path, lengths: list[int]) -> list[dict[str, Any]]:
    """A row per length; the formulations whose memory explodes stop at 4096."""
    ort, portable = opened(folder, "ort"), opened(folder, "onnx")
    cumsum, quadratic = (plain_export(m, folder) for m in (Cumsum(), MaskedQuadratic()))
    native = single_node(
        "LinearAttention",
        ["out", "state"],
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        update_rule="linear",
        scale=1.0,
    )
    softmax = single_node("MultiHeadAttention", ["out"], num_heads=HEADS, unidirectional=1)
    rows = []
    for length in lengths:
        x = inputs(length)
        named = dict(zip("qkv", x.values(), strict=True))
        fed = {**x, **zero_state()}
        calls: dict[str, Callable[[], object]] = {
            "native_kernel": lambda named=named: native.run(named),
            "ort": lambda fed=fed: ort.run(fed),
            "onnx": lambda fed=fed: portable.run(fed),
        }
        if length <= 4096:
            calls["cumsum"] = lambda named=named: cumsum.run(named)
            calls["masked_quadratic"] = lambda named=named: quadratic.run(named)
            calls["softmax"] = lambda named=named: softmax.run(named)
        times = medians(calls)
        rows.append({"length": length, "ms": times, "ratio_to_ort": _ratios(times)})
        print(_line(rows[-1]), flush=True)
    return rows


def by_width(folder: Path, length: int = 1024) -> list[dict[str, Any]]:
    """Each odd width beside the next aligned one."""
    rows = []
    for odd, aligned in ODD_WIDTHS.items():
        calls: dict[str, Callable[[], object]] = {}
        for name, width in (("odd", odd), ("aligned", aligned)):
            session = opened(folder, "ort", width)
            fed = {**inputs(length, width), **zero_state(width)}
            calls[name] = lambda session=session, fed=fed: session.run(fed)
        times = medians(calls)
        ratio = times["odd"] / times["aligned"]
        rows.append({"width": odd, "aligned": aligned, "ms": times, "ratio": ratio})
        print(f"d = {odd}: {times['odd']:.2f} ms, {ratio:.2f} x the next aligned width", flush=True)
    return rows


def memory(folder: Path, length: int = 16384) -> dict[str, Any]:
    """Peak of one run of the artifact beside its inputs and outputs."""
    files = []
    for name, size in (("full", length), ("small", 8)):
        path = folder / f"{name}.npz"
        np.savez(path, allow_pickle=False, **inputs(size), **zero_state())
        files.append(path)
    peak, reason = peak_megabytes(
        "onnx", str(artifact(folder, "ort") / "model.onnx"), files[0], files[1]
    )
    moved = 4 * length * HEADS * WIDTH * 4 / 2**20
    print(f"T = {length}: peak {peak} MB, inputs and outputs {moved:.0f} MB {reason or ''}")
    return {"length": length, "peak_mb": peak, "io_mb": moved, "reason": reason}


def _ratios(times: dict[str, float]) -> dict[str, float]:
    return {name: value / times["ort"] for name, value in times.items()}


def _line(row: dict[str, Any]) -> str:
    parts = [f"{n} {t:.2f} ms ({row['ratio_to_ort'][n]:.2f} x)" for n, t in row["ms"].items()]
    return f"T = {row['length']}: " + ", ".join(parts)


def main() -> None:
    """Run all three parts."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lengths", default="512,1024,4096,16384")
    measurement.add_option(options)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result = {
            "by_length": by_length(folder, [int(n) for n in given.lengths.split(",")]),
            "by_width": by_width(folder),
        }
        result["memory"] = memory(folder)
    measurement.write(given.json, result)


if __name__ == "__main__":
    main()
