"""Weights in fewer bits: a decode step and a prefill beside float32, eager PyTorch and products.

    python tools/bench_weights.py [MODEL_TYPE ...] [--width 1024] [--layers 12] [--json FILE]
    python tools/bench_weights.py --shape qwen3.5-0.8b [--layers 4]

A model of every type is made with random weights and converted. Its step after 512 tokens, and the
512 tokens at once, are timed in one run, in turns: eager PyTorch, the float32 artifact, those with
int8 and int4 weights, and nothing but the products of the same weights in each of these. Artifacts
run with the CPU library; the one with int4 weights also without it, by the functions. Quantised
weights are random, which takes the same time. ``--profile`` prints where a step's time goes.
``--processor-time`` counts the time of the processor instead of the clock's: with ``--threads 1``
the ratios on a machine that others use are then those of a quiet one.

Each model is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import onnx
import real_shapes
from bench_families import Eager
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.body import MICROSOFT
from linexport.quantization.block_quantisation import Grid, Quantised
from linexport.quantization.by_target import form_of
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.experts import find_experts
from linexport.quantization.quantisable import (
    BLOCK,
    LEAST_OUTPUTS,
    TABLE_BITS,
    find,
    floating_weights,
)
from linexport.quantization.rewrite import quantised_model
from linexport.targets.base import OrtSession
from linexport.targets.runtime.options import INTEGER_ACTIVATIONS, LOGITS_TO_KEEP

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.families import FOUR, TINY, save_model, wide

LENGTH, LAYERS = 512, 12
BITS = {"float32": None, "int8": 8, "int4": 4}
FAMILIES = ("qwen3_5_text", "mamba2", "kimi_linear")
FUNCTIONS = "int4 by functions"
HEAD = 128
LOGITS = "logits"
PAUSE = 0.01
"""Seconds before each turn, for the threads of the previous one to stop spinning."""

REPEATS = {"step": 40, "prefill": 4}
LEAD_IN = {"step": 2, "prefill": 0}
"""Calls before each one that counts: steps follow one another."""


def sized(model_type: str, width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """Return the configuration of a model; three in four layers of hybrids are linear."""
    heads = width // HEAD
    types = (FOUR * -(-layers // len(FOUR)))[:layers]
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    softmax = {"num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4)}
    mamba = {"mamba_n_heads": width // 32, "mamba_d_head": 64, "mamba_d_state": HEAD}
    own: dict[str, dict[str, Any]] = {
        "qwen3_5_text": {
            **softmax,
            "head_dim": HEAD,
            "linear_num_key_heads": heads,
            "linear_num_value_heads": 2 * heads,
            "linear_key_head_dim": HEAD,
            "linear_value_head_dim": HEAD,
            "layer_types": types,
            "intermediate_size": width * 7 // 2,
        },
        "mamba2": {"num_heads": width // 32, "head_dim": 64, "state_size": HEAD, "chunk_size": 256},
        "kimi_linear": {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": width * 7 // 2,
            "moe_intermediate_size": width // 2,
            "kv_lora_rank": width // 2,
            "qk_rope_head_dim": HEAD // 2,
            "qk_nope_head_dim": HEAD,
            "v_head_dim": HEAD,
            "linear_head_dim": HEAD,
            "linear_num_heads": heads,
            "layer_types": types,
            "mlp_layer_types": (["dense"] * 3 + ["sparse"]) * (layers // 4),
        },
        "lfm2": {
            **softmax,
            "layer_types": [t.replace("linear_attention", "conv") for t in types],
            "intermediate_size": width * 7 // 2,
            "block_auto_adjust_ff_dim": False,
        },
        "granitemoehybrid": {
            **softmax,
            **mamba,
            "intermediate_size": width // 2,
            "shared_intermediate_size": width,
            "layer_types": types,
        },
    }
    return {**wide(model_type), **sizes, **own[model_type]}


class Converted:
    """The model that ``convert`` writes, made without its checks, and its quantised copies.

    Args:
        folder: of the original.
        work: a folder for files.
        tokens: of the prompt.
        threads: of the sessions.
        kinds: of weights, by the names of ``BITS``.
        last: logits of the last token alone are computed, and no session runs by functions.
    """

    def __init__(
        self,
        folder: Path,
        work: Path,
        tokens: np.ndarray,
        threads: int,
        kinds: Sequence[str] = tuple(BITS),
        last: bool = False,
    ) -> None:
        from linexport import passes, targets, trace
        from linexport.artifact import write
        from linexport.sources import load_model
        from linexport.targets.lowering.choice import lower

        loaded = load_model(folder)
        traced = trace.trace(loaded)
        rewritten = passes.rewrite(traced.graph, passes.STATELESS, traced.weights, target="ort")
        target = targets.find_target("ort")
        model, _ = lower(target.prepare(rewritten.model), target.candidates)
        assert loaded.decode_module is not None
        self.states = loaded.decode_module.states
        self.nodes = len(model.graph.node)
        self.files: dict[str, Path] = {}
        values = dict(rewritten.weights)
        for name in kinds:
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            if BITS[name] is not None:
                copy = quantised(copy, values, name)
            left = {t.name for t in copy.graph.initializer}
            place = work / name
            place.mkdir()
            apart = {n: v for n, v in values.items() if n in left}
            self.files[name] = write.save_model(copy, place, apart)
        del model, copy, values, apart, rewritten, traced, loaded
        opened = partial(Run, states=self.states, tokens=tokens, threads=threads, last=last)
        self.runs = {name: opened(path) for name, path in self.files.items()}
        if not last:
            self.runs[FUNCTIONS] = opened(self.files["int4"], native=False)

    def bytes(self, name: str) -> int:
        """Size of the artifact's model and its weights."""
        return sum(f.stat().st_size for f in self.files[name].parent.iterdir())


def quantised(model: onnx.ModelProto, values: dict[str, np.ndarray], kind: str) -> onnx.ModelProto:
    """Return the model with random weights as ``--weights`` stores them for a CPU."""
    form, bits = form_of("ort", kind), BITS[kind]
    assert bits is not None
    floats = {
        t.name: values[t.name] if t.name in values else numpy_helper.to_array(t)
        for t in floating_weights(model)
    }
    chosen, random = {}, np.random.default_rng(0)
    for weight in (*find(model, floats)[0], *find_experts(model, floats, True)[0]):
        own = max(bits, TABLE_BITS) if weight.is_table else bits
        made = random_weights(
            weight.outputs, weight.inputs, form.grid(weight, own, "float32"), random
        )
        chosen[weight.name] = Chosen(weight, made, "none")
    return quantised_model(model, chosen)


def random_weights(outputs: int, inputs: int, grid: Grid, random: np.random.Generator) -> Quantised:
    """Return a matrix of random values about zero, of variance 1 / inputs.

    ONNX Runtime has equal matrices once, and a cache holds them: each is drawn anew.
    """
    shape = outputs, grid.blocks(inputs), grid.block
    values = random.integers(grid.top + 1, size=shape, dtype=np.uint8)
    scales = np.full(shape[:2], (12 / inputs) ** 0.5 / grid.top, np.float32)
    zeros = np.full(shape[:2], (grid.top + 1) // 2, np.uint8)
    return Quantised(grid, inputs, values, scales, zeros)


class Run:
    """A session with the state after the prompt."""

    def __init__(
        self,
        path: Path,
        states: Any,
        tokens: np.ndarray,
        threads: int,
        native: bool = True,
        last: bool = False,
    ) -> None:
        logits = LOGITS if last else None
        self.session = OrtSession(path, threads, taking_turns=True, native=native, logits=logits)
        self._kept = {LOGITS_TO_KEEP: np.array(1)} if last else {}
        self.states, self.tokens, self.one = states, tokens, tokens[:, :1]
        self.empty = {s.past: s.start(1) for s in states}
        _, self.state = self.read(tokens, self.empty)

    def prefill(self) -> np.ndarray:
        """Logits of all tokens."""
        return self.read(self.tokens, self.empty)[0]

    def step(self) -> np.ndarray:
        """Logits of one more token; the state goes on."""
        logits, self.state = self.read(self.one, self.state)
        return logits

    def read(
        self, tokens: np.ndarray, state: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Logits of all tokens, or of the last, and the state after them."""
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **self._kept}
        outputs = self.session.run({**given, **state})
        return outputs[LOGITS], {s.past: outputs[s.present] for s in self.states}


def products(
    weights: list[tuple[np.ndarray, int]], threads: int, bits: int | None
) -> Callable[[], object]:
    """Every weight times so many tokens, nothing else.

    Only the shapes of the results are outputs. Small weights stay in float32, as in an artifact.
    """
    info = helper.make_tensor_value_info
    nodes, initializers, random = [], [], np.random.default_rng(1)
    given = {f"x{t}_{w.shape[1]}": np.ones((1, t, w.shape[1]), np.float32) for w, t in weights}
    for i, (weight, tokens) in enumerate(weights):
        outputs, inputs = weight.shape
        x = f"x{tokens}_{inputs}"
        if bits is None or outputs < LEAST_OUTPUTS:
            initializers.append(numpy_helper.from_array(weight.T, f"w{i}"))
            nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"y{i}"]))
        else:
            grid = Grid(bits, BLOCK, symmetric=bits == BITS["int4"])
            arrays = random_weights(outputs, inputs, grid, random).packed()
            for part, array in arrays.items():
                initializers.append(numpy_helper.from_array(array, f"{part}{i}"))
            nodes.append(
                helper.make_node(
                    "MatMulNBits",
                    [x, *(f"{part}{i}" for part in arrays)],
                    [f"y{i}"],
                    domain=MICROSOFT,
                    K=inputs,
                    N=outputs,
                    bits=bits,
                    block_size=BLOCK,
                    accuracy_level=INTEGER_ACTIVATIONS,
                )
            )
        nodes.append(helper.make_node("Shape", [f"y{i}"], [f"s_{i}"]))
    graph = helper.make_graph(
        nodes,
        "products",
        [info(name, TensorProto.FLOAT, [1, None, None]) for name in given],
        [info(f"s_{i}", TensorProto.INT64, [3]) for i in range(len(weights))],
        initializers,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "products.onnx"
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        onnx.save_model(model, str(path), save_as_external_data=True, location="data")
        session = OrtSession(path, threads, taking_turns=True)
    return lambda: session.run(given)


def measure(
    save: Callable[[Path], object],
    work: Path,
    vocabulary: int,
    threads: int,
    clock: Callable[[], float],
    profile: bool,
) -> dict[str, Any]:
    """Return milliseconds of a step and of a prefill by who computes them, and sizes of files.

    Args:
        save: saves the model in a folder.
        work: a folder for files.
        vocabulary: of the model.
        threads: of everything that is measured.
        clock: seconds.
        profile: print where a step's time goes.
    """
    import torch

    torch.set_num_threads(threads)
    folder = work / "model"
    if not folder.is_dir():
        save(folder)
    tokens = np.random.default_rng(0).integers(3, vocabulary, size=(1, LENGTH))
    own = Converted(folder, work, tokens, threads)
    if profile:
        print(profiled(own.files["int4"], own.runs["int4"], threads), file=sys.stderr)
    eager = Eager(folder, torch.from_numpy(tokens))
    found: dict[str, Any] = {"nodes": own.nodes, "bytes": {n: own.bytes(n) for n in own.files}}
    found["load"] = round(os.getloadavg()[0], 1)
    found["eager"] = eager.choose(eager.step)
    for name, count in (("step", 1), ("prefill", LENGTH)):
        calls: dict[str, Callable[[], object]] = {n: getattr(r, name) for n, r in own.runs.items()}
        calls["eager"] = getattr(eager, name)
        for stored, bits in BITS.items():
            if name == "step" or bits != BITS["int8"]:
                weights = eager.weights(count)
                calls[f"products {stored}"] = products(weights, threads, bits)
        found[name] = timed(calls, REPEATS[name], LEAD_IN[name], clock)
        del calls
    return found


def timed(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    lead_in: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Return the median milliseconds of calls that take turns; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            time.sleep(PAUSE)
            for _ in range(lead_in):
                call()
            start = clock()
            call()
            if repeat:
                times[name].append(1e3 * (clock() - start))
    return {name: round(statistics.median(own), 3) for name, own in times.items()}


def profiled(path: Path, run: Run, threads: int) -> str:
    """Return a table of a step's microseconds by operator, as the artifact runs."""
    session = OrtSession(path, threads, taking_turns=True, native=True, profile=path.parent.parent)
    given = {"input_ids": run.one, "attention_mask": np.ones_like(run.one), **run.state}
    count = 50
    for _ in range(count):
        session.run(given)
    events = json.loads(Path(session.inner.end_profiling()).read_text())
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
            calls[event["args"]["op_name"]] += 1
    whole = sum(e["dur"] for e in events if e["name"] == "model_run") / count
    rows = [f"{whole:9.1f} us a step, {sum(spent.values()) / count:.1f} in nodes"]
    rows += [
        f"{time / count:9.1f} us {calls[op] / count:6.1f} x {op}"
        for op, time in spent.most_common()
    ]
    return "\n".join(rows)


def ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as fast as what the int4 and int8 artifacts are."""
    step, prefill = found["step"], found["prefill"]
    return {
        "int4 step over float32": step["float32"] / step["int4"],
        "int8 step over float32": step["float32"] / step["int8"],
        "int4 step over eager": step["eager"] / step["int4"],
        "int4 step beside its products": step["int4"] / step["products int4"],
        "int4 step by functions beside its products": step[FUNCTIONS] / step["products int4"],
        "int4 prefill over float32": prefill["float32"] / prefill["int4"],
        "int4 prefill over that by functions": prefill[FUNCTIONS] / prefill["int4"],
    }


def main() -> None:
    """Measure every model, and print its ratios."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("families", nargs="*", metavar="MODEL_TYPE", help=", ".join(TINY))
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, help=f"{LAYERS}, or those of the shape")
    real_shapes.add_options(options, real_shapes.LIBRARY)
    options.add_argument("--vocabulary", type=int, default=32000)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--profile", action="store_true", help="print the time of each operator")
    options.add_argument(
        "--processor-time", action="store_true", help="count the processor's time, of all threads"
    )
    options.add_argument("--alone", help=argparse.SUPPRESS)
    measurement.add_option(options)
    given = options.parse_args()
    shape = real_shapes.chosen(given)
    sizes = (given.width, given.layers or LAYERS, given.vocabulary)
    if given.alone:
        [name] = given.families
        work = Path(given.alone)
        clock = time.process_time if given.processor_time else time.perf_counter
        words = sizes[2] if shape is None else shape.vocabulary

        def save(folder: Path) -> None:
            if shape is not None:
                shape.save(folder)
            else:
                save_model(sized(name, *sizes), name, folder)

        print(json.dumps(measure(save, work, words, given.threads, clock, given.profile)))
        return
    results: dict[str, Any] = {"threads": given.threads, "processor_time": given.processor_time}
    if shape is None:
        results |= {"width": sizes[0], "layers": sizes[1], "vocabulary": sizes[2]}
    results["families"] = {}
    for name in [str(shape)] if shape is not None else given.families or FAMILIES:
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, __file__, *sys.argv[1:], "--alone", work]
            command = [word for word in command if word not in given.families] + [name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        results["families"][name] = found
        print(name, json.dumps(found), flush=True)
        for title, ratio in ratios(found).items():
            print(f"    {title}: {ratio:.2f}", flush=True)
        measurement.write(given.json, results)


if __name__ == "__main__":
    main()
