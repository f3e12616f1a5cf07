"""Opening an artifact: one that is replaced meanwhile, harmed, hostile, or signed."""

from __future__ import annotations

import _ctypes
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper, parser

import linexport
from linexport.artifact import folder_files, opening, signature, write
from linexport.artifact.folder_files import FolderFiles
from linexport.conversion import publish
from linexport.errors import (
    BuildError,
    EnvironmentProblemError,
    SignatureError,
    UnsupportedModelError,
    UsageError,
)
from linexport.sources.onnx_file.ranks import check_ranks
from linexport.sources.onnx_file.skeleton import skeleton
from linexport.sources.onnx_file.structure import check_structure

pytestmark = pytest.mark.usefixtures("one_thread")

PAIR = ("language_model", "another_language_model")


@pytest.fixture
def pair(converted: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """Two artifacts of one architecture and different weights, which a test may spoil."""
    places = (tmp_path / "one", tmp_path / "two")
    for name, place in zip(PAIR, places, strict=True):
        shutil.copytree(converted(name), place)
    return places


def logits(artifact: Any) -> np.ndarray:
    found: np.ndarray = artifact.run(np.arange(6)[None])["output"]
    return found


# Replaced meanwhile


@pytest.mark.parametrize("moment", ["read_manifest", "checked_graph"])
def test_an_artifact_that_is_replaced_while_it_is_opened_is_opened_again(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The swap comes after the manifest was read, or after the files were compared with it."""
    first, second = pair
    expected = logits(linexport.load(second, threads=1))
    real, swaps = getattr(opening, moment), []

    def swapping(*args: Any) -> Any:
        found = real(*args)
        if not swaps:
            swaps.append(1)
            write.publish(second, first)
        return found

    monkeypatch.setattr(opening, moment, swapping)
    opened = linexport.load(first, threads=1, verify=False)
    assert swaps
    model = hashlib.sha256((first / "model.onnx").read_bytes()).hexdigest()
    assert opened.model_sha256 == model
    np.testing.assert_array_equal(logits(opened), expected)


def test_artifacts_that_are_replaced_all_the_time_are_opened_whole(
    pair: tuple[Path, Path],
) -> None:
    first, second = pair
    start = time.perf_counter()
    expected = {a.model_sha256: logits(a) for a in (linexport.load(p, threads=1) for p in pair)}
    once = time.perf_counter() - start
    assert len(expected) == 2
    stop, pauses = threading.Event(), np.random.default_rng(0)

    def replace() -> None:
        while not stop.is_set():
            write.publish(second, first)  # swaps the two
            time.sleep(once * pauses.exponential())

    worker = threading.Thread(target=replace)
    worker.start()
    seen = set()
    try:
        for _ in range(40):
            try:
                opened = linexport.load(first, threads=1)
            except UsageError as error:  # on a busy machine
                assert "is being replaced over and over" in str(error)
                continue
            np.testing.assert_array_equal(logits(opened), expected[opened.model_sha256])
            seen.add(opened.model_sha256)
    finally:
        stop.set()
        worker.join()
    assert seen == set(expected)


def test_a_link_that_is_turned_meanwhile_is_followed_once(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    expected = logits(linexport.load(first, threads=1))
    link = first.with_name("current")
    link.symlink_to(first)
    real = opening.read_manifest

    def turning(files: Any) -> Any:
        found = real(files)
        link.unlink()
        link.symlink_to(second)
        return found

    monkeypatch.setattr(opening, "read_manifest", turning)
    opened = linexport.load(link, threads=1)
    np.testing.assert_array_equal(logits(opened), expected)
    assert opened.path == first


def test_a_folder_that_is_never_the_same_twice_is_given_up(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (two / "file").touch()
    (one / "file").touch()
    with pytest.raises(UsageError, match="being replaced over and over"):
        opening.steadily(one, lambda: write.publish(two, one))


def test_an_error_of_a_folder_that_stays_is_raised_at_once(tmp_path: Path) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise UsageError("damaged")

    with pytest.raises(UsageError, match="damaged"):
        opening.steadily(tmp_path, fail)
    assert len(calls) == 1


# Harmed


def test_a_flipped_bit_in_the_model_is_found(artifact: Path) -> None:
    linexport.load(artifact, threads=1)  # its digest is known now
    model = artifact / "model.onnx"
    content = bytearray(model.read_bytes())
    content[-3] ^= 1
    model.write_bytes(content)
    with pytest.raises(
        UsageError, match=r"model\.onnx is damaged: its SHA-256 is \w{64}, expected"
    ):
        linexport.load(artifact, threads=1)


def test_a_file_that_was_not_touched_is_hashed_once(artifact: Path) -> None:
    (artifact / "vocab.txt").write_text("a")
    listed(artifact, "vocab.txt")
    linexport.load(artifact, threads=1)
    before = folder_files._digest.cache_info()
    linexport.load(artifact, threads=1)
    after = folder_files._digest.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)


# Budgets


def listed(artifact: Path, *names: str) -> None:
    """List files in the manifest as they are, whatever they are."""
    for name in names:
        path = artifact / name
        content = path.read_bytes() if path.stat().st_size < 2**30 else b""
        record = {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        described(artifact, lambda m, n=name, r=record: m["files"].update({n: r}))
    digest = hashlib.sha256((artifact / "model.onnx").read_bytes()).hexdigest()
    described(artifact, lambda m: m.update(model_sha256=digest))


def sparse(path: Path, size: int = 10**12) -> None:
    with path.open("ab") as file:
        file.truncate(size)


@pytest.fixture
def with_data(pair: tuple[Path, Path]) -> Path:
    """An artifact with a weight in a file beside its model."""
    folder, _ = pair
    model = onnx.load(folder / "model.onnx")
    weight = max(model.graph.initializer, key=lambda t: len(t.raw_data))
    (folder / "model.onnx.data").write_bytes(weight.raw_data)
    external_data_helper.set_external_data(weight, "model.onnx.data", 0, len(weight.raw_data))
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    listed(folder, "model.onnx", "model.onnx.data")
    return folder


@pytest.mark.parametrize("name", ["model.onnx.data", "vocab.txt", "other.bin", "model.onnx"])
def test_a_sparse_file_is_not_hashed(with_data: Path, name: str) -> None:
    """A terabyte of zeros costs nothing to send: its size is refused."""
    sparse(with_data / name)
    size = (with_data / name).stat().st_size
    described(with_data, lambda m: m["files"].setdefault(name, {"sha256": "0" * 64}))
    described(with_data, lambda m: m["files"][name].update(bytes=size))
    start = time.perf_counter()
    for call in (linexport.load, linexport.validate, linexport.bench):
        with pytest.raises(UsageError, match=rf"{name} has 1,000,000,000,000 bytes; at most"):
            call(with_data)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("stored", [0, 2**20])
def test_a_hole_is_not_hashed_whatever_the_graph_says(with_data: Path, stored: int) -> None:
    """A graph may say that it needs a terabyte, and a manifest may list a thousand gigabytes."""
    model = onnx.load(with_data / "model.onnx", load_external_data=False)
    (weight,) = (t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    weight.dims[:] = [10**12 // 4]
    next(e for e in weight.external_data if e.key == "length").value = str(10**12)
    (with_data / "model.onnx").write_bytes(model.SerializeToString())
    (with_data / "model.onnx.data").write_bytes(b"x" * stored)
    sparse(with_data / "model.onnx.data")
    (with_data / "other.bin").write_bytes(b"x" * stored)
    sparse(with_data / "other.bin", 2**30)
    listed(with_data, "model.onnx", "model.onnx.data", "other.bin")
    start = time.perf_counter()
    with pytest.raises(UsageError, match=r"model\.onnx\.data has .* are stored"):
        linexport.load(with_data, threads=1)
    with pytest.raises(UsageError, match=r"other\.bin has 1,073,741,824 bytes, of which"):
        FolderFiles(with_data).digest("other.bin")
    assert time.perf_counter() - start < 10


def test_a_file_with_some_holes_is_hashed(tmp_path: Path) -> None:
    content = bytes(2**20) + b"x" * 2**20 + bytes(2**21)
    with (tmp_path / "weights").open("wb") as file:
        file.seek(2**20)
        file.write(b"x" * 2**20)
        file.truncate(2**22)
    assert FolderFiles(tmp_path).digest("weights") == hashlib.sha256(content).hexdigest()


def test_weights_beside_a_model_are_opened_as_long_as_they_are_needed(
    with_data: Path, converted: Callable[..., Path]
) -> None:
    expected = logits(linexport.load(converted(PAIR[0]), threads=1))
    np.testing.assert_array_equal(logits(linexport.load(with_data, threads=1)), expected)
    data = with_data / "model.onnx.data"
    sparse(data, data.stat().st_size + 100)  # a page that was filled up
    listed(with_data, data.name)
    np.testing.assert_array_equal(logits(linexport.load(with_data, threads=1)), expected)


@pytest.mark.parametrize("verify", [True, False])
def test_weights_that_the_manifest_does_not_list_are_not_opened(
    with_data: Path, verify: bool
) -> None:
    described(with_data, lambda m: m["files"].pop("model.onnx.data"))
    with pytest.raises(UsageError, match=r"reads weights from model\.onnx\.data, which is not amo"):
        linexport.load(with_data, threads=1, verify=verify)


def test_weights_in_a_branch_are_listed_too(artifact: Path) -> None:
    (artifact / "inner.data").write_bytes(bytes(64))
    change(artifact, hidden("inner.data"))
    listed(artifact, "model.onnx")
    with pytest.raises(UsageError, match=r"reads weights from inner\.data"):
        linexport.load(artifact, threads=1)


def test_a_file_without_a_digest_is_not_opened(with_data: Path) -> None:
    described(with_data, lambda m: m["files"]["model.onnx.data"].update(sha256=None))
    for call in (linexport.load, linexport.validate, linexport.bench):
        with pytest.raises(UsageError, match=r"has no SHA-256 of model\.onnx\.data"):
            call(with_data)


def _entries(**of_weight: str) -> Callable[[Path], list[tuple[str, str]]]:
    """Return what describes where the weight of ``with_data`` is, in these words."""

    def describe(folder: Path) -> list[tuple[str, str]]:
        size = (folder / "model.onnx.data").stat().st_size
        plain = {"location": "model.onnx.data", "offset": "0", "length": str(size)}
        return list({**plain, **of_weight}.items())

    return describe


def _outside(link: Callable[[Path, Path], None]) -> Callable[[Path], list[tuple[str, str]]]:
    """Put a link to a copy of the weights that is elsewhere in their place."""

    def describe(folder: Path) -> list[tuple[str, str]]:
        data = folder / "model.onnx.data"
        outside = folder.with_name("outside.data")
        outside.write_bytes(data.read_bytes())
        found = _entries()(folder)
        data.unlink()
        link(data, outside)
        return found

    return describe


def _address(folder: Path) -> list[tuple[str, str]]:
    """Use ONNX Runtime's mark for an address in memory, with a file of that name."""
    place = folder / "*" / "_ORT_MEM_ADDR_"
    place.mkdir(parents=True)
    (place / "*").write_bytes((folder / "model.onnx.data").read_bytes())
    return _entries(location="*/_ORT_MEM_ADDR_/*", offset="0")(folder)


def _twice(key: str, value: str, last: bool) -> Callable[[Path], list[tuple[str, str]]]:
    def describe(folder: Path) -> list[tuple[str, str]]:
        found = _entries()(folder)
        return [*found, (key, value)] if last else [(key, value), *found]

    return describe


def _in_a_folder(folder: Path) -> list[tuple[str, str]]:
    (folder / "inner").mkdir()
    (folder / "inner/data").write_bytes((folder / "model.onnx.data").read_bytes())
    return _entries(location="inner/data")(folder)


def _pipe(data: Path, outside: Path) -> None:
    os.mkfifo(data)


PLACES = {
    "above": _entries(location="../outside.data"),
    "above, through a folder": _entries(location="inner/../../outside.data"),
    "absolute": _entries(location="/etc/passwd"),
    "absolute, twice": _entries(location="//etc/passwd"),
    "a process": _entries(location="../../../../../../../proc/self/environ"),
    "a device": _entries(location="/dev/zero"),
    "other letters": _entries(location="Model.onnx.data"),
    "with a dot": _entries(location="./model.onnx.data"),
    "backslashes": _entries(location="..\\outside.data"),
    "an address of a file": _entries(location="file:///etc/passwd"),
    "an address of memory": _address,
    "a null character": _entries(location="model.onnx.data\0"),
    "nothing": _entries(location=""),
    "the folder": _entries(location="."),
    "in a folder": _in_a_folder,
    "a link to elsewhere": _outside(lambda data, outside: data.symlink_to(outside)),
    "a link to a device": _outside(lambda data, _: data.symlink_to("/dev/zero")),
    "a link to a process": _outside(lambda data, _: data.symlink_to("/proc/self/mem")),
    "a link to itself": _outside(lambda data, _: data.symlink_to(data)),
    "a pipe": _outside(_pipe),
    "negative": _entries(offset="-4"),
    "very large": _entries(offset=str(2**64 - 8)),
    "larger than any": _entries(offset="9" * 4000),
    "behind the end": _entries(offset="8"),
    "a length too large": _entries(length=str(2**63)),
    "a length too small": _entries(length="4"),
    "a negative length": _entries(length="-1"),
    "other digits": _entries(offset="٠"),
    "a sign": _entries(offset="+0"),
    "hexadecimal": _entries(offset="0x0"),
    "a location twice": _twice("location", "other.data", last=True),
    "a location before": _twice("location", "/etc/passwd", last=False),
    "an offset twice": _twice("offset", "8", last=False),
    "a length twice": _twice("length", "8", last=False),
    "packed weights": _entries(prepacked_0="MatMul+key|0;64;0|"),
    "an unknown key": _entries(Location="/etc/passwd"),
}


@pytest.mark.parametrize("form", PLACES)
def test_weights_are_beside_the_model_and_nowhere_else(form: str, with_data: Path) -> None:
    """Whatever the manifest lists and whatever is there under such names."""
    (with_data / "other.data").write_bytes((with_data / "model.onnx.data").read_bytes())
    model = onnx.load(with_data / "model.onnx", load_external_data=False)
    (weight,) = (t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    described_so = PLACES[form](with_data)
    del weight.external_data[:]
    for key, value in described_so:
        weight.external_data.add(key=key, value=value)
    (with_data / "model.onnx").write_bytes(model.SerializeToString())
    listed(with_data, "model.onnx", "other.data")
    record = {"bytes": 2048, "sha256": "0" * 64}
    locations = [value for key, value in described_so if key == "location"]
    described(with_data, lambda m: [m["files"].setdefault(name, record) for name in locations])
    for verify in (True, False):
        with pytest.raises(UsageError, match=r"\S"):
            linexport.load(with_data, threads=1, verify=verify)
    if form in ("with a dot", "in a folder"):  # of a source that is converted
        check_structure(with_data / "model.onnx", skeleton(with_data / "model.onnx"))
        return
    with pytest.raises(UnsupportedModelError):
        check_structure(with_data / "model.onnx", skeleton(with_data / "model.onnx"))


# Hostile


def change(artifact: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    path = artifact / "model.onnx"
    model = onnx.load(path)
    edit(model)
    path.write_bytes(model.SerializeToString())


def functions(model: onnx.ModelProto, calls: dict[str, list[str]]) -> None:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    for name, called in calls.items():
        names = ["a", *(f"v{i}" for i in range(len(called)))]
        nodes = [
            helper.make_node(op, [x], [y], domain="local" if op in calls else "")
            for op, x, y in zip(called, names, names[1:], strict=False)
        ]
        made = helper.make_function("local", name, ["a"], names[-1:], nodes, imports)
        model.functions.append(made)
    if not any(i.domain == "local" for i in model.opset_import):
        model.opset_import.append(imports[1])
    node = helper.make_node("F0", [model.graph.output[0].name], ["unused"], domain="local")
    model.graph.node.append(node)


def doubling(model: onnx.ModelProto) -> None:
    calls = {f"F{i}": [f"F{i + 1}"] * 2 for i in range(40)}
    functions(model, {**calls, "F40": ["Relu"]})


def recursive(model: onnx.ModelProto) -> None:
    functions(model, {"F0": ["F1"], "F1": ["F0"]})


def outside(location: str) -> Callable[[onnx.ModelProto], object]:
    def edit(model: onnx.ModelProto) -> None:
        weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "private")
        external_data_helper.set_external_data(weight, location, 0, 64)
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        model.graph.initializer.append(weight)

    return edit


def fused(model: onnx.ModelProto) -> None:
    """Add a node of the CPU library's own domain, with a step that lacks its output."""
    model.opset_import.append(helper.make_opsetid("linexport.cpu", 1))
    steps = "1 1 1 LinearAttention 3 0 0 0 2 -1 1"
    output = model.graph.output[0].name
    node = helper.make_node("Chain", [output], ["zz"], domain="linexport.cpu", steps=steps)
    model.graph.node.append(node)


def hidden(location: str) -> Callable[[onnx.ModelProto], object]:
    """Return what adds a weight in another file to a branch, which ONNX Runtime opens as well."""

    def edit(model: onnx.ModelProto) -> None:
        inner = onnx.GraphProto(name="inner")
        holder = onnx.ModelProto(graph=inner)
        outside(location)(holder)
        output = helper.make_tensor_value_info("private", TensorProto.FLOAT, [4, 4])
        holder.graph.output.append(output)
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        branches = {"then_branch": holder.graph, "else_branch": holder.graph}
        model.graph.node.append(helper.make_node("If", ["yes"], ["leaked"], **branches))

    return edit


def flattened(model: onnx.ModelProto) -> None:
    """Sum over an axis that a value does not have: its shape is known only when the graph runs."""
    shape = helper.make_tensor_value_info("shape", TensorProto.INT64, ["n"])
    model.graph.input.append(shape)
    before = model.graph.output[0].name
    model.graph.node.append(helper.make_node("Reshape", [before, "shape"], ["flat"]))
    model.graph.node.append(helper.make_node("Einsum", ["flat"], ["sums"], equation="ij->i"))
    # What the file says of it is not believed.
    model.graph.value_info.append(helper.make_tensor_value_info("flat", 1, ["n", "m"]))


def misread(model: onnx.ModelProto) -> None:
    before = model.graph.output[0].name
    model.graph.node.append(helper.make_node("Einsum", [before], ["sums"], equation="i->i"))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (flattened, "'flat', whose number of dimensions is known only when"),
        (misread, "its shapes contradict each other"),
        (doubling, "functions expand to"),
        (recursive, "functions call each other in a circle"),
        (outside("../secret.data"), "not a file inside the model's folder"),
        (outside("link.data"), "not a file inside the model's folder"),
        (outside("/etc/hostname"), "not a file inside the model's folder"),
        (fused, "nodes of the domain linexport.cpu"),
        (hidden("../secret.data"), "not a file inside the model's folder"),
    ],
    ids=[
        *("flattened", "misread", "doubling", "recursive", "above", "link", "absolute", "fused"),
        "branch",
    ],
)
def test_a_graph_is_checked_before_onnx_runtime_sees_it(
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[onnx.ModelProto], object],
    message: str,
    verify: bool,
) -> None:
    """Also where size and digest in the manifest were made to fit."""
    secret = artifact.parent / "secret.data"
    secret.write_bytes(bytes(64))
    (artifact / "link.data").symlink_to(secret)
    change(artifact, edit)
    monkeypatch.setattr(opening, "check_files", lambda *args: None)
    monkeypatch.setattr("onnxruntime.InferenceSession", None)
    with pytest.raises(UsageError, match=f"model.onnx is not opened: .*{message}"):
        linexport.load(artifact, threads=1, verify=verify)


def test_validate_checks_the_graph_as_well(artifact: Path, cli: Callable[..., Any]) -> None:
    change(artifact, doubling)
    digest = hashlib.sha256((artifact / "model.onnx").read_bytes()).hexdigest()
    size = (artifact / "model.onnx").stat().st_size
    described(artifact, lambda m: m["files"]["model.onnx"].update(bytes=size, sha256=digest))
    described(artifact, lambda m: m.update(model_sha256=digest))
    result = cli("validate", artifact, "--json")
    assert result.code == 2
    assert "functions expand to" in result.json()["message"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is loaded")
def test_no_library_of_an_artifact_is_loaded(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in its own folder, under the names of libraries that are looked for."""
    for name in ("liblinexport_cpu.so", "libonnxruntime_providers_shared.so", "libstdc++.so.6"):
        shutil.copy(_ctypes.__file__, artifact / name)
    monkeypatch.chdir(artifact)
    linexport.load(".", threads=1).run(np.ones((1, 2, 8), np.float32))
    assert str(artifact) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("end", [1, 20, 100])
def test_half_a_model_is_an_error(artifact: Path, end: int) -> None:
    model = artifact / "model.onnx"
    model.write_bytes(model.read_bytes()[:end])
    with pytest.raises(EnvironmentProblemError, match="Cannot open"):
        linexport.load(artifact, threads=1, verify=False)


def described(artifact: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = artifact / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["states"].pop(), "the state past_normalizer_0 is in the model alone"),
        (lambda m: m["states"][0].update(grows=1), r"states\[0\]\.grows is 1"),
        (lambda m: m["states"][0].update(grows=7), r"states\[0\]\.grows is 7"),
        (lambda m: m["states"][0].update(dtype="float16"), r"states\[0\] is float16"),
        (lambda m: m["states"][0]["shape"].append(3), r"states\[0\] is float32"),
        (lambda m: m["states"][0].update(past="elsewhere"), r"states\[0\] is 'elsewhere'"),
        (lambda m: m["inputs"].pop(0), "is in the shape of no input"),
        (lambda m: m["inputs"][0].update(dtype="int64"), r"x is said to be int64 .* it is float32"),
        (lambda m: m["inputs"][0]["shape"].pop(), "the input x is said to be"),
        (lambda m: m["outputs"][0].update(name="y"), "the output output is in the model alone"),
        (
            lambda m: m["files"].update({"../x": m["files"]["model.onnx"]}),
            "which is not a file of the artifact",
        ),
        (lambda m: m["files"].update({"gone": m["files"]["model.onnx"]}), "gone is missing"),
    ],
)
def test_a_manifest_that_does_not_describe_its_model_is_refused(
    artifact: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    described(artifact, edit)
    with pytest.raises(UsageError, match=message):
        linexport.load(artifact, threads=1)


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "manifest.json.sig"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(
    artifact: Path, tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    """A pipe that nobody writes to would be read for ever, and so would a device."""
    public = signature.new_key(tmp_path / "private.pem")
    signature.sign(artifact, tmp_path / "private.pem")
    (artifact / name).unlink()
    make(artifact / name)
    key = public if name.endswith(".sig") else None
    with pytest.raises((UsageError, SignatureError), match="not a file"):
        linexport.load(artifact, threads=1, key=key)
    if key is None:
        with pytest.raises(UsageError, match="not a file"):
            linexport.load(artifact, threads=1, verify=False)


# Signed


def test_an_artifact_is_opened_by_the_key_it_was_signed_with(
    artifact: Path, tmp_path: Path
) -> None:
    public = signature.new_key(tmp_path / "private.pem")
    with pytest.raises(SignatureError, match="not signed"):
        linexport.load(artifact, threads=1, key=public)
    signature.sign(artifact, tmp_path / "private.pem")
    linexport.load(artifact, threads=1, key=public)
    other = signature.new_key(tmp_path / "other.pem")
    with pytest.raises(SignatureError, match="does not hold"):
        linexport.load(artifact, threads=1, key=str(other))
    (artifact / "report.html").write_text("changed")
    linexport.load(artifact, threads=1)
    with pytest.raises(SignatureError, match=r"changed: report\.html"):
        linexport.load(artifact, threads=1, key=public)


@pytest.mark.parametrize("target", ["ort", "onnx"])
@pytest.mark.parametrize("name", ["mixed_heads", "mixed_features"])
def test_an_einsum_of_what_attention_returns_is_opened(
    converted: Callable[..., Path], name: str, target: str
) -> None:
    """Ranks follow through the bodies of functions, which hold branches and loops."""
    model = linexport.load(converted(name, target=target), threads=1)
    assert model.run(np.ones((1, 5, 8), np.float32))["output"].shape == (1, 5, 8)


def test_ranks_of_states_that_none_was_given_for_are_known() -> None:
    """ONNX Runtime's operator begins with zeros; onnx knows no shape of what it returns."""
    text = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[2, n, 8] x) => (float[2, n, 8] y, float[2, 2, 4] z) {
            y, state = com.microsoft.LinearAttention <q_num_heads = 2, kv_num_heads = 2> (x, x, x)
            z = Einsum <equation = "bhij->bhi"> (state)
        }"""
    check_ranks(Path("model.onnx"), parser.parse_model(text))


def test_what_would_not_be_opened_is_not_published(
    factories: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier artifact stays; what a session of our own opens is not what ``load`` opens."""
    place = tmp_path / "artifact"
    linexport.convert(factories.source("small"), place, bench=False, threads=1)
    before = hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()

    def refusing(path: Path, model: onnx.ModelProto) -> None:
        raise UnsupportedModelError("it has an Einsum of fewer dimensions than its equation")

    monkeypatch.setattr(publish, "check_structure", refusing)
    with pytest.raises(BuildError, match="load would not open it: it has an Einsum"):
        linexport.convert(factories.source("small"), place, bench=False, threads=1, overwrite=True)
    assert hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest() == before
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]
