"""Products with weights of four and eight bits: float32, ONNX Runtime's kernel, the CPU library.

    python tools/bench_products.py [--width 1024] [--outputs 3584] [--layers 24] [--blocks 32,128]
                                   [--tokens 1,4,16,64,512] [--threads 2] [--json FILE]

A file of every form has so many matrices that no cache holds them, each multiplied by the same
tokens. Forms take turns; times are medians of one matrix. Printed are speeds over float32's in the
same turns, and for one token the bytes of weights and scales in a second as a part of those that a
copy of memory reads and writes on as many threads.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import measurement
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.cpu import library
from linexport.plugins.cpu.library import FUSED_DOMAIN
from linexport.plugins.ops.body import MICROSOFT
from linexport.targets.cpu_fusion.integer_products import OP
from linexport.targets.runtime.options import INTEGER_ACTIVATIONS
from linexport.timing.latency import Settings, interleaved

FLOAT32 = "float32"
COPIED = 2**28
"""Bytes of a copy."""


def save(form: str, sizes: argparse.Namespace, folder: Path) -> Path:
    """Write a file of a form: "float32", or BITS/BLOCK with " library" behind it."""
    rng = np.random.default_rng(0)
    width, outputs = sizes.width, sizes.outputs
    nodes, weights, ends = [], [], []
    for layer in range(sizes.layers):
        ends.append(helper.make_tensor_value_info(f"y{layer}", TensorProto.FLOAT, None))
        if form == FLOAT32:
            arrays = {"w": rng.standard_normal((width, outputs), np.float32)}
            nodes.append(helper.make_node("MatMul", ["x", f"w{layer}"], [f"y{layer}"]))
        else:
            bits, block = map(int, form.split()[0].split("/"))
            rows = outputs, -(-width // block)
            arrays = {
                "w": rng.integers(0, 256, (*rows, block * bits // 8), np.uint8),
                "s": rng.uniform(0.001, 0.01, rows).astype(np.float32),
            }
            if bits == 8:  # as artifacts have them
                arrays["z"] = rng.integers(0, 256, rows, np.uint8)
            own = form.endswith("library")
            nodes.append(
                helper.make_node(
                    OP,
                    ["x", *(f"{name}{layer}" for name in arrays)],
                    [f"y{layer}"],
                    domain=FUSED_DOMAIN if own else MICROSOFT,
                    **{"K": width, "N": outputs, "bits": bits, "block_size": block},
                    **({} if own else {"accuracy_level": INTEGER_ACTIVATIONS}),
                )
            )
        weights += [numpy_helper.from_array(a, f"{name}{layer}") for name, a in arrays.items()]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width])
    graph = helper.make_graph(nodes, "products", [given], ends, weights)
    opsets = [helper.make_opsetid(domain, 1) for domain in (MICROSOFT, FUSED_DOMAIN)]
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20), *opsets], ir_version=10
    )
    path = folder / f"{form.replace('/', '_').replace(' ', '_')}.onnx"
    onnx.save_model(model, path, save_as_external_data=True, location=f"{path.stem}.data")
    return path


def opened(path: Path, threads: int) -> object:
    """Open a file with the library registered."""
    import onnxruntime

    from linexport.targets.runtime.options import session_options

    options = session_options(threads, taking_turns=True, low_memory=False)
    library.register(options, threads)
    return onnxruntime.InferenceSession(path, options)


def copied(threads: int) -> float:
    """Return the bytes that copies on so many threads read and write in a second."""
    parts = [np.ones(COPIED // threads, np.uint8) for _ in range(threads)]
    targets = [np.empty_like(part) for part in parts]
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(7):
            start = time.perf_counter()
            list(pool.map(np.copyto, targets, parts))
            times.append(time.perf_counter() - start)
    return float(2 * COPIED / np.median(times[1:]))


def main() -> None:
    """Print a table of ratios, and the part of the memory's speed that one token has."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--outputs", type=int, default=3584)
    options.add_argument("--layers", type=int, default=24)
    options.add_argument("--blocks", default="32,128")
    options.add_argument("--tokens", default="1,4,16,64,512")
    options.add_argument("--threads", type=int, default=2)
    measurement.add_option(options)
    sizes = options.parse_args()
    if not library.multiplies_integers():
        sys.exit("The CPU library has no products of integers on this machine.")
    pairs = [f"{bits}/{block}" for bits in (4, 8) for block in sizes.blocks.split(",")]
    forms = [FLOAT32, *(f"{pair}{by}" for pair in pairs for by in ("", " library"))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sessions = {f: opened(save(f, sizes, Path(folder)), sizes.threads) for f in forms}
        for tokens in map(int, sizes.tokens.split(",")):
            x = np.random.default_rng(1).standard_normal((tokens, sizes.width), np.float32)
            calls = {f: lambda s=s, x=x: s.run(None, {"x": x}) for f, s in sessions.items()}
            settings = Settings(repeats=5 if tokens > 100 else 15, lead_in=1)
            times = interleaved(calls, settings)
            ms = {f: round(float(np.median(t)) / sizes.layers, 4) for f, t in times.items()}
            rows.append({"tokens": tokens, "ms": ms})
            print(f"{tokens} tokens, float32 {ms[FLOAT32]} ms; over it: ", end="")
            print(", ".join(f"{f} {ms[FLOAT32] / ms[f]:.2f}" for f in forms[1:]), flush=True)
    memory = copied(sizes.threads)
    part = {}
    for form in forms[1:] if rows[0]["tokens"] == 1 else ():
        bits, block = map(int, form.split()[0].split("/"))
        stored = sizes.width * sizes.outputs * (bits / 8 + 4 / block)
        part[form] = round(stored / (rows[0]["ms"][form] / 1e3) / memory, 3)
    print(f"one token, part of a copy's {memory / 1e9:.1f} GB/s: {part}")
    own = {name: getattr(sizes, name) for name in ("width", "outputs", "layers", "threads")}
    measurement.write(sizes.json, {**own, "copied": memory, "of_memory": part, "rows": rows})


if __name__ == "__main__":
    main()
