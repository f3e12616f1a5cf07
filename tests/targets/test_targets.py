"""Targets: on each, every kind of layer equals PyTorch and runs without linexport."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport import passes, targets, trace
from linexport.errors import BuildError, UsageError
from linexport.graph import states
from linexport.graph.walk import all_nodes
from linexport.models.functional import linear_attention
from linexport.models.language_model import LanguageModel, LanguageModelConfig
from linexport.plugins.ops.linear_attention import OP
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec
from linexport.plugins.ops.op import Node
from linexport.sources import LoadedModel, Source
from linexport.targets import ort, ort_cuda
from linexport.targets.lowering import op_functions
from linexport.targets.lowering.choice import Candidate, Choice, lower
from linexport.targets.onnx27 import UNRELEASED, raise_opset
from tests.support import SCRIPTS

pytestmark = pytest.mark.usefixtures("one_thread")

TARGETS = ("ort", "ort-cuda", "onnx", "onnx27")
TOLERANCE = 5e-5


@dataclass(frozen=True)
class Variant:
    """One layer: its attributes and widths, and on target ort the lowering expected of it."""

    ort: str
    heads: int = 2
    kv_heads: int = 2
    d_k: int = 16
    d_v: int = 32
    rule: str = "linear"
    causal: bool = True
    normalize: bool = True
    per_channel: bool = False
    factored: bool = False
    masked: bool = False
    scale: float = 1.0


VARIANTS = {
    "plain": Variant("native", scale=0.37),
    "no normaliser": Variant("native", normalize=False),
    "grouped queries": Variant("native", heads=4, kv_heads=2),
    "one key head": Variant("native", heads=4, kv_heads=1),
    "grouped values": Variant("native", heads=2, kv_heads=4),
    "six queries per key": Variant("portable", heads=6, kv_heads=1),
    "wider values": Variant("native_padded", d_k=8, d_v=24),
    "wider keys": Variant("native_padded", d_k=24, d_v=8),
    "width 48": Variant("native_padded", d_k=48, d_v=48),
    "width 63": Variant("native_padded", d_k=63, d_v=63),
    "width 80": Variant("native_padded", d_k=80, d_v=80),
    "width 100": Variant("native_padded", d_k=100, d_v=100),
    "gated": Variant("native", rule="gated"),
    "gated per channel": Variant("native_padded", rule="gated", per_channel=True, d_k=20),
    "gated, grouped": Variant("native", rule="gated", heads=4, kv_heads=2, normalize=False),
    "delta": Variant("native", rule="delta", normalize=False),
    "gated delta": Variant("native_padded", rule="gated_delta", normalize=False, d_v=20),
    "gated delta per channel": Variant(
        "native", rule="gated_delta", normalize=False, per_channel=True
    ),
    "values of width one": Variant(
        "by_element", rule="gated", normalize=False, per_channel=True, d_v=1
    ),
    "decay in two factors": Variant(
        "by_element", rule="gated", normalize=False, factored=True, d_v=1
    ),
    "decay in two factors, wide values": Variant(
        "portable", rule="gated_delta", normalize=False, factored=True
    ),
    "masked": Variant("native", masked=True),
    "masked and gated": Variant("native", masked=True, rule="gated"),
    "one value channel": Variant("running_sum", normalize=False, scale=0.37, d_v=1),
    "one value channel, grouped queries": Variant(
        "running_sum", heads=4, kv_heads=2, normalize=False, d_v=1, masked=True
    ),
    "one value channel, grouped values": Variant(
        "running_sum", heads=2, kv_heads=4, normalize=False, d_v=1
    ),
    "bidirectional": Variant("portable", causal=False),
    "bidirectional, wide": Variant("portable", causal=False, scale=0.37, d_v=48),
    "bidirectional, grouped": Variant(
        "portable", heads=4, kv_heads=2, causal=False, normalize=False, scale=0.37
    ),
    "bidirectional, masked": Variant("portable", causal=False, masked=True, d_k=63),
}


class Layer(nn.Module):
    """The op on raw inputs, which it makes valid: positive keys, negative decay, beta in (0, 1).

    The inputs are as wide as the widest layer needs them; others take what is theirs.
    """

    def __init__(self, v: Variant) -> None:
        super().__init__()
        self.v = v
        self.spec = LinearAttentionSpec(
            v.heads, v.kv_heads, v.rule, v.causal, v.normalize, v.scale, 1e-6
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, keep: Tensor
    ) -> Tensor:
        v = self.v
        key = key[..., : v.kv_heads * v.d_k].relu()
        if self.spec.has_beta:
            key = nn.functional.normalize(key.unflatten(-1, (v.kv_heads, -1)), dim=-1).flatten(-2)
        decay = gate[..., : v.kv_heads * (v.d_k if v.per_channel else 1)].sigmoid().log()
        beta = gate[..., -v.kv_heads :].sigmoid()
        scale = torch.linspace(0.1, 2.0, v.kv_heads * v.d_k).unflatten(0, (v.kv_heads, v.d_k))
        return linear_attention(
            query[..., : v.heads * v.d_k].relu(),
            key,
            value[..., : v.kv_heads * v.d_v],
            decay=decay if self.spec.has_decay else None,
            beta=beta if self.spec.has_beta else None,
            key_mask=keep if v.masked else None,
            decay_scale=scale if v.factored else None,
            **self.spec.attributes(),
        )[0]


class Layers(nn.Module):
    """Several layers side by side on the same inputs: to trace many takes as long as one."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(Layer(VARIANTS[n]) for n in names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(*inputs) for layer in self.layers)


def layer_inputs(batch: int, length: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    dense = [torch.randn(batch, length, 208, generator=generator) for _ in range(4)]
    return (*dense, torch.rand(batch, length, generator=generator) < 0.7)


def traced(module: nn.Module, args: tuple[Tensor, ...]) -> onnx.ModelProto:
    dims: Any = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * len(args)
    if isinstance(module, Layers):
        dims = (dims,)  # they are one argument, *inputs
    source = Source("factory", "here", None, "a module")
    return passes.run(trace.trace(LoadedModel(module.eval(), args, {}, dims, source)).model)


@cache
def layers(*names: str) -> tuple[Layers, onnx.ModelProto]:
    module = Layers(names or list(VARIANTS))
    return module, traced(module, layer_inputs(2, 16, 0))


@cache
def language_model() -> tuple[LanguageModel, onnx.ModelProto]:
    torch.manual_seed(0)
    config = LanguageModelConfig(dim=32, num_heads=4, layers=2)
    module = LanguageModel(config)
    return module, traced(module, module.example_inputs(2, 16, 0))


def lowered(model: onnx.ModelProto, target: str) -> tuple[onnx.ModelProto, list[Choice]]:
    chosen = targets.find_target(target)
    return lower(chosen.prepare(model), chosen.candidates)


def feeds(model: onnx.ModelProto, inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
    held = states.find_states(model)
    pasts = {s.past for s in held}
    used = [i.name for i in model.graph.input if i.name not in pasts]
    zeros = {s.past: np.zeros((inputs[0].shape[0], *s.shape[1:]), s.dtype) for s in held}
    return {**{n: x.numpy() for n, x in zip(used, inputs, strict=True)}, **zeros}


def errors(got: Sequence[np.ndarray], expected: Sequence[Tensor]) -> list[float]:
    """Each output's largest error, relative to its largest value."""
    assert [g.shape for g in got] == [e.shape for e in expected]
    return [
        float(np.abs(g - e.numpy()).max() / e.abs().max())
        for g, e in zip(got, expected, strict=True)
    ]


def wrong(
    session: targets.InferenceSession, model: onnx.ModelProto, module: Layers
) -> dict[str, float]:
    """The layers whose output differs, at lengths on and off the borders of chunks."""
    found = {}
    for batch, length in ((1, 1), (2, 16), (3, 67), (1, 150)):
        inputs = layer_inputs(batch, length, length)
        expected = module(*inputs)
        got = list(session.run(feeds(model, inputs)).values())[: len(expected)]
        found |= {
            f"{name} at {length}": error
            for name, error in zip(module.names, errors(got, expected), strict=True)
            if not error <= TOLERANCE
        }
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_layer_equals_pytorch_here_and_in_plain_onnxruntime(
    target: str, tmp_path: Path
) -> None:
    module, model = layers()
    made, choices = lowered(model, target)
    check_file(made, target)
    assert all(c.reason and c.tuned is None for c in choices)
    assert {c.node: c.lowering for c in choices} == {
        f"layers.{i}/LinearAttention": expected(v, target) for i, v in enumerate(VARIANTS.values())
    }
    path = tmp_path / "model.onnx"
    onnx.save_model(made, str(path))
    assert wrong(targets.find_target(target).open(path, threads=1), model, module) == {}
    inputs = layer_inputs(2, 67, 1)
    errors_there = run_plainly(path, feeds(model, inputs), module(*inputs), target)
    assert max(errors_there) <= TOLERANCE


@pytest.mark.parametrize("target", TARGETS)
def test_a_language_model_equals_pytorch_here_and_in_plain_onnxruntime(
    target: str, tmp_path: Path
) -> None:
    module, model = language_model()
    made, choices = lowered(model, target)
    check_file(made, target)
    conv = {
        "ort": "channels_last",
        "ort-cuda": "native",
        "onnx": "portable",
        "onnx27": "standard",
    }[target]
    assert {c.lowering for c in choices if c.op == "CausalConvWithState"} == {conv}
    path = tmp_path / "model.onnx"
    onnx.save_model(made, str(path))
    session = targets.find_target(target).open(path, threads=1)
    for batch, length in ((1, 1), (3, 150)):
        tokens = module.example_inputs(batch, length, length)
        with torch.no_grad():
            logits = module(*tokens)
        got = session.run(feeds(model, tokens))["output"]
        assert errors([got], [logits])[0] <= TOLERANCE
    assert max(run_plainly(path, feeds(model, tokens), [logits], target)) <= TOLERANCE


def check_file(model: onnx.ModelProto, target: str) -> None:
    onnx.checker.check_model(model)
    opset = next(o.version for o in model.opset_import if not o.domain)
    assert opset == 27 if target == "onnx27" else opset <= 23
    used = {n.domain for f in model.functions for n in f.node}
    assert used <= ({"", "com.microsoft"} if target.startswith("ort") else {""})
    if not target.startswith("ort"):
        assert {o.domain for o in model.opset_import} <= {"", "linexport"}


def expected(variant: Variant, target: str) -> str:
    """The lowering its node gets."""
    if target == "onnx27":
        return "standard" if variant.causal else "portable"
    if target == "ort-cuda":
        if not variant.causal:
            return "portable"
        if variant.factored or variant.ort == "by_element":
            return "native"
        divided = variant.d_k in (48, 63, 80, 100)
        several = variant.heads > variant.kv_heads
        return ("native_padded" if divided else "native") if several else "gated_delta_net"
    return variant.ort if target == "ort" or variant.ort == "by_element" else "portable"


def test_on_cuda_nothing_goes_block_by_block_and_no_sum_runs_over_all_tokens() -> None:
    """Loops there are driven by the host, and its CumSum adds up anew for every token."""
    made, _ = lowered(layers()[1], "ort-cuda")
    used = {node.op_type for node in all_nodes(made)}
    assert not used & {"Scan", "Loop", "If", "CumSum"}
    assert used >= {"LinearAttention", "GatedDeltaNet"}


def test_states_beyond_a_block_of_the_cuda_kernel_are_not_given_to_it() -> None:
    """By its formula: 4 (d_k d_v + d_k + max(d_k, d_v)) bytes of 99 KiB, and 1,024 threads."""
    assert ort_cuda.takes(128, 128) and ort_cuda.takes(64, 256)
    assert not ort_cuda.takes(256, 128) and not ort_cuda.takes(2145, 1)
    node = Node(
        "LinearAttention",
        {"q_num_heads": 2, "kv_num_heads": 1, "normalize": 0},
        ("query", "key", "value", "", "", "", "", ""),
        {"query": (1, None, 512), "key": (1, None, 256), "value": (1, None, 256)},
    )
    (choice,) = ort_cuda.TARGET.candidates(OP, node)
    assert choice.name == "portable" and "256 x 256 are too large" in choice.reason


def run_plainly(
    path: Path, fed: Mapping[str, np.ndarray], outputs: Sequence[Tensor], target: str
) -> list[float]:
    """Errors of the outputs in a process that cannot import linexport.

    For ONNX Runtime 1.31, which has no kernel of GatedDeltaNet for the CPU, that is in standard
    operators, and opset 27 is asked for.
    """
    older = onnxruntime.__version__.startswith("1.31.")
    if older and target == "ort-cuda":
        onnx.save_model(op_functions.defined(onnx.load(path)), str(path))
    file = path.with_suffix(".npz")
    arrays = {f"in:{k}": v for k, v in fed.items()}
    arrays |= {f"out:{i}": v.numpy() for i, v in enumerate(outputs)}
    np.savez(file, allow_pickle=False, **arrays)
    environment = {k: v for k, v in os.environ.items() if k != UNRELEASED}
    if older and target == "onnx27":
        environment[UNRELEASED] = "0"
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "run_without_linexport.py"), str(path), str(file)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=path.parent,
    )
    assert done.returncode == 0, done.stderr
    found = [float(line) for line in done.stdout.split()]
    assert len(found) == len(outputs)
    return found


def test_opset_27_opens_whatever_the_environment_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = lowered(layers("width 63")[1], "onnx27")
    path = tmp_path / "model.onnx"
    onnx.save_model(model, str(path))
    monkeypatch.delenv(UNRELEASED, raising=False)
    targets.find_target("onnx27").open(path)
    assert UNRELEASED not in os.environ
    monkeypatch.setenv(UNRELEASED, "1")
    targets.find_target("onnx27").open(path)
    assert os.environ[UNRELEASED] == "1"


def test_an_operator_that_opset_27_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from linexport.targets import onnx27

    monkeypatch.setattr(onnx27, "_since", lambda op_type, version: version)
    with pytest.raises(BuildError, match=r"changed in ONNX opset 27.*target=.ort"):
        raise_opset(layers("width 63")[1])


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'cuda'.*onnx.*ort"):
        targets.find_target("cuda")
    assert set(targets.listings()) >= set(TARGETS)
    assert targets.DEFAULT == "ort"


def test_tuning_takes_the_fastest_and_records_every_number() -> None:
    """A runner whose models take as long as it says: the last candidate is the fastest."""
    _, model = layers("width 63")
    chosen = targets.find_target("ort")
    seen: list[Mapping[str, np.ndarray]] = []
    waits = {"native_padded": 0.006, "native": 0.004, "portable": 0.001}
    opened: list[str] = []

    def runner(alone: onnx.ModelProto) -> Callable[[Mapping[str, np.ndarray]], object]:
        assert [n.op_type for n in alone.graph.node] == ["LinearAttention"]
        name = list(waits)[len(opened)]
        opened.append(name)

        def run(fed: Mapping[str, np.ndarray]) -> None:
            seen.append(fed)
            time.sleep(waits[name])

        return run

    _, choices = lower(model, chosen.candidates, runner, {"batch": 1, "seq": 33})
    choice = next(c for c in choices if c.op == "LinearAttention")
    assert opened == list(waits)
    assert choice.lowering == "portable"
    assert choice.reason == "fastest when measured here"
    assert choice.tuned is not None
    assert [t["lowering"] for t in choice.tuned] == list(waits)
    for record in choice.tuned:
        assert record["median_ms"] >= 1e3 * waits[record["lowering"]]
    assert {v.shape[:2] for n, v in seen[0].items() if not n.startswith("past")} == {(1, 33)}
    assert choice.json()["tuned"] == choice.tuned


def test_tuning_measures_equal_nodes_once() -> None:
    _, model = language_model()
    opened = []

    def runner(alone: onnx.ModelProto) -> Callable[[Mapping[str, np.ndarray]], object]:
        opened.append(alone.graph.node[0].op_type)
        return targets.find_target("ort").open(alone.SerializeToString(), threads=1).run

    _, choices = lower(
        model, targets.find_target("ort").candidates, runner, {"batch": 1, "seq": 32}
    )
    several = [c for c in choices if c.op != "FeatureMap"]
    assert len(several) == 4 and all(c.tuned for c in several)
    assert len(opened) == sum(len(c.tuned or ()) for c in several[:2])
    for choice in several:
        fastest = min(choice.tuned or (), key=lambda t: t["median_ms"])
        assert choice.lowering == fastest["lowering"]


@pytest.mark.parametrize("place", [1, 2])
def test_every_candidate_is_correct_not_only_the_first(place: int) -> None:
    module, model = layers()
    right = targets.find_target("ort")

    def pick(op: Any, node: Any) -> list[Candidate]:
        found = list(right.candidates(op, node))
        return found[min(place, len(found) - 1) :]

    picked, choices = lower(model, pick)
    assert {c.lowering for c in choices} == {"native", "portable"}
    assert wrong(right.open(picked.SerializeToString(), threads=1), model, module) == {}


@pytest.mark.parametrize(
    ("kind", "rule", "normalize", "lowering"),
    [
        ("identity", "gated", False, "native"),  # adds nothing to the kernel's own work
        ("identity", "gated", True, "portable"),  # a ratio of two small sums
        ("taylor2", "gated", False, "portable"),  # 153 features of 16 components
        ("elu1", "linear", True, "native"),  # no function of a product
    ],
)
def test_a_map_is_lowered_with_its_attention(
    kind: str, rule: str, normalize: bool, lowering: str
) -> None:
    spec = LinearAttentionSpec(2, 2, rule, normalize=normalize)
    shapes: dict[str, tuple[Any, ...]] = dict.fromkeys(("query", "key"), ("B", "T", 32))
    shapes["value"] = ("B", "T", 64)
    names = ["query", "key", "value"]
    if spec.has_decay:
        names += ["", "", "decay"]
        shapes["decay"] = ("B", "T", 2)
    node = Node(OP.name, {**spec.attributes(), "feature_map": kind}, tuple(names), shapes)
    assert ort.TARGET.candidates(OP, node)[0].name == lowering
