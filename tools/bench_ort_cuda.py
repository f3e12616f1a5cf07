"""Times artifacts of target ort-cuda on a GPU: linexport's kernels beside ONNX Runtime's.

    python tools/bench_ort_cuda.py [--json FILE] FOLDER ...

A prompt is timed with its inputs, states and outputs in the GPU's memory, a step as
``stream().step`` runs it, tokens and logits from and to the host: with its CUDA graph, where calls
are captured, and launched. Results of the kernels are compared with those of the functions, which
is what a model computes without the CUDA library. Needs onnxruntime-gpu and no PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import OrtValue, RunOptions

import linexport
from linexport.plugins.cuda.library import SWITCH

PROMPTS = ((1, 1024), (1, 8192), (8, 2048))
STEPS = (1, 8, 64)
"""Sequences that a step is timed with."""

BEFORE, TIMED = 8, 40
"""Steps before those that are timed, and of these."""

TYPES = {"int64": np.int64, "bool": np.bool_, "float32": np.float32}


def opened(folder: Path, kernels: bool) -> Any:
    """Open an artifact on the GPU, with or without the CUDA library."""
    os.environ[SWITCH] = str(int(kernels))
    return linexport.load(folder, provider="cuda", verify=False, allow_failed=True)


def tokens(model: Any, batch: int, length: int, random: np.random.Generator) -> dict[str, Any]:
    """Draw the inputs of a call that are no states; masks are of ones."""
    pasts, found = {state.past for state in model.manifest.states}, {}
    for one in model.manifest.inputs:
        if one.name in pasts:
            continue
        behind = [length if isinstance(size, str) else size for size in one.shape[1:]]
        shape = [batch, *behind]
        kind = TYPES[one.dtype]
        drawn = random.integers(0, 16, shape) if kind is np.int64 else random.standard_normal(shape)
        found[one.name] = np.ones(shape, kind) if "mask" in one.name else drawn.astype(kind)
    return found


def prompt_ms(model: Any, feeds: Mapping[str, Any]) -> float:
    """Return the median time of a call whose tensors are all in the GPU's memory."""
    session = model._session.inner
    batch, binding, options = len(next(iter(feeds.values()))), session.io_binding(), RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")
    given = {**model.initial_state(batch), **feeds}
    for name, array in given.items():
        if array.size:
            binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        else:
            binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")
    return median_ms(lambda: session.run_with_iobinding(binding, options), 2, 5)


def step_ms(model: Any, batch: int, captured: bool) -> float | None:
    """Return the median time of a token of so many sequences; None where none is captured."""
    memory, random = model._session.memory, np.random.default_rng(0)
    graphs = memory._graphs
    if captured and graphs is None:
        return None
    try:
        memory._graphs = graphs if captured or graphs is None else Launched(graphs)
        live = model.stream()
        live.step(**tokens(model, batch, 64, random))
        one = tokens(model, batch, 1, random)
        return median_ms(lambda: live.step(**one), BEFORE, TIMED)
    finally:
        memory._graphs = graphs


class Launched:
    """The graphs of a session that captures, none of which is used."""

    def __init__(self, graphs: Any) -> None:
        self.launched = graphs.launched

    def run(self, inputs: Any, following: Any, launch: Callable[[], Any]) -> Any:
        """Launch the call."""
        return launch()


def median_ms(call: Callable[[], object], before: int, timed: int) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(before + timed):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[before:]), 3)


def off(kernels: Any, functions: Any) -> float:
    """Return the largest difference of results, by the largest value of each."""
    random, worst = np.random.default_rng(1), 0.0
    for batch, length in ((1, 1), (2, 7), (1, 700)):
        feeds = tokens(kernels, batch, length, random)
        ours, theirs = kernels.run(**feeds), functions.run(**feeds)
        for name, values in theirs.items():
            difference = np.abs(ours[name].astype(np.float64) - values).max()
            worst = max(worst, float(difference / np.abs(values).max()))
    return worst


def figures(model: Any) -> dict[str, Any]:
    """Return all times of an opened artifact."""
    random = np.random.default_rng(0)
    return {
        "placement": model.placement.described(),
        **{f"prompt {b} x {t}": prompt_ms(model, tokens(model, b, t, random)) for b, t in PROMPTS},
        **{f"step {b}": step_ms(model, b, True) for b in STEPS},
        **{f"step {b} launched": step_ms(model, b, False) for b in STEPS},
    }


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {"onnxruntime": onnxruntime.__version__, "artifacts": {}}
    for folder in asked.folders:
        kernels, functions = opened(folder, True), opened(folder, False)
        found = {
            "differ": off(kernels, functions),
            "kernels": figures(kernels),
            "functions": figures(functions),
        }
        result["artifacts"][folder.name] = found
        print(f"{folder.name}, kernels beside functions, ms ({found['differ']:.1e} off)")
        for name, value in found["kernels"].items():
            print(f"  {name:22} {value}  {found['functions'][name]}", flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
