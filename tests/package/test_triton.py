"""Packaged models in a real Triton Inference Server, on its python backend."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import linexport
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import describe_files, read, to_json
from linexport.manifest.engines import EngineRecord, ProfileRecord
from linexport.package import find_destination, package
from linexport.plugins.cuda import library
from linexport.plugins.kernels.description import carried_by
from linexport.plugins.tensorrt.library import NAME as LIBRARY
from linexport.sources import load_model
from linexport.targets.lowering import op_functions
from linexport.targets.runtime.options import STRICT_NORMS
from tests.support import ROOT, environments

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

CLIENT = ROOT / "tests" / "support" / "scripts" / "triton_client.py"
LOST = CLIENT.with_name("triton_lost_clients.py")
PARSE = """
import sys
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
for path in sys.argv[1:]:
    found = text_format.Parse(open(path).read(), model_config_pb2.ModelConfig())
    print(
        found.backend, len(found.sequence_batching.state), found.HasField("dynamic_batching"),
        found.max_batch_size, list(found.instance_group[0].profile),
    )
    if found.model_operations.op_library_filename:
        [accelerator] = found.optimization.execution_accelerators.gpu_execution_accelerator
        print(
            found.instance_group[0].Kind.Name(found.instance_group[0].kind),
            *found.model_operations.op_library_filename,
            accelerator.name, dict(sorted(accelerator.parameters.items())),
        )
"""


@pytest.fixture(scope="module")
def environment() -> Path:
    """The server's environment."""
    return environments.made("triton")


@pytest.fixture(scope="module")
def sequences() -> dict[str, np.ndarray]:
    choose = np.random.default_rng(0)
    return {str(i): choose.integers(0, 256, 5 + i) for i in range(16)}


@pytest.fixture
def served(environment: Path, tmp_path: Path) -> Iterator[Callable[[Path], int]]:
    """``served(repository)``: a server of that folder, as its port."""
    running: list[subprocess.Popen[bytes]] = []

    def start(repository: Path) -> int:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("", 0)), other.bind(("", 0))
            port, http = one.getsockname()[1], other.getsockname()[1]
        packages = next((environment / "lib").glob("python*")) / "site-packages"
        server = packages / "pytriton" / "tritonserver"
        log = tmp_path / f"server-{port}.log"
        command = [
            str(server / "bin" / "tritonserver"),
            f"--model-repository={repository}",
            f"--backend-directory={server / 'backends'}",
            f"--grpc-port={port}", f"--http-port={http}", "--allow-metrics=false",
        ]  # fmt: skip
        own = {
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(packages),
            "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR") or "",
            "OMP_NUM_THREADS": "1",
        }
        running.append(
            subprocess.Popen(command, env={**os.environ, **own}, stdout=log.open("wb"), stderr=-2)
        )
        limit = time.monotonic() + 120
        while "Started GRPCInferenceService" not in log.read_text():
            assert running[-1].poll() is None and time.monotonic() < limit, log.read_text()[-2000:]
            time.sleep(0.2)
        return port

    yield start
    for one in running:
        one.terminate()
        one.wait(60)


def ask(
    environment: Path, port: int, folder: Path, given: dict[str, np.ndarray], *more: str
) -> dict[str, np.ndarray]:
    np.savez(folder / "given.npz", **given)
    files = [str(folder / "given.npz"), str(folder / "found.npz")]
    client(environment, CLIENT, port, *files, *more)
    with np.load(folder / "found.npz") as found:
        return dict(found)


def client(environment: Path, script: Path, port: int, *arguments: str) -> str:
    done = subprocess.run(
        [str(environment / "bin" / "python"), str(script), f"localhost:{port}", "lm", *arguments],
        env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def packaged(artifact: Path, place: Path, **options: str) -> Path:
    package(artifact, find_destination("triton"), place, name="lm", options=options)
    return place


def with_engine(artifact: Path, place: Path, **changes: str) -> Path:
    """A copy that claims an engine, of bytes that are none."""
    shutil.copytree(artifact, place)
    (place / "model.sm89.engine").write_bytes(b"an engine")
    file = describe_files(place)["model.sm89.engine"]
    sizes = {"batch": (1, 1, 8), "seq": (1, 256, 1024)}
    profiles = (
        ProfileRecord("prefill", sizes),
        ProfileRecord("decode", sizes | {"seq": (1, 1, 1)}),
    )
    engine = EngineRecord(
        "model.sm89.engine", file.sha256, "tensorrt", "10.14", 89, "fp32", (), (), 0, {}, 0,
        profiles, True, (), reason="no GPU",
    )  # fmt: skip
    manifest = read(place)
    changed = replace(
        manifest,
        engines=(replace(engine, **changes),),  # type: ignore[arg-type]
        files={**manifest.files, "model.sm89.engine": file},
    )
    (place / "manifest.json").write_text(json.dumps(to_json(changed)))
    return place


def check_single_runs(
    artifact: Path, sequences: dict[str, np.ndarray], found: dict[str, np.ndarray]
) -> None:
    """Every output is that of its sequence alone."""
    model = linexport.load(artifact, threads=1)
    for name, tokens in sequences.items():
        expected = model.run(tokens[None])["output"][0]
        assert np.abs(found[name] - expected).max() < 5e-5 * np.abs(expected).max()


def test_sequences_of_sixteen_clients_are_those_of_single_runs(
    converted: Callable[..., Path],
    environment: Path,
    served: Callable[[Path], int],
    sequences: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    artifact = converted("language_model", target="onnx")
    port = served(packaged(artifact, tmp_path / "repository", backend="python"))
    for _ in range(2):  # the same correlation ids again: they begin anew
        check_single_runs(artifact, sequences, ask(environment, port, tmp_path, sequences))


def on_the_cpu(repository: Path) -> Path:
    """A repository for GPUs, changed to run on the CPU, whose GatedDeltaNet is written out."""
    config = repository / "lm" / "config.pbtxt"
    text = config.read_text()
    assert text.count("KIND_GPU") == 1
    config.write_text(text.replace("KIND_GPU", "KIND_CPU"))
    file = repository / "lm" / "1" / "model.onnx"
    onnx.save_model(op_functions.defined(onnx.load_model(str(file))), str(file))
    return repository


@pytest.mark.parametrize("sms", [(), (90,)])
def test_a_package_for_gpus_gives_the_values_of_the_original_on_the_cpu(
    sms: tuple[int, ...],
    converted: Callable[..., Path],
    environment: Path,
    served: Callable[[Path], int],
    sequences: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    """Its functions run there, and its sequences are carried as on a GPU."""
    if sms:
        pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    artifact = converted("language_model", target="ort-cuda", sms=sms)
    repository = packaged(artifact, tmp_path / "repository", backend="python")
    found = ask(environment, served(on_the_cpu(repository)), tmp_path, sequences)
    original = load_model("small_models:language_model").module.eval()
    for name, tokens in sequences.items():
        with torch.no_grad():
            expected = original(torch.from_numpy(tokens[None]))[0].numpy()
        assert np.abs(found[name] - expected).max() < 5e-5 * np.abs(expected).max()


def test_kernels_bring_the_library_that_launches_them(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Into the folder of the model, whose nodes keep them; without it nothing is written."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    artifact = converted("language_model", target="ort-cuda", sms=(90,))
    place = tmp_path / "out"
    notes = " ".join(package(artifact, find_destination("triton"), place, name="lm").notes)
    assert (
        "LD_LIBRARY_PATH" in notes and "REPOSITORY/lm" in notes and "than 9.0 it refuses" in notes
    )
    written = onnx.load_model(str(place / "lm" / "1" / "model.onnx"))
    assert sum(map(carried_by, written.graph.node)) == 4  # two convolutions, two attentions
    assert {f.domain for f in written.functions} == {"linexport"}
    assert (place / "lm" / library.path().name).read_bytes() == library.path().read_bytes()
    in_python = packaged(artifact, tmp_path / "python", backend="python")
    needed = (in_python / "lm" / "requirements.txt").read_text()
    # Of ONNX Runtime 1.32.0 there is a package for CPUs and none for GPUs.
    newest = onnxruntime.__version__
    assert f"onnxruntime-gpu[cuda,cudnn]>=1.31,<={newest}\n" in needed

    def missing() -> Path:
        raise EnvironmentProblemError("The CUDA library was not built.")

    monkeypatch.setattr(library, "path", missing)
    with pytest.raises(EnvironmentProblemError, match="was not built"):
        packaged(artifact, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    without = packaged(converted("language_model", target="ort-cuda"), tmp_path / "functions")
    config = (without / "lm" / "config.pbtxt").read_text()
    assert "KIND_GPU" in config and "op_library_filename" not in config


def test_an_instance_on_a_gpu_is_never_one_on_the_cpu(
    converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """ONNX Runtime alone would warn, and run on the CPU."""
    artifact = converted("language_model", target="ort-cuda")
    version = packaged(artifact, tmp_path / "out", backend="python") / "lm" / "1"
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("none"))
    found: dict[str, Any] = {}
    exec((version / "model.py").read_text(), found)
    spec = json.loads((version / "states.json").read_text())
    arguments = {"model_instance_kind": "GPU", "model_instance_device_id": "0"}
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("ONNX Runtime has CUDA here")
    portable = packaged(converted("language_model", target="onnx"), tmp_path / "cpu")
    with pytest.raises(RuntimeError, match="cannot run on a GPU here"):
        found["opened"](portable / "lm" / "1", spec, arguments)
    given: list[Any] = []
    registered: list[str] = []
    options = SimpleNamespace(register_custom_ops_library=registered.append)
    session = SimpleNamespace(get_providers=lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "SessionOptions", lambda: options)
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda *_, providers: (given.extend(providers), session)[1]
    )
    arguments["model_instance_device_id"] = "3"
    assert found["opened"](version, spec | {"library": "lib.so"}, arguments) is session
    exact = {"use_tf32": "0", STRICT_NORMS: "1"}
    assert given == [("CUDAExecutionProvider", {"device_id": "3", **exact})]
    assert registered == [str(version.parent / "lib.so")]


def test_tokens_are_streamed(
    converted: Callable[..., Path],
    environment: Path,
    served: Callable[[Path], int],
    sequences: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    artifact = converted("language_model", target="onnx")
    place = packaged(artifact, tmp_path / "repository", backend="python", decoupled="true")
    found = ask(environment, served(place), tmp_path, sequences, "4")
    model = linexport.load(artifact, threads=1)
    for name, tokens in sequences.items():
        stream = model.stream()
        output = stream.step(tokens[None])["output"]
        for got in found[name]:
            assert np.abs(got - output[0, -1]).max() < 5e-5 * np.abs(output).max()
            output = stream.step(output[:, -1:].argmax(-1))["output"]


def test_clients_that_go_away_and_a_restart_leave_nothing_behind(
    converted: Callable[..., Path],
    environment: Path,
    served: Callable[[Path], int],
    sequences: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    """Sequences that nobody ends give their places back, and are not those of whoever comes."""
    artifact = converted("language_model", target="onnx")
    options = {"backend": "python", "idle-seconds": "2"}
    repository = packaged(artifact, tmp_path / "repository", **options)
    port = served(repository)
    client(environment, LOST, port, "begin")
    time.sleep(3)
    refused = client(environment, LOST, port, "refused").splitlines()
    assert len(refused) == 2 and all("START flag" in line for line in refused), refused
    for running in (port, served(repository)):  # the second knows no sequence of the first
        assert client(environment, LOST, running, "refused").splitlines() == refused
        check_single_runs(artifact, sequences, ask(environment, running, tmp_path, sequences))


def test_the_server_reads_every_configuration(
    converted: Callable[..., Path], environment: Path, tmp_path: Path
) -> None:
    stateful, stateless = converted("language_model", target="onnx"), converted("averaging")
    packaged(stateful, tmp_path / "a")
    packaged(stateful, tmp_path / "b", backend="python", decoupled="true")
    packaged(stateless, tmp_path / "c")
    packaged(with_engine(stateful, tmp_path / "engine"), tmp_path / "d")
    on_gpus = converted("language_model", target="ort-cuda", sms=(90,))
    packaged(on_gpus, tmp_path / "e")
    files = [str(tmp_path / name / "lm" / "config.pbtxt") for name in "abcde"]
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-c", PARSE, *files],
        env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    states = len(linexport.load(stateful).manifest.states)
    assert done.stdout.splitlines() == [
        f"onnxruntime {states} False 16 []",
        "python 0 False 16 []",
        "onnxruntime 0 True 16 []",
        f"tensorrt {states} False 8 ['0', '1']",
        f"onnxruntime {states} False 16 []",
        f"KIND_GPU liblinexport_cuda.so cuda {{'{STRICT_NORMS}': '1', 'use_tf32': '0'}}",
    ]
    assert (tmp_path / "d" / "lm" / "1" / "model.plan").read_bytes() == b"an engine"


def test_a_request_says_which_logits_an_engine_computes(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    given = '[ { name: "logits_at" data_type: TYPE_INT64 dims: [ -1 ] } ]'
    sizes = {"batch": (1, 1, 8), "seq": (1, 256, 1024), "logits_to_keep": (1, 1, 33)}
    changes: Any = {"logits": "output", "profiles": (ProfileRecord("prefill", sizes),)}
    source = converted("language_model", target="onnx")
    for name, more, expected in (("kept", changes, True), ("all", {}, False)):
        artifact = with_engine(source, tmp_path / name, **more)
        place = tmp_path / f"{name} out"
        done = package(artifact, find_destination("triton"), place, name="lm", options={})
        assert (f"input {given}" in (place / "lm" / "config.pbtxt").read_text()) == expected
        assert ("They are 33 at most" in " ".join(done.notes)) == expected


def test_engines_that_the_server_cannot_open_are_refused(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    artifact = converted("language_model", target="onnx")
    other = with_engine(artifact, tmp_path / "rtx", runtime="tensorrt-rtx")
    cases = [
        (artifact, {"backend": "tensorrt"}, "has no engine; .*target=.tensorrt"),
        (other, {"backend": "tensorrt"}, "engines of tensorrt-rtx only"),
        (with_engine(artifact, tmp_path / "one"), {"sm": "90"}, "engines for 89: choose"),
        (with_engine(artifact, tmp_path / "two"), {"plugins": "nowhere.so"}, "plugins=nowhere.so"),
    ]
    for source, options, words in cases:
        with pytest.raises(UsageError, match=words):
            packaged(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_engine_brings_its_plugins_and_what_the_server_must_be(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    artifact = with_engine(converted("language_model", target="onnx"), tmp_path / "engine")
    (tmp_path / "built.so").write_bytes(b"plugins")
    options = {"plugins": str(tmp_path / "built.so")}
    done = package(
        artifact, find_destination("triton"), tmp_path / "out", name="lm", options=options
    )
    assert (tmp_path / "out" / "lm" / LIBRARY).read_bytes() == b"plugins"
    notes = " ".join(done.notes)
    assert "TensorRT 10.14" in notes and "8.9" in notes and "was not checked: no GPU" in notes
    assert f"plugins=REPOSITORY/lm/{LIBRARY}" in notes
