"""Folders prepared for engines that are built elsewhere: what is in them, what is said, what runs.

Nothing runs on a GPU: the engine is really built by TensorRT-RTX, which stands in for TensorRT; the
script calls a trtexec that records its arguments; the programs run on stand-ins for TensorRT and
the driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import linexport
from linexport import targets
from linexport.conversion.build import build
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph.dims import DimRange
from linexport.graph.interface import input_records, tensor_records
from linexport.manifest import read
from linexport.manifest.records import StateRecord
from linexport.plugins.ops.registry import all_ops
from linexport.plugins.tensorrt import library
from linexport.plugins.tensorrt.flavour import RTX, TENSORRT
from linexport.targets.base import Converted, Options
from linexport.targets.trt import prepared as prepared_folder
from linexport.targets.trt import target as trt
from tests.support import ROOT, SCRIPTS, native_text, tensorrt_headers

pytestmark = pytest.mark.services

STAND_INS = ROOT / "tests/support/cpp/tensorrt_stand_in"
OPTIONS = {"target": "tensorrt", "sms": (87, 90, 110), "dims": ("seq=1:16:200",)}


@pytest.fixture
def prepared(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact that was prepared for three GPUs."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    if TENSORRT.installed:
        pytest.skip("TensorRT is installed here")
    return Path(shutil.copytree(converted("small", **OPTIONS), tmp_path / "prepared"))


def test_a_folder_is_written_that_says_what_it_is(prepared: Path) -> None:
    manifest = read(prepared)
    assert manifest.status == "ok" and manifest.engines == () and manifest.prepared is not None
    found = {(gpu.sm, gpu.cuda, gpu.driver) for gpu in manifest.prepared.gpus}
    assert found == {(87, "12.8", 525), (90, "12.8", 525), (110, "13.1", 580)}
    names = {
        "model.onnx",
        "linexport_tensorrt.cpp",
        "build.sh",
        "run.cpp",
        "run.py",
        "linexport_engine.h",
        "linexport_engine.py",
    }
    assert set(manifest.files) == names
    assert {path.name for path in prepared.iterdir()} == {*names, "manifest.json", "report.html"}


def test_everything_says_that_there_is_no_engine_yet(
    prepared: Path, cli: Callable[..., Any]
) -> None:
    sentence = "no engine yet, so nothing was checked on such a GPU"
    assert sentence in " ".join(cli("inspect", prepared).out.split())
    assert sentence in (prepared / "report.html").read_text()
    done = cli("validate", prepared, "--source", read(prepared).source.location)
    words = " ".join(done.out.split())
    assert (
        done.code == 0
        and f"not built prepared for compute capability 8.7, 9.0, 11.0; {sentence}" in words
    )
    with pytest.raises(EnvironmentProblemError, match=f"{sentence}. Build it on the machine"):
        linexport.load(prepared)
    x = np.ones((1, 5, 8), np.float32)
    assert linexport.load(prepared, engine=False).run(x)["output"].shape == (1, 5, 8)


def test_building_here_ends_with_all_that_is_missing(
    prepared: Path, cli: Callable[..., Any]
) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in prepared.iterdir())
    done = cli("build", prepared)
    assert done.code == 5
    for text in (
        "8.7, 9.0, 11.0",
        "TensorRT is not installed",
        "No NVIDIA driver",
        "linexport build",
    ):
        assert text in done.err
    assert sorted((path.name, path.stat().st_mtime_ns) for path in prepared.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 5, "name that GPU: --sm 87"),
        (("--sm", "t4"), 2, "no bfloat16 and no TensorFloat-32"),
        (("--sm", "99"), 2, "--sm names 99; TensorRT is prepared for 75, 80"),
        (("--sm", "87", "--timing-cache", "x"), 2, "pass it there, to linexport build"),
        (("--sm", "87", "--inline"), 2, "--inline is for ONNX models"),
    ],
)
def test_what_cannot_be_prepared(
    cli: Callable[..., Any],
    factories: Any,
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    if TENSORRT.installed:
        pytest.skip("TensorRT is installed here")
    source = factories.source("small")
    done = cli("convert", source, "-o", tmp_path / "out", "--target", "tensorrt", *arguments)
    assert done.code == code and message in done.err
    assert not (tmp_path / "out").exists()


def test_what_was_not_prepared_is_not_built(converted: Callable[..., Path], rtx: Any) -> None:
    with pytest.raises(
        UsageError, match=r"of target ort\. Convert the model with target=.tensorrt"
    ):
        build(converted("small"))
    engines = converted("small", target="tensorrt-rtx", sms=(89,), dims=("seq=1:16:200",))
    with pytest.raises(UsageError, match="has its engines already"):
        build(engines)


# Without plugins, and with quickly deployable ones ------------------------------------------------


def test_standard_operators_need_no_library(converted: Callable[..., Path], prepared: Path) -> None:
    folder = converted("small", **{**OPTIONS, "sms": (75, 87)}, plugins=False)
    found = read(folder).prepared
    assert found is not None and found.plugin_source is None and found.gpus[0].driver is None
    assert "dynamicPlugins" not in (folder / "build.sh").read_text()
    assert "loadLibrary" not in (folder / "linexport_engine.h").read_text()


def test_quick_plugins_are_built_by_python_alone(
    converted: Callable[..., Path], prepared: Path
) -> None:
    found = read(converted("small", **OPTIONS, quick=True)).prepared
    assert found is not None and found.script is None
    assert all(gpu.trtexec is None for gpu in found.gpus)


# Building -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu(rtx: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``gpu(89)``: this machine has TensorRT, played by TensorRT-RTX's builder, and such a GPU."""
    played = replace(RTX, name="tensorrt", title="TensorRT", on_gpu=True)
    monkeypatch.setitem(targets.loaded, "tensorrt", trt.target(played, default_sms=()))
    monkeypatch.setattr("linexport.targets.trt.build.timing_cache", lambda *_: nullcontext())

    def has(sm: int) -> None:
        monkeypatch.setattr(trt, "look_here", lambda flavour: (sm, []))

    return has


@pytest.fixture
def for_ada(converted: Callable[..., Path], prepared: Path, tmp_path: Path) -> Path:
    """A folder that was prepared for a GPU which TensorRT-RTX builds for, and another."""
    made = converted("small", **{**OPTIONS, "sms": (87, 89)})
    return Path(shutil.copytree(made, tmp_path / "ada"))


def test_build_finishes_the_folder_on_the_machine_of_the_gpu(
    for_ada: Path, gpu: Callable[[int], None], factories: Any
) -> None:
    gpu(89)
    manifest = build(for_ada, source=factories.source("small"))
    (engine,) = manifest.engines
    assert (engine.sm, engine.runtime, engine.plugin_library) == (89, "tensorrt", True)
    assert engine.plugins and engine.checked is None and engine.reason
    assert [p.name for p in engine.profiles] == ["prefill", "decode"]
    assert read(for_ada) == replace(manifest, artifact=read(for_ada).artifact)
    assert (for_ada / "model.sm89.engine").stat().st_size == manifest.files[
        "model.sm89.engine"
    ].bytes
    assert manifest.not_built is not None and manifest.not_built.startswith(
        "prepared for compute capability 8.7;"
    )
    again = build(for_ada, source=factories.source("small"))
    assert len(again.engines) == 1


def test_an_original_that_is_elsewhere_leaves_the_engine_not_compared(
    for_ada: Path, gpu: Callable[[int], None]
) -> None:
    gpu(89)
    (engine,) = build(for_ada).engines
    assert engine.checked is None and "is not on this machine" in str(engine.reason)


def test_another_gpu_is_refused(for_ada: Path, gpu: Callable[[int], None]) -> None:
    gpu(120)
    with pytest.raises(EnvironmentProblemError, match=r"8\.7, 8\.9; this machine's has 12\.0"):
        build(for_ada)


@pytest.mark.parametrize(("prepared_for", "here"), [(80, 86), (120, 121)])
def test_a_gpu_that_runs_the_kernels_of_another_builds(
    gpu: Callable[[int], None],
    converted: Callable[..., Path],
    tmp_path: Path,
    prepared_for: int,
    here: int,
) -> None:
    made = converted("small", **{**OPTIONS, "sms": (prepared_for,)})
    folder = Path(shutil.copytree(made, tmp_path / "folder"))
    gpu(87)
    with pytest.raises(EnvironmentProblemError, match=r"this machine's has 8\.7"):
        build(folder)
    gpu(here)
    (engine,) = build(folder).engines
    assert engine.sm == here and engine.plugins and (folder / f"model.sm{here}.engine").is_file()


def test_a_machine_with_a_gpu_builds_for_it_and_prepares_for_others(
    gpu: Callable[[int], None], prepared: Path, factories: Any, tmp_path: Path
) -> None:
    gpu(89)
    options = {**OPTIONS, "sms": (89, 110), "bench": False}
    manifest = linexport.convert(factories.source("small"), tmp_path / "both", **options)
    assert [engine.sm for engine in manifest.engines] == [89]
    assert manifest.not_built is not None and "11.0" in manifest.not_built


def test_the_file_is_what_the_parser_reads(prepared: Path, rtx: Any) -> None:
    """As trtexec does: from the file, with nothing of Python between."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "parse_plugin_file.py"), str(prepared / "model.onnx")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    model = onnx.load(prepared / "model.onnx")
    plugins = [n.name for n in model.graph.node if n.domain == "linexport"]
    assert json.loads(done.stdout) == sorted(plugins) and plugins


# The script ---------------------------------------------------------------------------------------


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_the_script_compiles_and_calls_trtexec(prepared: Path, tmp_path: Path) -> None:
    """Both by their names on PATH, with the arguments of the manifest."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program(bin_folder, "trtexec", 'printf "%s\\n" "$@" > trtexec.txt')
    program(bin_folder, "c++", "touch liblinexport_tensorrt.so; echo $@ > compiler.txt")
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    script = ["sh", str(prepared / "build.sh")]
    assert subprocess.run([*script, "89"], capture_output=True, env=environment).returncode == 2
    subprocess.run([*script, "110"], check=True, env=environment)
    (gpu,) = (g for g in read(prepared).prepared.gpus if g.sm == 110)  # type: ignore[union-attr]
    assert (prepared / "trtexec.txt").read_text().splitlines() == list(gpu.trtexec or ())
    assert (
        "linexport_tensorrt.cpp -o liblinexport_tensorrt.so"
        in (prepared / "compiler.txt").read_text()
    )


# The programs -------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A folder with the stand-in for libcuda.so.1."""
    include = next((f for f in library.cuda_folders() if (f / "cuda.h").is_file()), None)
    if include is None or shutil.which("c++") is None:
        pytest.skip("no C++ compiler, or no cuda.h")
    source = ROOT / "tests/support/cpp/fake_driver.cpp"
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-isystem", str(include)]
    subprocess.run(
        [*command, "-o", str(tmp_path / "libcuda.so.1"), str(source), "-ldl"], check=True
    )
    return tmp_path


DRIVE = """
import json, sys
import numpy as np
sys.path.insert(0, {folder!r})
import linexport_engine
model = linexport_engine.Model("engine")
x = np.load({inputs!r})
found = []
for start, end in {pieces}:
    found.append(model({{"x": x[:, start:end]}})["output"])
model.reset()
found.append(model({{"x": x[:, :7]}})["output"])
np.save({outputs!r}, np.concatenate(found, 1))
"""


def test_the_python_program_carries_the_states(
    prepared: Path, driver: Path, tmp_path: Path
) -> None:
    """On stand-ins whose engine is the ONNX model: what comes out is what a stream gives."""
    pytest.importorskip("cuda.bindings", reason="run.py calls the driver: cuda-bindings")
    (prepared / "engine").write_text(str(prepared))
    inputs, outputs = tmp_path / "x.npy", tmp_path / "y.npy"
    x = np.random.default_rng(0).standard_normal((1, 24, 8)).astype(np.float32)
    np.save(inputs, x)
    pieces = [(0, 16), (16, 17), (17, 18), (18, 24)]
    text = DRIVE.format(
        folder=str(prepared), inputs=str(inputs), outputs=str(outputs), pieces=pieces
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "FAKE_DRIVER_SM": "87",
        "PYTHONPATH": str(ROOT / "tests/support/tensorrt_stand_in"),
    }
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "plugins liblinexport_tensorrt.so\n"
    whole = linexport.load(prepared, engine=False).run(x)["output"]
    found = np.load(outputs)
    np.testing.assert_allclose(found[:, :24], whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[:, 24:], whole[:, :7], rtol=1e-4, atol=1e-6)
    script = [sys.executable, str(prepared / "run.py"), "engine"]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "16 tokens: {'output': (1, 16, 8)}" in done.stdout, done.stderr


def test_the_python_program_refuses_without_tensorrt_or_a_driver(prepared: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(prepared / "run.py"), "x"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "No module named 'tensorrt'" in done.stderr


def compiled(source: Path, output: Path, *include: Path) -> None:
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    paths = [word for folder in include for word in ("-isystem", str(folder))]
    subprocess.run([*command, *paths, str(source), "-o", str(output)], check=True)


def test_the_program_in_cpp_carries_the_states(prepared: Path, tmp_path: Path) -> None:
    """A stand-in adds each call's tokens to the states: 16, then 1 and 1 and 1, then 5."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    text = (prepared / "run.cpp").read_text()
    assert "{16, 1, 1, 1}" in text
    (prepared / "more.cpp").write_text(text.replace("{16, 1, 1, 1}", "{16, 1, 1, 1, 5}"))
    compiled(prepared / "more.cpp", tmp_path / "run", STAND_INS)
    (prepared / "engine").write_text(
        "in x 1 -1 8\nin past_state_0 1 2 4 4\nin past_normalizer_0 1 2 4\n"
        "out output 1 -1 8\nout present_state_0 1 2 4 4\nout present_normalizer_0 1 2 4\n"
    )
    run = [str(tmp_path / "run"), "engine"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=prepared)
    assert done.returncode == 5 and "build liblinexport_tensorrt.so first" in done.stderr
    (prepared / "liblinexport_tensorrt.so").touch()
    (prepared / "long.cpp").write_text(text.replace("{16, 1, 1, 1}", "{65}"))
    compiled(prepared / "long.cpp", tmp_path / "long", STAND_INS)
    long = [str(tmp_path / "long"), "engine"]
    done = subprocess.run(long, capture_output=True, text=True, cwd=prepared)
    assert done.returncode == 5 and "larger than the engine's profiles" in done.stderr
    done = subprocess.run(run, capture_output=True, text=True, cwd=prepared)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        line
        for profile, tokens, before in ((0, 16, 0), (1, 1, 16), (1, 1, 17), (1, 1, 18), (0, 5, 19))
        for line in (
            f"profile {profile}, {tokens} tokens after 0; past_state_0 {before}; "
            f"past_normalizer_0 {before}",
            f"{tokens} tokens: output has {8 * tokens} values",
        )
    ]


# Language models ----------------------------------------------------------------------------------


@pytest.fixture
def language(converted: Callable[..., Path], prepared: Path, tmp_path: Path) -> Path:
    """A copy of a prepared language model."""
    return Path(shutil.copytree(converted("language_model", **OPTIONS), tmp_path / "language"))


def test_the_engine_of_a_language_model_is_built_of_a_graph_of_its_own(
    language: Path, gpu: Callable[[int], None], converted: Callable[..., Path], rtx: Any
) -> None:
    found = read(language).prepared
    assert found is not None and found.graph == "engine.onnx" in read(language).files
    arguments = found.gpus[0].trtexec or ()
    assert "--onnx=engine.onnx" in arguments and "--onnx=engine.onnx" in found_script(language)
    assert [a.rsplit("logits_at:", 1)[1] for a in arguments if "Shapes=" in a] == [
        "1x1", "1x1", "8x200", "1x1", "1x1", "8x1"
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "parse_plugin_file.py"), str(language / "engine.onnx")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    ada = converted("language_model", **{**OPTIONS, "sms": (87, 89)})
    gpu(89)
    (engine,) = build(Path(shutil.copytree(ada, language.parent / "ada"))).engines
    assert engine.logits == "output"
    assert [p.dims["logits_to_keep"] for p in engine.profiles] == [(1, 1, 200), (1, 1, 1)]


def found_script(folder: Path) -> str:
    return (folder / "build.sh").read_text()


DRIVE_TEXT = """
import sys
import numpy as np
sys.path.insert(0, {folder!r})
import linexport_engine
model = linexport_engine.Model("engine")
ids = np.load({inputs!r})
found = [model({{"tokens": ids[:, start:end]}})["output"] for start, end in {pieces}]
places = np.array([[1, 2]])
found.append(model({{"tokens": ids[:, :3], "logits_at": places}})["output"])
np.save({outputs!r}, np.concatenate(found, 1))
"""


def test_the_python_program_gives_the_logits_of_the_last_token(
    language: Path, driver: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cuda.bindings", reason="run.py calls the driver: cuda-bindings")
    (language / "engine").write_text(str(language))
    inputs, outputs = tmp_path / "ids.npy", tmp_path / "logits.npy"
    ids = np.random.default_rng(0).integers(0, 256, (1, 24))
    np.save(inputs, ids)
    pieces = [(0, 16), (16, 17), (17, 24)]
    text = DRIVE_TEXT.format(
        folder=str(language), inputs=str(inputs), outputs=str(outputs), pieces=pieces
    )
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "FAKE_DRIVER_SM": "87",
        "PYTHONPATH": str(ROOT / "tests/support/tensorrt_stand_in"),
    }
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    whole = linexport.load(language, engine=False).run(np.concatenate([ids, ids[:, :3]], 1))
    expected = whole["output"][:, [15, 16, 23, 25, 26]]
    np.testing.assert_allclose(np.load(outputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(native_text.COMPILER is None, reason="no C++ compiler, PCRE2 or utf8proc")
def test_the_program_in_cpp_gives_the_place_of_the_last_token(
    language: Path, tmp_path: Path
) -> None:
    """A stand-in prints the place that it finds in each call, and gives logits of zeros."""
    manifest = read(language)
    assert manifest.prepared is not None and "linexport_text.bin" in manifest.prepared.loaders
    assert {"linexport_text.bin", "linexport_text.h"} <= manifest.files.keys()
    native_text.compiled(language / "run.cpp", tmp_path / "run", STAND_INS)
    states = [(s.past, s.present, s.shape) for s in manifest.states]
    lines = ["in tokens 1 -1", "in logits_at 1 1", "out output 1 1 256"]
    for past, present, shape in states:
        sizes = " ".join(map(str, (1, *shape[1:])))
        lines += [f"in {past} {sizes}", f"out {present} {sizes}"]
    (language / "engine").write_text("\n".join(lines))
    (language / "liblinexport_tensorrt.so").touch()
    run = [str(tmp_path / "run"), "engine", "--prompt", "a prompt of 16 by", "--tokens", "3"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=language)
    assert done.returncode == 0, done.stderr
    found = [line.split("; logits_at ")[1].split(";")[0] for line in profiles_of(done.stdout)]
    assert found == ["16", "0", "0"]
    assert done.stdout.count("\0") == 3


def profiles_of(text: str) -> list[str]:
    return [at for line in text.splitlines() if (at := line.lstrip("\0")).startswith("profile")]


def test_sources_compile_with_the_headers_of_tensorrt(prepared: Path, tmp_path: Path) -> None:
    """The library has a creator for each op that has kernels, and one for whole layers."""
    plugins = [op for op in all_ops().values() if op.kernels]
    for place, include in enumerate(tensorrt_headers.folders()):
        made = tensorrt_headers.compiled(prepared, include, tmp_path / f"{place}.so")
        assert tensorrt_headers.creators(made) == len(plugins) + 1, include


def test_states_that_grow_begin_with_no_rows_others_with_their_value(tmp_path: Path) -> None:
    """Keys of softmax attention, longer by each call's tokens, and a maximum beside them."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")

    def info(name: str, *shape: Any, kind: int = onnx.TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, kind, shape)

    inputs = [
        info("tokens", "batch", "seq", kind=onnx.TensorProto.INT64),
        info("past_key", "batch", 2, "past", 4),
        info("past_top", "batch", 2),
    ]
    outputs = [info("logits", "batch", "seq", 9), info("present_key", "batch", 2, "total", 4)]
    outputs.append(info("present_top", "batch", 2))
    graph = onnx.helper.make_graph([], "keys", inputs, outputs)
    onnx.save_model(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    dims = {"batch": DimRange(1, 1, 2, batch=True), "seq": DimRange(1, 5, 64)}
    state = StateRecord(
        "past_key", "present_key", "float32", ("batch", 2, "past", 4), "softmax", grows=2
    )
    top = StateRecord("past_top", "present_top", "float32", ("batch", 2), "Scan", initial=-1024.0)
    given = input_records(graph.input, {}), tensor_records(graph.output), (state, top)
    converted = Converted(tmp_path / "model.onnx", dims, *given)
    found = prepared_folder.assemble(TENSORRT, Options(sms=(87,)), converted)
    arguments = found.gpus[0].trtexec or ()
    assert "--minShapes=tokens:1x1,past_key:1x2x0x4,past_top:1x2" in arguments
    assert "--maxShapes=tokens:2x1,past_key:2x2x64x4,past_top:2x2" in arguments
    compiled(tmp_path / "run.cpp", tmp_path / "run", STAND_INS)
    (tmp_path / "engine").write_text(
        "in tokens 1 -1\nin past_key 1 2 -2 4\nin past_top 1 2\n"
        "out logits 1 -1 9\nout present_key 1 2 -3 4\nout present_top 1 2\n"
    )
    run = [str(tmp_path / "run"), "engine"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("profile")] == [
        "profile 0, 5 tokens after 0; past_key -1; past_top -1024",
        "profile 1, 1 tokens after 5; past_key 5; past_top -1019",
        "profile 1, 1 tokens after 6; past_key 1; past_top -1018",
        "profile 1, 1 tokens after 7; past_key 1; past_top -1017",
    ]
