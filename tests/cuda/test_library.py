"""The CUDA library in ONNX Runtime, on a stand-in for the driver: what it launches is the plan.

For this the library is compiled as one of ONNX Runtime's CPU provider, whose memory is the host's,
as the stand-in's is. The stand-in reads the parameter table of each kernel, and computes nothing.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from linexport import passes, targets
from linexport.errors import UsageError
from linexport.plugins.cuda import library
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.kernels.description import MULTIPROCESSORS, Description, carried_by
from linexport.plugins.ops.registry import all_ops
from linexport.targets import Options
from linexport.targets.base import OrtSession
from linexport.targets.lowering.choice import lower
from linexport.targets.trt.parser_form import described
from tests.support import ROOT, SCRIPTS, stand_in_driver, tensorrt_models

pytestmark = pytest.mark.services

pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")

SM = 90
SIZES = [(1, 1), (2, 3), (1, 200), (1, 4096), (2, 0), (0, 5)]


def compiled(folder: Path) -> Path:
    """The library, its operators declared as those of the CPU provider."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    made = folder / "liblinexport_cuda.so"
    folders = [*library.source_folders(), ROOT / "plugins/cpu/cpp"]
    sources = [f for folder in folders[:-1] for f in sorted(folder.glob("*.cpp"))]
    command = ["c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-I{folder}" for folder in folders]
    command += ['-DLINEXPORT_EXECUTION_PROVIDER="CPUExecutionProvider"']
    command += ['-DLINEXPORT_SOURCES=""', *map(str, sources), "-o", str(made), "-ldl"]
    subprocess.run(command, check=True)
    return made


def prepared(model: onnx.ModelProto, sm: int = SM, precision: str = "fp32") -> onnx.ModelProto:
    """The model as target ort-cuda writes it for a GPU."""
    target = targets.find_target("ort-cuda")
    chosen = target.configure(target, Options(precision, (sm,)))
    ready = chosen.prepare(passes.run(model, ("absorb",)))
    return chosen.written(lower(ready, chosen.candidates)[0])


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SimpleNamespace]:
    """``play(model, sizes, sm, multiprocessors)``, of the GPU: what is played is a namespace.

    Of shapes of the outputs or an error, launches by size, and how many modules were loaded.
    """
    place = tmp_path_factory.mktemp("driver")
    driver, made = stand_in_driver.compiled(place), compiled(place)

    def play(
        model: onnx.ModelProto, sizes: Sequence[Any] = (), sm: int = SM, multiprocessors: int = 132
    ) -> SimpleNamespace:
        path, log = place / "model.onnx", place / "log"
        bare = onnx.ModelProto()
        bare.CopyFrom(model)
        del bare.functions[:]  # so that nothing but the library can run a node
        onnx.save_model(bare, str(path))
        log.unlink(missing_ok=True)
        command = [sys.executable, str(SCRIPTS / "on_cuda_library.py"), str(path), str(made)]
        done = subprocess.run(
            [*command, json.dumps([*sizes])],
            capture_output=True,
            text=True,
            env=stand_in_driver.environment(driver, log, sm)
            | {
                "FAKE_DRIVER_OTHERS_MEMORY": "1",
                "FAKE_DRIVER_MULTIPROCESSORS": str(multiprocessors),
            },
        )
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        names = [*(f"{b}x{t}" for b, t in sizes), "end"]
        launches = {}
        if isinstance(result := json.loads(done.stdout), list):
            for size, (first, last) in zip(sizes, itertools.pairwise(names), strict=True):
                own = stand_in_driver.between(rows, first, last)
                launches[tuple(size)] = [row for row in own if row["call"] == "launch"]
        modules = [row["call"] for row in rows].count("module")
        return SimpleNamespace(result=result, launches=launches, modules=modules)

    return play


def kernels_of(model: onnx.ModelProto) -> list[Description]:
    return [described(node) for node in model.graph.node if carried_by(node)]


def planned(
    description: Description,
    batch: int,
    length: int,
    multiprocessors: int = MULTIPROCESSORS[SM],
) -> list[tuple[Any, ...]]:
    """Entry, grid, threads and numbers of each launch, by the plan."""
    plan, found = description.plans[SM], []
    values = plan.symbols(batch, length, multiprocessors)
    for launch in plan.route(batch, length, multiprocessors).launches:
        grid = [extent.of(values) for extent in launch.grid]
        if all(grid):
            kernel = launch.kernel
            numbers = [values[a.name] for a in kernel.arguments if not a.is_pointer]
            found.append((kernel.function.rpartition(".")[2], grid, 32 * kernel.warps, numbers))
    return found


CASES = {
    "linear": lambda: tensorrt_models.node(),
    "gated": lambda: tensorrt_models.node("gated", normalize=False),
    "gated_delta": lambda: tensorrt_models.node("gated_delta", normalize=False),
    "convolution": tensorrt_models.convolution,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_launches_are_those_of_the_plan(
    case: str, precision: str, play: Callable[..., SimpleNamespace]
) -> None:
    model = prepared(CASES[case](), precision=precision)
    (description,) = kernels_of(model)
    played = play(model, SIZES)
    assert isinstance(played.result, list), played.result
    for (batch, length), shapes in zip(SIZES, played.result, strict=True):
        wanted = planned(description, batch, length)
        launches = played.launches[batch, length]
        assert [row["entry"] for row in launches] == [entry for entry, *_ in wanted]
        for row, (_, grid, threads, numbers) in zip(launches, wanted, strict=True):
            assert (row["grid"], row["threads"]) == (grid, threads)
            assert [x for x in row["arguments"][:-2] if x < 2**20 and x] == [
                n for n in numbers if n
            ]
        known = {"batch": batch, "length": length}
        assert sorted(shapes) == sorted(
            _in_graph(case, [known.get(s, s) for s in x.shape])
            for x in description.outputs[: len(shapes)]
        )


def _in_graph(case: str, shape: list[Any]) -> list[Any]:
    """Convolutions have channels before tokens in the model, behind a Transpose."""
    return [shape[0], shape[2], shape[1]] if case == "convolution" and shape[2] == 24 else shape


def test_equal_nodes_share_modules(play: Callable[..., SimpleNamespace]) -> None:
    """Each launches all of its kernels, and every kernel is loaded once."""
    model = prepared(CASES["gated"]())
    twin = onnx.NodeProto()
    twin.CopyFrom(next(filter(carried_by, model.graph.node)))
    output = next(x for x in model.graph.output if x.name == twin.output[0])
    twin.name = "twin"
    twin.output[:] = [f"{name}_of_the_twin" for name in twin.output]
    model.graph.node.append(twin)
    model.graph.output.add().CopyFrom(output)
    model.graph.output[-1].name = twin.output[0]
    first, second = kernels_of(model)
    assert first == second
    played = play(model, [(1, 4096)])
    assert isinstance(played.result, list), played.result
    assert len(played.launches[1, 4096]) == 2 * len(planned(first, 1, 4096))
    assert played.modules == len(first.binaries[SM])


@pytest.mark.parametrize(("found", "counted"), [(40, 40), (500, MULTIPROCESSORS[SM])])
def test_segments_are_for_the_multiprocessors_there_are(
    found: int, counted: int, play: Callable[..., SimpleNamespace]
) -> None:
    """And for no more than the plan was made for."""
    model = prepared(CASES["gated"]())
    (description,) = kernels_of(model)
    launches = play(model, [(1, 4096)], multiprocessors=found).launches[1, 4096]
    wanted = planned(description, 1, 4096, counted)
    assert [row["grid"] for row in launches] == [grid for _, grid, *_ in wanted]
    assert wanted != planned(description, 1, 4096, counted + 20)


def test_a_gpu_without_kernels_is_named(play: Callable[..., SimpleNamespace]) -> None:
    played = play(prepared(CASES["linear"]()), sm=86)
    assert "no kernels for compute capability 86" in played.result


def test_a_node_without_kernels_is_refused(play: Callable[..., SimpleNamespace]) -> None:
    model = prepared(CASES["linear"]())
    for node in filter(carried_by, model.graph.node):
        del node.attribute[:]
    assert "was not converted for this library" in play(model).result


def test_states_of_another_shape_are_refused(play: Callable[..., SimpleNamespace]) -> None:
    model = prepared(CASES["linear"]())
    state = next(i for i in model.graph.input if i.name == "past_state_0")
    state.type.tensor_type.shape.dim[2].dim_value = 32
    assert "past_state has shape (1, 8, 32, 64)" in play(model, [(1, 3)]).result


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_without_the_library_the_function_runs(precision: str) -> None:
    """In ONNX Runtime alone, in half precision too; bfloat16 is widened on a CPU."""
    model = prepared(tensorrt_models.node(), precision=precision)
    alone = targets.find_target("ort-cuda").open(model.SerializeToString(), threads=1)
    assert isinstance(alone, OrtSession) and not alone.native
    assert alone.inner.get_providers() == ["CPUExecutionProvider"]


def test_what_no_kernel_computes_is_no_function_of_the_domain() -> None:
    """The library has operators of these names, which a node without kernels cannot be."""
    bidirectional = prepared(tensorrt_models.node(causal=False, normalize=False))
    left = [n for n in bidirectional.graph.node if n.domain == "linexport"]
    assert all(map(carried_by, left))


def test_every_op_that_has_kernels_is_an_operator_of_the_library() -> None:
    """Those in C++ are named."""
    source = (library.source_folders()[0] / "operators.cpp").read_text(encoding="utf-8")
    named = re.search(r"operators\[\] = \{(.*?)\}", source, re.DOTALL)
    assert named is not None
    found = {*re.findall(r'"(\w+)"', named[1])}
    assert found == {LAYER, *(op.name for op in all_ops().values() if op.kernels)}


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(quick=True), "quick=True and timing_cache are of targets that build engines"),
        (Options(precision="int4"), "expected one of fp32, fp16, bf16"),
        (Options(plugins=False, sms=(SM,)), "plugins=False wants none"),
        (Options(sms=(70,)), "no kernels for compute capability 7.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Options, message: str) -> None:
    target = targets.find_target("ort-cuda")
    with pytest.raises(UsageError, match=message):
        target.configure(target, options)


def test_element_types_of_outputs_are_what_the_library_declares() -> None:
    model = prepared(tensorrt_models.node(), precision="fp16")
    (description,) = kernels_of(model)
    assert description.outputs[0].type == "fp16"
    assert {x.type for x in description.outputs[1:]} == {"fp32"}
    types = {v.name: v.type.tensor_type.elem_type for v in model.graph.output}
    assert types["present_state_0"] == TensorProto.FLOAT
