"""``linexport plan``: sizes beside those of real artifacts, and what is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper, parser
from torch import nn

import linexport
from linexport import planning
from linexport.errors import UsageError
from linexport.manifest.folder import read
from linexport.planning.device import chosen_device
from linexport.planning.estimate import DevicePlan, estimate
from linexport.planning.from_artifact import planned, planned_artifact
from linexport.planning.planned_model import PlannedModel
from linexport.planning.weights import KINDS, Kind, PlannedWeight, bytes_read, size
from linexport.system.room import GIB
from tests.support import ROOT


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_sizes_are_those_that_quantize_writes(
    exact: Path, quantised: Callable[[str], Path], kind: Kind
) -> None:
    """Said before, from the float32 artifact, where the tied table is stored twice."""
    before, after = planned(exact), planned(quantised(kind))
    assert after.kind == kind and before.kind == "float32"
    assert after.stored_bytes == pytest.approx(size(before.weights, kind), rel=0.02)
    assert size(after.weights, kind) == size(before.weights, kind)
    assert size(after.weights, "float32") == size(before.weights, "float32")
    table = 4 * 256 * 32
    assert before.stored_bytes == pytest.approx(size(before.weights, "float32") + table, rel=0.02)


def test_a_quantised_table_and_head_that_are_not_tied_are_two_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256)).eval()
    example = torch.zeros(2, 9, dtype=torch.long)
    linexport.convert((module, (example,)), tmp_path / "int8", weights="int8", bench=False)
    found = planned(tmp_path / "int8")
    assert sorted(w.role for w in found.weights) == ["other", "product", "table"]
    assert found.stored_bytes == pytest.approx(size(found.weights, "int8"), rel=0.02)


def test_states_are_those_of_a_stream(exact: Path) -> None:
    model, tokens = planned(exact), 9
    stream = linexport.load(exact, threads=1).stream()
    stream.step({"tokens": np.zeros((1, tokens), np.int64)})
    held = sum(array.nbytes for array in stream.state().arrays.values())
    assert held == model.state_bytes + tokens * model.token_bytes > 0


def test_an_artifact_is_planned_without_pytorch(exact: Path) -> None:
    text = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from linexport.planning import plan\n"
        f"print(len(plan({str(exact)!r}, device='l4', context=100).rows))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(3 * len(KINDS) + 2)  # fp8 in engines


def test_memory_is_what_an_opened_artifact_takes(exact: Path) -> None:
    """Most of it is the runtime's: the model is small. tools/bench_plan.py has larger ones."""
    script = [sys.executable, str(ROOT / "tools/bench_plan.py"), "--measure", str(exact)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    most = json.loads(done.stdout)["most"]
    rows = planning.plan(exact, memory=8, bandwidth=10, context=1024).rows
    (row,) = (row for row in rows if row.artifact)
    assert 0.5 < most / row.memory_bytes < 1.5


GRAPH = """<ir_version: 9, opset_import: ["": 20]>
g (int64[B, T] ids) => (float[] y)
{
    a = Gather(table, ids)
    b = MatMul(a, product)
    c = Transpose<perm=[1, 0]>(tied)
    d = MatMul(b, c)
    e = Gather(tied, ids)
    f = Concat<axis=-1>(d, e)
    y = ReduceSum(f)
}
"""
SHAPES = {"table": (1000, 64), "product": (64, 96), "tied": (500, 96)}


def test_weights_have_the_role_of_the_nodes_that_read_them(exact: Path) -> None:
    model = parser.parse_model(GRAPH)
    for name, shape in SHAPES.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    found = {w.name: w for w in planned_artifact(read(exact), model).weights}
    assert found == {
        "table": PlannedWeight("table", "table", 1000, 64),
        "product": PlannedWeight("product", "product", 96, 64),
        "tied": PlannedWeight("tied", "tied", 500, 96),
    }
    whole = 4 * (64 * 96 + 500 * 96)
    assert bytes_read(found.values(), "float32", 1) == whole + 4 * 64
    assert bytes_read(found.values(), "float32", 7) == whole + 7 * 4 * 64


def test_experts_are_read_as_tokens_choose_them() -> None:
    weight = PlannedWeight("up", "experts", 32 * 64, 128, experts=32, chosen=4)
    assert [weight.part_read(tokens) for tokens in (1, 2, 8, 9)] == [1 / 8, 1 / 4, 1, 1]


def model(weights: tuple[PlannedWeight, ...] = (), **changes: Any) -> PlannedModel:
    given: dict[str, Any] = {"state_bytes": 2**20, "token_bytes": 1000}
    given |= {"scratch": lambda rows, tokens, past: rows * tokens * 4096, "streams": True}
    weights = weights or (
        PlannedWeight("w", "product", 4096, 4096),
        PlannedWeight("n", "other", 4096, 1),
    )
    return PlannedModel("a model", weights, **{**given, **changes})


@given(
    outputs=st.integers(32, 5000),
    inputs=st.integers(32, 5000),
    context=st.integers(1, 100_000),
    batch=st.integers(1, 64),
)
def test_figures_follow_from_each_other(
    outputs: int, inputs: int, context: int, batch: int
) -> None:
    one = model((PlannedWeight("w", "product", outputs, inputs),))
    found = estimate(one, chosen_device("rtx4090", None, None), context, batch)
    more = estimate(one, chosen_device("rtx4090", None, None), context, batch + 1)
    for row, other in zip(found.rows, more.rows, strict=True):
        assert row.tokens_per_second and other.tokens_per_second
        assert row.sequences_per_second is None
        seconds = batch / row.tokens_per_second
        assert seconds * found.bandwidth == pytest.approx(row.step_bytes)
        assert row.fits == (row.memory_bytes <= found.usable_bytes)
        assert other.tokens_per_second >= row.tokens_per_second * (1 - 1e-9)
        assert other.memory_bytes > row.memory_bytes
    for target in ("ort-cuda", "tensorrt-rtx", "tensorrt"):
        sizes = {row.weights: row.weight_bytes for row in found.rows if row.target == target}
        assert sizes["float32"] == 2 * sizes["fp16"]
        assert ("fp8" in sizes) == (target != "ort-cuda")
        blocks = target == "ort-cuda" or (inputs % 32 == 0 and inputs > 32)
        assert sizes["int4"] < sizes["int8"] if blocks else sizes["int4"] == sizes["int8"]


def test_keys_and_values_of_cuda_are_in_half_precision_with_its_weights() -> None:
    """Those of an artifact are as it has them."""
    bare = [estimate(model(token_bytes=n), chosen_device("rtx4090", None, None), 1000, 3)
            for n in (0, 1000)]  # fmt: skip
    for without, row in zip(*(plan.rows for plan in bare), strict=True):
        share = 0.5 if row.target == "ort-cuda" and row.weights != "float32" else 1
        assert row.memory_bytes - without.memory_bytes == share * 3_000_000
        assert row.step_bytes - without.step_bytes == share * 3_000_000
    half = model(target="ort-cuda", kind="fp16", half_keys=True)
    found = estimate(half, chosen_device("rtx4090", None, None), 1000, 3)
    same = {(r.target, r.weights): r.step_bytes for r in bare[1].rows}
    for row in found.rows:
        cuda = row.target == "ort-cuda" and row.weights != "float32"
        assert row.step_bytes == same[row.target, row.weights] + (1_500_000 if cuda else 3_000_000)


def test_a_model_without_states_reads_whole_sequences() -> None:
    one = model(state_bytes=0, token_bytes=0, streams=False)
    found = estimate(one, chosen_device("rtx4090", None, None), 5000, 3)
    assert found.scratch_bytes == 3 * 5000 * 4096 and found.state_bytes == 0
    for row in found.rows:
        assert row.memory_bytes > row.weight_bytes + found.scratch_bytes
        assert row.tokens_per_second is None and row.sequences_per_second
        seconds = 3 / row.sequences_per_second
        assert seconds * found.bandwidth == pytest.approx(row.step_bytes)
        assert row.step_bytes == round(bytes_read(one.weights, row.weights, 3, row.target))


def test_an_artifact_without_states_or_weights_is_planned(tmp_path: Path) -> None:
    source = ROOT / "tests" / "support" / "factories" / "reference_models.py"
    linexport.convert(f"{source}:bidirectional", tmp_path / "a", bench=False, threads=1)
    found = planning.plan(tmp_path / "a", memory=8, bandwidth=40, context=4096)
    assert not found.streams and found.scratch_bytes > 0
    assert all(row.fits and row.tokens_per_second is None for row in found.rows)
    options = ["--memory", "8", "--bandwidth", "40", "--context", "4096"]
    command = [sys.executable, "-m", "linexport", "plan", str(tmp_path / "a"), *options]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sequences/s at most" in shown and "tokens/s" not in shown and "states  " not in shown


def targets(found: DevicePlan) -> set[str]:
    return {row.target for row in found.rows}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("rtx4090", {"ort-cuda", "tensorrt-rtx", "tensorrt"}),
        ("h100", {"ort-cuda", "tensorrt"}),
        ("orin-nano", {"ort-cuda", "tensorrt"}),
        ("dgx-spark", {"ort-cuda", "tensorrt-rtx", "tensorrt"}),
        ("t4", {"ort-cuda"}),
    ],
)
def test_targets_are_those_of_the_device(device: str, expected: set[str]) -> None:
    found = estimate(model(), chosen_device(device, None, None), 100, 1)
    assert targets(found) == expected
    assert any("7.5" in text for text in found.warnings) == (device == "t4")


@pytest.mark.parametrize(("device", "has_fp8"), [("rtx4090", True), ("rtx3090", False)])
def test_fp8_is_planned_for_gpus_that_have_it(device: str, has_fp8: bool) -> None:
    found = estimate(model(), chosen_device(device, None, None), 100, 1)
    assert any(row.weights == "fp8" for row in found.rows) == has_fp8


def test_experts_have_fewer_bits_for_gpus() -> None:
    experts = PlannedWeight("up", "experts", 8 * 64, 64, 8, 2)
    for target in ("ort-cuda", "tensorrt"):
        assert experts.size("int4", target) < 0.4 * experts.size("fp16")


def test_memory_of_a_jetson_is_not_a_models_alone() -> None:
    orin, card = (chosen_device(name, None, None) for name in ("orin-nano", "rtx5060"))
    assert orin.memory == card.memory == 8 * GIB
    assert orin.usable < card.usable < 8 * GIB


def test_a_device_by_hand_is_a_cpu() -> None:
    found = estimate(model(), chosen_device(None, 0.2, 40), 100, 1)
    assert targets(found) == {"ort"} and found.bandwidth == 40e9
    assert [row.fits for row in found.rows] == [False, False, True, True]
    by_kind = {row.weights: row for row in found.rows}
    assert by_kind["fp16"].step_bytes == by_kind["float32"].step_bytes  # computed with in float32
    with pytest.raises(UsageError, match=r"memory in GiB and .*bandwidth"):
        chosen_device(None, 8, None)


def test_it_is_printed_in_80_columns(exact: Path, cli: Callable[..., Any]) -> None:
    done = cli("plan", exact, "--device", "orin-nano", "--context", 8192, "--batch", 2)
    assert done.code == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Jetson Orin Nano Super 8 GB: 8 GiB at 102 GB/s, of which 6 GiB for a model" in lines
    assert lines[0].endswith("for target ort with weights in float32")
    assert any(line.split()[:2] == ["tensorrt", "int4"] for line in lines)


def test_json_has_every_figure(exact: Path, cli: Callable[..., Any]) -> None:
    done = cli(
        *("plan", exact, "--memory", 4, "--bandwidth", 30, "--context", 100, "--json"),
    )
    found = json.loads(done.out)
    (own,) = (row for row in found["rows"] if row["artifact"])
    assert own["target"] == "ort" and own["weights"] == "float32"
    assert own["weight_bytes"] == planned(exact).stored_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "rtx4091"), "rtx4090"),
        ((), "--device"),
        (("--memory", 8), "--bandwidth"),
        (("--device", "l4", "--context", 0), "context"),
        (("--device", "l4", "--context", 10**27), "1000000000"),
        (("--device", "l4", "--batch", 10**7), "1000000"),
        (("--device", "l4", "--memory", "inf"), "1000000"),
        (("--memory", 8, "--bandwidth", "inf"), "1000000"),
    ],
)
def test_bad_input_says_what_is_expected(
    exact: Path, cli: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    done = cli("plan", exact, "--context", 100, *arguments)
    assert done.code == 2 and message in done.err


def test_a_path_that_is_no_model_is_refused(tmp_path: Path, cli: Callable[..., Any]) -> None:
    done = cli("plan", tmp_path, "--device", "l4", "--context", 100)
    assert done.code == 2 and "config.json" in done.err
    (tmp_path / "config.json").write_text('{"_class_name": "SanaTransformer2DModel"}')
    done = cli("plan", tmp_path, "--device", "l4", "--context", 100)
    assert done.code == 4 and "plan with the artifact" in done.err
    (tmp_path / "config.json").write_text("[")
    done = cli("plan", tmp_path, "--device", "l4", "--context", 100)
    assert done.code == 2 and "Traceback" not in done.err
