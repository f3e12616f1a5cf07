"""Hugging Face families: parity, size, speed, conversion time and memory, in one table.

    python tools/bench_families.py [MODEL_TYPE ...] [--json FILE] [--threads 2] [--memory MB]

Every family is converted twice. The tiny model of the tests is checked as ``convert`` checks it,
and timed. The wide one (hidden size 512, four layers) is measured by its functions and with the CPU
library, beside eager PyTorch, with the fastest of the implementations it has of attention and of
experts, and, where there is one, a plain export of that one length. No implementation in float32
is faster than the sum of its matrix products, measured in the same run; "above" is how many times
longer than the artifact with the library the others take for what comes on top of these. With
``--memory`` a model of that many megabytes of weights is converted, too.

Each step is a process of its own. Results are added to FILE, so that a run can be continued. A
plain export takes minutes, a measurement seconds: ``--only plain --work FOLDER`` makes the exports,
and ``--only speed --work FOLDER`` measures those that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measurement
import numpy as np
import onnx
import real_shapes
from onnx import TensorProto, helper, numpy_helper
from real_shapes import Chosen

from linexport.targets.base import OrtSession
from linexport.trace.messages import innermost

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.families import FOUR, LINEAR_LAYERS, TINY, save_model, wide

STEPS = ("tiny", "plain", "speed")
"""Steps done with every family."""
LENGTH = 512
REPEATS = 64
PLAIN = "plain.onnx"
PLAIN_SECONDS = 300
LARGE = "qwen3_5_text"
"""The family whose memory is measured."""


def tiny(model_type: str, work: Path) -> dict[str, Any]:
    """Parity at every length, nodes and seconds of the conversion."""
    import linexport

    save_model(TINY[model_type], model_type, work / "model")
    started = time.perf_counter()
    manifest = linexport.convert(work / "model", work / "artifact", bench=False, threads=1)
    seconds = time.perf_counter() - started
    errors: dict[int, float] = {}
    for case in manifest.parity.cases:
        length = case.length
        errors[length] = max(errors.get(length, 0.0), case.max_relative_error)
    return {
        "status": manifest.status,
        "errors": errors,
        "greedy": vars(manifest.parity.greedy),
        "fused": manifest.fused,
        "linear_layers": LINEAR_LAYERS[model_type],
        "nodes": manifest.nodes.artifact,
        "seconds": round(seconds, 1),
    }


def plain(model_type: str, work: Path) -> dict[str, Any]:
    """A plain export of the wide model for prefills of one length, or why there is none."""
    save_model(wide(model_type), model_type, work / "model")
    started = time.perf_counter()
    try:
        _run("export", str(work / "model"), str(work / PLAIN), timeout=PLAIN_SECONDS)
    except subprocess.TimeoutExpired:
        return {"reason": f"not done after {PLAIN_SECONDS} s"}
    except RuntimeError as error:
        return {"reason": str(error)}
    return {"seconds": round(time.perf_counter() - started, 1)}


def speed(model_type: str, work: Path, threads: int) -> dict[str, Any]:
    """Milliseconds of a prefill and of a step after it, of all that is measured.

    ``model_type`` is one, or a shape, see ``real_shapes.Chosen``.
    """
    import torch

    from linexport.timing.latency import Settings, interleaved

    torch.set_num_threads(threads)
    folder = work / "model"
    is_shape = ":" in model_type
    if not folder.is_dir() and is_shape:
        Chosen.parse(model_type).save(folder)
    elif not folder.is_dir():
        save_model(wide(model_type), model_type, folder)
    words = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = np.random.default_rng(0).integers(words, size=(1, LENGTH))
    path, states = converted(folder, work)
    fused = Fused(path, states, tokens, threads)
    native = Fused(path, states, tokens, threads, native=True)
    eager = Eager(folder, torch.from_numpy(tokens))
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "prefill": {"artifact": fused.prefill, "library": native.prefill, "eager": eager.prefill},
        "decode": {"artifact": fused.step, "library": native.step, "eager": eager.step},
    }
    found: dict[str, Any] = {"nodes": fused.nodes}
    found["error"] = _error(fused.prefill(), eager.prefill())
    if (work / PLAIN).is_file():
        other = OrtSession(work / PLAIN, threads, taking_turns=True)
        names = [i.name for i in other.inner.get_inputs()]
        given = dict(zip(names, (tokens, np.ones_like(tokens)), strict=False))
        calls["prefill"]["plain"] = lambda: other.run(given)
    for name, tokens_at_once in (("prefill", LENGTH), ("decode", 1)):
        found[f"eager_{name}"] = eager.choose(calls[name]["eager"])
        calls[name]["products"] = _products(eager.weights(tokens_at_once), threads)
        settings = Settings(repeats=REPEATS if name == "decode" else 9, seconds=20.0, lead_in=2)
        times = interleaved(calls[name], settings)
        found[name] = {who: round(float(np.median(t)), 3) for who, t in times.items()}
        found[name]["overhead"] = _overheads(found[name])
    return found


def _overheads(times: dict[str, float]) -> dict[str, float]:
    """Return each baseline's time beyond the GEMM floor, in multiples of the library's.

    Nothing where the library's is a tenth of the floor or less, which is in the noise.
    """
    floor = times["products"]
    own = times["library"] - floor
    others = {who: times[who] - floor for who in ("artifact", "eager", "plain") if who in times}
    return {who: round(t / own, 2) for who, t in others.items()} if own > floor / 10 else {}


def converted(folder: Path, work: Path) -> tuple[Path, Any]:
    """The artifact that ``convert`` writes, made without its checks, and its states."""
    from linexport import passes, targets, trace
    from linexport.artifact import write
    from linexport.sources import load_model
    from linexport.targets.lowering.choice import lower

    loaded = load_model(folder)
    traced = trace.trace(loaded)
    rewritten = passes.rewrite(traced.graph, passes.STATELESS, traced.weights, target="ort")
    model, _ = lower(rewritten.model, targets.find_target("ort").candidates)
    assert loaded.decode_module is not None
    return write.save_model(model, work, rewritten.weights), loaded.decode_module.states


class Fused:
    """An artifact, by its functions or by the CPU library."""

    def __init__(
        self, path: Path, states: Any, tokens: np.ndarray, threads: int, native: bool = False
    ) -> None:
        self.session = OrtSession(path, threads, taking_turns=True, native=native)
        assert self.session.native == native, "the CPU library does not run it"
        self.states = states
        self.nodes = len(onnx.load(path, load_external_data=False).graph.node)
        self.tokens, self.one = tokens, tokens[:, :1]
        self.empty = {s.past: s.start(1) for s in self.states}
        self.state = self.empty
        self.prefill()

    def prefill(self) -> np.ndarray:
        """Logits of all tokens."""
        return self._run(self.tokens, self.empty)

    def step(self) -> np.ndarray:
        """Logits of one more token."""
        return self._run(self.one, self.state)

    def _run(self, tokens: np.ndarray, state: dict[str, np.ndarray]) -> np.ndarray:
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        outputs = self.session.run({**given, **state})
        self.state = {s.past: outputs[s.present] for s in self.states}
        return outputs["logits"]


class Eager:
    """The original with transformers' own cache, as ``generate`` calls it."""

    def __init__(self, folder: Path, tokens: Any) -> None:
        from linexport.sources import load_model

        self.original: Any = load_model(folder).module
        self.tokens, self.one = tokens, tokens[:, :1]
        self.state: dict[str, Any] = {}
        self._run(tokens, self.state)

    def prefill(self) -> np.ndarray:
        """Logits of all tokens."""
        return self._run(self.tokens, {})

    def step(self) -> np.ndarray:
        """Logits of one more token."""
        return self._run(self.one, self.state)

    def choose(self, call: Callable[[], object]) -> str:
        """Take the fastest of the library's implementations for this call, and name it."""
        seconds = {}
        for option in self._options():
            self._take(option)
            call()
            seconds[option] = min(_seconds(call) for _ in range(3))
        fastest = min(seconds, key=lambda option: seconds[option])
        self._take(fastest)
        return ", ".join(fastest)

    def _options(self) -> list[tuple[str, str]]:
        model = self.original.model
        attention = ["eager", *(["sdpa"] if model._supports_sdpa else [])]
        mixed = any(hasattr(part, "_apply_gate") for part in model.modules())
        # Not batched_mm, which gathers weights for every token: 38 GB for 512 of a wide granite.
        experts = ["eager", *(["grouped_mm"] if mixed else [])]
        return [(a, e) for a in attention for e in experts]

    def _take(self, option: tuple[str, str]) -> None:
        self.original.model.set_attn_implementation(option[0])
        self.original.model.set_experts_implementation(option[1])

    def weights(self, tokens: int) -> list[tuple[np.ndarray, int]]:
        """Return the weight of every matrix product, and how many tokens it is done for.

        Every expert gets its share of the tokens; where there are fewer, only those hit count.
        """
        found = [(part.weight.detach().numpy(), tokens) for part in self._layers()]
        for part in self.original.modules():
            if hasattr(part, "_apply_gate"):
                pairs = tokens * _chosen(self.original.model.config)
                first = part.gate_up_proj if part.has_gate else part.up_proj
                for weight in (first, part.down_proj):
                    hit = weight.detach().numpy()[: min(pairs, len(weight))]
                    found += [(one, -(-pairs // len(weight))) for one in hit]
        return found

    def _layers(self) -> list[Any]:
        """Return the linear layers of a call: one that is called twice is there twice.

        One that is not called counts where no other has its weight: Mamba's scan reads that of a
        layer, and blocks of Zamba2 share layers of which each calls its own.
        """
        import torch

        every = [part for part in self.original.modules() if isinstance(part, torch.nn.Linear)]
        called: list[Any] = []
        hooks = [one.register_forward_hook(lambda one, *_: called.append(one)) for one in every]
        self.step()
        for hook in hooks:
            hook.remove()
        weights = {id(one.weight) for one in called}
        return [*called, *(one for one in every if id(one.weight) not in weights)]

    def _run(self, tokens: Any, state: dict[str, Any]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            logits: np.ndarray = self.original.step(tokens, torch.ones_like(tokens), state).numpy()
        return logits


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def _chosen(config: Any) -> int:
    """Experts a token."""
    return int(config.num_experts_per_tok)


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _products(weights: list[tuple[np.ndarray, int]], threads: int) -> Callable[[], object]:
    """Every weight times that many tokens, nothing else: of the products only shapes are asked."""

    def typed(name: str, kind: int, shape: list[int | None]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    count = range(len(weights))
    given = {f"x{t}_{w.shape[1]}": np.ones((1, t, w.shape[1]), np.float32) for w, t in weights}
    nodes = []
    for i, (weight, tokens) in enumerate(weights):
        x = f"x{tokens}_{weight.shape[1]}"
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"y{i}"]))
        nodes.append(helper.make_node("Shape", [f"y{i}"], [f"s{i}"]))
    graph = helper.make_graph(
        nodes,
        "products",
        [typed(name, TensorProto.FLOAT, [1, None, None]) for name in given],
        [typed(f"s{i}", TensorProto.INT64, [3]) for i in count],
        [numpy_helper.from_array(w.T, f"w{i}") for i, (w, _) in enumerate(weights)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = OrtSession(model.SerializeToString(), threads, taking_turns=True)
    return lambda: session.run(given)


def export(folder: Path, path: Path) -> dict[str, Any]:
    """``torch.onnx.export`` of the original for one length, with its default settings."""
    import torch

    from linexport.sources import load_model

    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    given = (ids, torch.ones_like(ids))
    module = load_model(folder).module
    try:
        torch.onnx.export(module, given, str(path), dynamo=True, verbose=False)
    except Exception as error:
        raise SystemExit(innermost(error)) from error
    return {}


def memory(megabytes: int, work: Path) -> dict[str, Any]:
    """How far the peak of a conversion is above what was resident after an earlier, tiny one."""
    import linexport

    _run("save", str(megabytes), str(work / "model"))
    save_model(TINY[LARGE], LARGE, work / "small")
    linexport.convert(work / "small", work / "first", bench=False, threads=1)
    weights = sum(f.stat().st_size for f in (work / "model").glob("*.safetensors")) / 2**20
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    linexport.convert(work / "model", work / "artifact", bench=False, threads=1)
    peak = _status("VmHWM") - before
    return {"weights_mb": round(weights), "peak_mb": round(peak), "times": round(peak / weights, 2)}


def save_large(megabytes: int, folder: Path) -> dict[str, Any]:
    """A model whose weights, eight layers of about equal size, take that much memory."""
    layers = 8
    width = int((megabytes * 2**20 / 4 / layers - 2 * 2**20) / (3 * 512))
    changes = {"num_hidden_layers": layers, "layer_types": FOUR * 2, "intermediate_size": width}
    save_model({**wide(LARGE), **changes}, LARGE, folder)
    return {}


def _status(field: str) -> float:
    """Megabytes of one field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{field}:")) / 1024


def _run(step: str, *arguments: str, timeout: int | None = None) -> dict[str, Any]:
    """A step in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--step", step, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:200])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


STEP: dict[str, Callable[..., dict[str, Any]]] = {
    "tiny": lambda name, work: tiny(name, Path(work)),
    "plain": lambda name, work: plain(name, Path(work)),
    "speed": lambda name, work, threads: speed(name, Path(work), int(threads)),
    "memory": lambda size, work: memory(int(size), Path(work)),
    "save": lambda size, folder: save_large(int(size), Path(folder)),
    "export": lambda folder, path: export(Path(folder), Path(path)),
}


def table(results: dict[str, Any]) -> str:
    """Markdown: a row a family."""
    rows = [
        "| family | max. relative error | nodes | fused / linear layers | conversion, s "
        "| prefill, ms: library / functions / eager / plain export / products "
        "| above: functions / eager / plain export "
        "| step, ms: library / functions / eager / products | above: functions / eager |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        if name in TINY or ":" in name:
            rows.append(f"| {name} | " + " | ".join(_cells(found)) + " |")
    return "\n".join(rows)


def _cells(found: dict[str, Any]) -> list[str]:
    small, wide_ = found.get("tiny", {}), found.get("speed", {})
    cells = ["", "", "", ""]
    if "errors" in small:
        worst = max(small["errors"].values())
        fused = small["fused"].get("LinearAttention", 0)
        cells = [
            f"{worst:.1e}",
            str(small["nodes"]),
            f"{fused} / {small['linear_layers']}",
            f"{small['seconds']}",
        ]
    for name, order in (
        ("prefill", ("library", "artifact", "eager", "plain", "products")),
        ("decode", ("library", "artifact", "eager", "products")),
    ):
        times = wide_.get(name, {})
        cells.append(" / ".join(f"{times[who]:.1f}" if who in times else "none" for who in order))
        cells.append(" / ".join(_above(times, who) for who in order[1:-1]))
    return cells


def _above(times: dict[str, Any], who: str) -> str:
    """Return the overhead of a baseline as text; "all" where the library has none itself."""
    if who not in times:
        return "none"
    ratio = times["overhead"].get(who)
    return "all" if ratio is None else f"{ratio:.1f}"


def main() -> None:
    """Run every step that FILE has no result of, and print the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("families", nargs="*", metavar="MODEL_TYPE")
    measurement.add_option(options, "read earlier results from FILE, and add to them")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--memory", type=int, metavar="MB", help="convert a model of such weights")
    options.add_argument("--only", choices=STEPS, help="one step of each family")
    real_shapes.add_options(options, real_shapes.LIBRARY)
    options.add_argument("--layers", type=int, help="with --shape: so many of its layers")
    options.add_argument("--work", type=Path, help="keep wide models and plain exports there")
    given = options.parse_args()
    results: dict[str, Any] = {}
    if given.json and given.json.is_file():
        results = measurement.read(given.json)
    steps = [
        (name, step, [str(given.threads)] if step == "speed" else [])
        for name in given.families or ([] if given.memory or given.shape else TINY)
        for step in STEPS
        if given.only in (None, step)
    ]
    if given.memory:
        steps.append((str(given.memory), "memory", []))
    if given.shape:
        steps.append((str(real_shapes.chosen(given)), "speed", [str(given.threads)]))
    with tempfile.TemporaryDirectory() as passing:
        for name, step, more in steps:
            if step in results.get(name, {}):
                continue
            wide_model = step in ("plain", "speed")
            work = (
                (given.work or Path(passing)) / name if wide_model else Path(passing) / name / step
            )
            work.mkdir(parents=True, exist_ok=True)
            try:
                found = _run(step, name, str(work), *more)
            except RuntimeError as error:
                found = {"failed": str(error)}
            results.setdefault(name, {})[step] = found
            print(name, step, json.dumps(found), flush=True)
            measurement.write(given.json, results)
    print(table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps(STEP[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
