"""The CPU library beside ONNX Runtime's kernel, the function body, PyTorch, OpenVINO and a product.

    python tools/bench_cpu.py [--lengths 512,1024] [--threads N] [--only NAME] [--json FILE]
                              [--openvino PYTHON]

OpenVINO runs causal elu+1 as ``linexport package --for onnx`` writes it, by an interpreter of its
own: ``tools/runtimes_environment DIR`` makes DIR/bin/python.

Causal elu+1, normalised, H = 8, d = 64, B = 1, then one head, gated and gated delta rules, what
ONNX Runtime has no kernel for, and layers of favor+ and taylor2. All baselines of a row take turns
in one process, hot (the same inputs again) and cold (other memory was read in between). The bound
is the recurrence's operations (4 H d^2 T for elu+1) at the speed that MatMul of 768 x 768 had in
the same turns. ONNX Runtime's kernel has neither map nor normaliser; the library computes both.
One head is measured with the library on one thread as well, where threads stay awake between calls.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import cpu_baselines
import measurement
import numpy as np
import onnx
from onnx import TensorProto, helper

from linexport.maps import cost
from linexport.models import feature_maps
from linexport.models.linear_attention_layer import LinearAttentionLayerConfig
from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.targets.base import OrtSession
from linexport.targets.lowering import diagonal
from linexport.timing.latency import Settings, interleaved

COLD = np.zeros(2**24, np.float32)
"""64 MiB, read between cold calls: more than the caches of a small server hold."""


Feeds = cpu_baselines.Feeds
Calls = cpu_baselines.Calls


class Measured(Protocol):
    """A model to measure; ``domains`` have operators for it."""

    domains: tuple[str, ...]

    @property
    def name(self) -> str:
        """Shown beside its times."""

    @property
    def heads(self) -> int:
        """Heads of values."""

    def feeds(self, length: int) -> dict[str, np.ndarray]:
        """Random inputs."""

    def model(self, domain: str) -> onnx.ModelProto:
        """One node of that domain; of linexport's its function is attached."""

    def operations(self, length: int) -> float:
        """Multiplications and additions of the recurrence."""


@dataclass(frozen=True)
class Case:
    """A layer: its rule, heads and widths; ``mapped``: elu+1 and a normaliser.

    ``kind`` is the type of the activations; states are float32.
    """

    domains = ("linexport", "com.microsoft")
    name: str
    rule: str = "linear"
    heads: int = 8
    width: int = 64
    mapped: bool = False
    kind: int = TensorProto.FLOAT

    def operations(self, length: int) -> float:
        """Writing the state and reading it."""
        return 4.0 * self.heads * self.width**2 * length

    def inputs(self) -> dict[str, int]:
        """Widths of the inputs, by name."""
        wide = self.heads * self.width
        found = {"query": wide, "key": wide, "value": wide}
        if self.rule.startswith("gated"):
            found["decay"] = self.heads
        if self.rule.endswith("delta"):
            found["beta"] = self.heads
        return found

    def feeds(self, length: int) -> dict[str, np.ndarray]:
        """Random inputs: keys of norm near 1, decays near 0."""
        random = np.random.default_rng(0)
        x = {
            n: random.standard_normal((1, length, w), np.float32) for n, w in self.inputs().items()
        }
        x["key"] /= np.float32(self.width**0.5)
        if "decay" in x:
            x["decay"] = -np.abs(x["decay"]) / 10
        if "beta" in x:
            x["beta"] = 1 / (1 + np.exp(-x["beta"]))
        return {n: a.astype(helper.tensor_dtype_to_np_dtype(self.kind)) for n, a in x.items()}

    def model(self, domain: str) -> onnx.ModelProto:
        """One node of linexport's op, its function attached, or of ONNX Runtime's."""
        ours = domain == "linexport"
        names = [n if n in self.inputs() else "" for n in ("query", "key", "value")]
        names += [""] * (2 if ours else 1)
        names += [n if n in self.inputs() else "" for n in ("decay", "beta")]
        attributes: dict[str, Any] = {
            "q_num_heads": self.heads,
            "kv_num_heads": self.heads,
            "update_rule": self.rule,
            "scale": 1.0,
        }
        if ours and self.mapped:
            attributes |= {
                "feature_map": feature_maps.find_map("elu1").kind,
                "normalize": 1,
                "eps": 1e-6,
            }
        while not names[-1]:
            names.pop()
        outputs = ["output", "state"] + (["normalizer"] if ours else [])
        node = helper.make_node("LinearAttention", names, outputs, domain=domain, **attributes)
        shapes: dict[str, list[Any]] = {n: ["B", "T", w] for n, w in self.inputs().items()}
        return _model(node, shapes, kind=self.kind)


@dataclass(frozen=True)
class DeltaRule:
    """GeneralizedDeltaRule as RWKV-7 has it."""

    domains = ("linexport",)
    name: str
    heads: int = 8
    width: int = 64

    def operations(self, length: int) -> float:
        """Reading the state along a and along q, and writing along b and along k."""
        return 8.0 * self.heads * self.width**2 * length

    def feeds(self, length: int) -> dict[str, np.ndarray]:
        """Random inputs: a of norm near 1, b its opposite, decays near 0."""
        random, shape = np.random.default_rng(0), (1, length, self.heads * self.width)
        names = ("query", "key", "value", "decay", "a")
        x = {n: random.standard_normal(shape, np.float32) for n in names}
        x["a"] /= np.float32(self.width**0.5)
        return x | {"b": -x["a"] / 2, "decay": -np.abs(x["decay"]) / 10}

    def model(self, domain: str) -> onnx.ModelProto:
        """One node with its function."""
        names = ["query", "key", "value", "decay", "a", "b"]
        outputs = ["output", "state"]
        settings = {"num_heads": self.heads, "scale": 1.0}
        node = helper.make_node("GeneralizedDeltaRule", names, outputs, domain=domain, **settings)
        return _model(node, {n: ["B", "T", self.heads * self.width] for n in names})


@dataclass(frozen=True)
class Scan:
    """Mamba's selective scan: values of width one, decays in two factors, one key for all heads."""

    domains = ("linexport",)
    name: str
    heads: int = 1024
    width: int = 16

    def operations(self, length: int) -> float:
        """Four products, two sums, and an exponential as the 16 that its polynomial takes."""
        return 22.0 * self.heads * self.width * length

    def shapes(self) -> dict[str, list[Any]]:
        """Shapes of the inputs, by name."""
        wide = {"query": self.width, "key": self.width, "value": self.heads, "decay": self.heads}
        return {n: ["B", "T", w] for n, w in wide.items()} | {"rates": [self.heads, self.width]}

    def feeds(self, length: int) -> dict[str, np.ndarray]:
        """Random inputs: steps near 0, rates of -1 to -N."""
        random = np.random.default_rng(0)
        sizes = {"B": 1, "T": length}
        x = {
            n: random.standard_normal([sizes.get(d, d) for d in shape], np.float32)
            for n, shape in self.shapes().items()
        }
        rates = -np.arange(1, self.width + 1, dtype=np.float32)
        x["rates"] = np.broadcast_to(rates, x["rates"].shape).copy()
        return x | {"decay": np.abs(x["decay"]) / 10}

    def model(self, domain: str) -> onnx.ModelProto:
        """One node, its function that of target ort."""
        names = ["query", "key", "value", "", "", "decay", *[""] * 6, "rates"]
        settings = {"q_num_heads": 1, "kv_num_heads": self.heads, "update_rule": "gated"}
        outputs = ["output", "state"]
        node = helper.make_node(
            "LinearAttention", names, outputs, domain=domain, scale=1.0, **settings
        )
        return _model(node, self.shapes(), lambda *_: diagonal.by_element)


@dataclass(frozen=True)
class Layer:
    """A converted layer with a feature map, its functions those of target ort."""

    domains = ("linexport",)
    kind: str
    heads: int = 8
    width: int = 64

    @property
    def name(self) -> str:
        """The map and the width of heads."""
        return f"{self.kind}, {self.heads} heads of {self.width}"

    @property
    def config(self) -> LinearAttentionLayerConfig:
        """The layer's."""
        return LinearAttentionLayerConfig(
            num_heads=self.heads, head_dim=self.width, feature_map=self.kind
        )

    def operations(self, length: int) -> float:
        """Writing the state and reading it; of the map nothing."""
        features = feature_maps.make(self.kind, self.width).features
        return 4.0 * self.heads * features * self.width * length

    def feeds(self, length: int) -> dict[str, np.ndarray]:
        """Random inputs."""
        return cost.inputs(self.config, length)

    def model(self, domain: str) -> onnx.ModelProto:
        """Return the converted layer."""
        with tempfile.TemporaryDirectory() as folder:
            return onnx.load(cost.export(self.config, Path(folder) / "layer"))


def _model(
    node: onnx.NodeProto,
    shapes: dict[str, list[Any]],
    choose: Any = None,
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info(n, kind, s) for n, s in shapes.items()]
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    opsets = [helper.make_opsetid("", 18)]
    if node.domain:
        opsets.append(helper.make_opsetid(node.domain, 1))
    graph = helper.make_graph([node], "one", infos, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if node.domain == "linexport":
        attach_functions(model, *([choose] if choose else []))
    return model


@dataclass(frozen=True)
class Others:
    """Baselines beside ONNX Runtime: PyTorch's, and an interpreter that has OpenVINO."""

    torch: bool
    openvino: Path | None

    @contextmanager
    def calls(self, case: Measured, feeds: Feeds, threads: int) -> Iterator[Calls]:
        """The calls that there are for a case, while the processes behind them run."""
        made: Calls = {}
        if self.torch and isinstance(case, Case) and case.mapped and case.heads > 1:
            run = cpu_baselines.compiled(case.heads, case.width)
            made["torch.compile"] = lambda: run(feeds)
        if self.torch and isinstance(case, DeltaRule):
            made["eager"] = cpu_baselines.eager_delta_rule(feeds, case.heads)
        if self.openvino is None or not (isinstance(case, Case) and case.mapped):
            yield made
            return
        model = case.model("linexport")
        [expected, *_] = _opened(model, threads).run(feeds).values()
        with tempfile.TemporaryDirectory() as folder:
            process = cpu_baselines.OpenVino(
                self.openvino, model, feeds, expected, Path(folder), threads
            )
            yield made | {"OpenVINO": process}
            process.close()


def row(case: Measured, length: int, threads: int, others: Others) -> dict[str, Any]:
    """Medians of all baselines at one length, hot and cold."""
    opened = {
        "library": _opened(case.model("linexport"), threads, native=True),
        "function": _opened(case.model("linexport"), threads),
    }
    if "com.microsoft" in case.domains:
        opened["kernel"] = _opened(case.model("com.microsoft"), threads)
    assert opened["library"].native, "the CPU library is not built: linexport plugins path cpu"
    feeds = case.feeds(length)
    calls: Calls = {
        name: lambda session=session: session.run(feeds) for name, session in opened.items()
    }
    calls["product"], operations = cpu_baselines.product(threads)
    settings = Settings(warmup=2, repeats=15, seconds=3.0, threads=threads, lead_in=1)
    with others.calls(case, feeds, threads) as more:
        calls |= more
        hot = {n: float(np.median(t)) for n, t in interleaved(calls, settings).items()}
        cold = {n: float(np.median(t)) for n, t in _cold(calls).items()}
    bound = case.operations(length) / operations * hot["product"]
    ratios = {n: t / hot["library"] for n, t in hot.items() if n != "product"}
    awake = _awake(case, feeds, threads) if case.heads == 1 else {}
    if awake:
        ratios["one thread"] = awake["one thread"] / awake["library"]
    load = os.getloadavg()[0]
    print(f"{case.name}, T = {length}: bound {bound:.2f} ms, load {load:.1f}")
    for kind, times in (("hot", hot), ("cold", cold), ("awake", awake)):
        if times:
            print(f"  {kind}: " + ", ".join(f"{n} {t:.2f}" for n, t in times.items()), flush=True)
    return {
        "case": case.name,
        "length": length,
        "bound_ms": bound,
        "hot_ms": hot,
        "cold_ms": cold,
        "awake_ms": awake,
        "times_library": ratios,
        "library_over_bound": hot["library"] / bound,
        "load": load,
    }


def _opened(model: onnx.ModelProto, threads: int, native: bool = False) -> OrtSession:
    return OrtSession(model.SerializeToString(), threads, taking_turns=True, native=native)


def _awake(case: Measured, feeds: Feeds, threads: int) -> dict[str, float]:
    """Medians of the library on one thread and on all, which wait awake for the next call.

    So ``linexport.load`` has them; where sessions take turns, each call wakes them again.
    """
    model = case.model("linexport").SerializeToString()
    opened = {
        name: OrtSession(model, count, native=True)
        for name, count in (("library", threads), ("one thread", 1))
    }
    times: dict[str, list[float]] = {name: [] for name in opened}
    for _ in range(5):
        for name, session in opened.items():
            time.sleep(0.1)  # the other's threads sleep then
            for call in range(120):
                start = time.perf_counter()
                session.run(feeds)
                times[name] += [1e3 * (time.perf_counter() - start)] if call >= 20 else []
    return {name: float(np.median(calls)) for name, calls in times.items()}


def _cold(calls: Calls) -> dict[str, list[float]]:
    """Milliseconds of calls, each after other memory was read."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(8):
        for name, call in calls.items():
            COLD.sum()
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Measure all cases."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--lengths", default="512,1024,4096,16384")
    options.add_argument("--threads", type=int, default=0)
    options.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    options.add_argument(
        "--openvino", type=Path, metavar="PYTHON", help="an interpreter with openvino"
    )
    options.add_argument("--only", default="", help="rows with this in their name")
    measurement.add_option(options)
    given = options.parse_args()
    register_schemas()
    lengths = [int(n) for n in given.lengths.split(",")]
    layer = Case("causal elu+1", mapped=True)
    rules: tuple[Measured, ...] = (
        Case("one head, elu+1", heads=1, mapped=True),
        Case("gated", "gated"),
        Case("gated, float16", "gated", kind=TensorProto.FLOAT16),
        Case("gated delta, 16 heads of 128", "gated_delta", heads=16, width=128),
        DeltaRule("generalised delta rule"),
        Scan("selective scan, 1024 channels of 16"),
    )
    maps = (Layer("favor+"), Layer("taylor2"), Layer("taylor2", width=16))
    measured = [(layer, n) for n in lengths] + [(case, n) for case in rules for n in (1, 1024)]
    measured += [(case, 4096) for case in (rules[0], *maps)]
    others = Others(not given.no_torch, given.openvino)
    rows = [
        row(case, length, given.threads, others)
        for case, length in measured
        if given.only in case.name
    ]
    measurement.write(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
