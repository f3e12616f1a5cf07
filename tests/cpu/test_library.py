"""The CPU library as programs meet it: found, registered, refused, left aside."""

from __future__ import annotations

import ctypes
import logging
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

import linexport
from linexport import manifest as manifests
from linexport.errors import EnvironmentProblemError
from linexport.models import feature_maps
from linexport.plugins.cpu import library
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.targets import cpu_fusion
from linexport.targets.base import OrtSession, uses_library
from linexport.targets.cpu_fusion import (
    cached_attention,
    chains,
    convolutions,
    exponentials,
    integer_products,
)
from tests.support.layouts import Layout, mapped_model
from tests.support.native import check_in_place, on_library, session

LAYOUT = Layout(LinearAttentionSpec(2, 1), 1)


def feeds(length: int = 5) -> dict[str, np.ndarray]:
    return LAYOUT.inputs(np.random.default_rng(0), 1, length)


@pytest.fixture
def other_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in place of the library."""
    monkeypatch.setattr(library, "_NAME", str(tmp_path / "other.so"))
    return tmp_path / "other.so"


def test_runs_what_the_function_runs() -> None:
    model = LAYOUT.model().SerializeToString()
    alone, native = OrtSession(model, threads=1), OrtSession(model, threads=1, native=True)
    assert native.native and not alone.native
    for name, value in alone.run(feeds()).items():
        np.testing.assert_allclose(native.run(feeds())[name], value, rtol=1e-5, atol=1e-6)


def test_is_left_aside_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.find() is None
    assert not OrtSession(LAYOUT.model().SerializeToString(), native=True).native


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "was not built when linexport was installed"),
        (b"\x7fELF of another machine", "does not load on this machine"),
        (Path("/lib/x86_64-linux-gnu/libm.so.6"), "is not linexport's CPU library"),
    ],
)
def test_another_file_is_not_used(
    other_file: Path, content: bytes | Path | None, message: str
) -> None:
    if isinstance(content, Path):
        if not content.exists():
            pytest.skip(f"{content} is missing")
        content = content.read_bytes()
    if content is not None:
        other_file.write_bytes(content)
    with pytest.raises(EnvironmentProblemError, match=message):
        library.path()
    opened = OrtSession(LAYOUT.model().SerializeToString(), threads=1, native=True)
    assert not opened.native and opened.run(feeds())


def test_library_of_other_sources_is_not_used(
    other_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_file.write_bytes((library._FOLDER / "liblinexport_cpu.so").read_bytes())
    monkeypatch.setattr(library, "sources_digest", lambda: "0123456789abcdef")
    with pytest.raises(EnvironmentProblemError, match="is of another version"):
        library.path()


@pytest.mark.parametrize("end", [64, 1000, 0.5, 0.9])
def test_a_library_that_was_cut_is_not_loaded(other_file: Path, end: float) -> None:
    """The system ends a process that touches a page beyond the end of a file."""
    content = (library._FOLDER / "liblinexport_cpu.so").read_bytes()
    other_file.write_bytes(content[: int(end if end > 1 else end * len(content))])
    with pytest.raises(EnvironmentProblemError, match="is damaged: its end is missing"):
        library.path()


def test_a_library_for_another_architecture_is_not_loaded(other_file: Path) -> None:
    """The system's loader says of such a file that it is not there."""
    content = bytearray((library._FOLDER / "liblinexport_cpu.so").read_bytes())
    content[18:20] = (62 if platform.machine() == "aarch64" else 183).to_bytes(2, "little")
    other_file.write_bytes(content)
    built = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    with pytest.raises(EnvironmentProblemError, match=f"was built for {built}, and this machine"):
        library.path()
    assert not OrtSession(LAYOUT.model().SerializeToString(), threads=1, native=True).native


def test_a_library_that_misses_symbols_is_not_used(other_file: Path, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    source = tmp_path / "needs.cc"
    source.write_text("int missing(); int needs = missing();")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", other_file], check=True)
    with pytest.raises(EnvironmentProblemError, match=r"does not load on this machine: .*missing"):
        library.path()


def test_older_runtime_is_refused_in_a_sentence() -> None:
    """RegisterCustomOps with a runtime whose interface ends at version 1."""
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)
    number = ctypes.create_string_buffer(b"1.10.0")
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    said: list[bytes] = []
    status = create_status(lambda code, text: said.append(text) or 1)
    table = (ctypes.c_void_p * 1)(ctypes.cast(status, ctypes.c_void_p))
    api = get_api(lambda version: ctypes.addressof(table) if version == 1 else None)
    version = get_version(lambda: ctypes.addressof(number))
    base = (ctypes.c_void_p * 2)(
        ctypes.cast(api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p)
    )
    entry = ctypes.CDLL(str(library.path())).RegisterCustomOps
    entry.restype = ctypes.c_void_p
    assert entry(None, ctypes.byref(base)) == 1
    assert said == [b"linexport's CPU library needs ONNX Runtime 1.18 or newer; this is 1.10.0"]


def test_what_it_does_not_compute_runs_by_the_function(caplog: pytest.LogCaptureFixture) -> None:
    shapes = dict.fromkeys(("query", "key", "value"), ("B", "T", 8))
    model = mapped_model(LinearAttentionSpec(2, 2), feature_maps.find_map("favor+")(4), shapes)
    with pytest.raises(Exception, match='feature map "favor\\+" is not computed'):
        session(model)
    with caplog.at_level(logging.INFO, "linexport"):
        opened = OrtSession(model.SerializeToString(), threads=1, native=True)
    assert not opened.native and "favor+" in caplog.text
    assert opened.run({n: np.ones((1, 3, 8), np.float32) for n in shapes})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_opened_with_it(dtype: str) -> None:
    layout = Layout(LinearAttentionSpec(2, 2), 2, dtype=dtype)
    model, x = layout.model().SerializeToString(), layout.inputs(np.random.default_rng(0), 1, 5)
    x = {n: a.astype(np.float32) if a.dtype != bool else a for n, a in x.items()}
    alone, native = OrtSession(model, threads=1), OrtSession(model, threads=1, native=True)
    assert native.native and not alone.native
    np.testing.assert_allclose(
        native.run(x)["output"], alone.run(x)["output"], rtol=0.01, atol=0.01
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
@pytest.mark.parametrize("length", [1, 4, 40])
def test_states_in_place(length: int, rule: str, threads: int) -> None:
    """Past and present bound to the same memory."""
    layout = Layout(
        LinearAttentionSpec(1, 1, rule, normalize=rule == "linear"), 1, 16, 160, past=True
    )
    x = layout.inputs(np.random.default_rng(0), 1, length)
    check_in_place(layout.model(), x, threads)


def test_another_program_registers_the_file() -> None:
    """As any user of ONNX Runtime does, without linexport's help."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library.path()))
    opened = ort.InferenceSession(LAYOUT.model().SerializeToString(), options)
    want = on_library(LAYOUT.model())(feeds())
    np.testing.assert_array_equal(opened.run(None, feeds())[0], want[0])


def test_the_ops_it_says_it_computes_are_those_it_registers() -> None:
    sources = "".join(p.read_text() for p in sorted((library._FOLDER / "cpp").glob("*.cc")))
    found = set(re.findall(r'Registered registered\(\{"(\w+)"', sources))
    fused = {cpu_fusion.OP, chains.OP, cached_attention.OP, convolutions.OP, exponentials.OP}
    assert found == library.OPS | fused | {integer_products.OP}


def test_a_model_of_other_ops_is_not_opened_with_it(converted: Callable[..., Path]) -> None:
    manifest = manifests.read(converted("small"))
    assert uses_library(manifest)
    assert not uses_library(replace(manifest, fused={"FeatureMap": 2}))


def test_artifacts_are_opened_with_it(converted: Callable[..., Path]) -> None:
    assert linexport.load(converted("small"), threads=1)._session.native
