"""Readers in C++ under AddressSanitizer and UBSan: descriptions, fields of plugins, chains.

What they read comes from files of strangers: a damaged text is an error, never the end of the
process. A corpus of each is beside the fuzzers, with the inputs that ended one of them before. In a
test run each mutates it for ``LINEXPORT_FUZZ_SECONDS`` of the processor, 4 if not set. Continuous
integration has 30, while its other tests run. The tier ``slow`` does so for half an hour in all,
and with all operators in the chains.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]

FUZZING = ROOT / "tests/support/fuzzing"
CPU, KERNELS = ROOT / "plugins/cpu/cpp", ROOT / "plugins/kernels/cpp"
INCLUDED = (CPU, KERNELS, ROOT / "tests/support/cpp", ROOT / "tools/gpu/tensorrt")

SANITIZED = (
    *("-std=c++17", "-g1", "-Wno-psabi", "-ffp-contract=fast"),
    *("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"),
)
FOLLOWED = ("-O1", "-fsanitize-coverage=trace-pc")
"""Of the sources whose edges guide the mutations: readers, not what they call."""

DESCRIPTION = KERNELS / "description.cpp"
READERS = {
    "description": [DESCRIPTION],
    "plugin": [DESCRIPTION, ROOT / "plugins/tensorrt/cpp/plugin.cpp"],
    "chain": [CPU / "chain.cc", CPU / "operator.cc"],
}
FEW = ("causal_conv", "causal_conv_tokens", "division", "half", "instruction_set", "tokenwise")
CALLED = {
    "description": [],
    "plugin": [KERNELS / f"{name}.cpp" for name in ("driver", "launcher", "modules")],
    "chain": [CPU / f"{name}.cc" for name in FEW],
}

SECONDS = float(os.environ.get("LINEXPORT_FUZZ_SECONDS", "4"))

Fuzzer = Callable[[str, float, int], str]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    """``fuzzer(kind, seconds, seed)`` runs one; an input that ends it fails the test."""
    return _fuzzer(tmp_path_factory.mktemp("fuzzers"), CALLED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Fuzzer:
    """The same, with every operator of the CPU library."""
    left = {*READERS["chain"], CPU / "library.cc"}
    all_ops = [path for path in sorted(CPU.glob("*.cc")) if path not in left]
    return _fuzzer(tmp_path_factory.mktemp("fuzzers"), {**CALLED, "chain": all_ops})


def _fuzzer(folder: Path, called: dict[str, list[Path]]) -> Fuzzer:
    made: dict[str, Path] = {}

    def fuzz(kind: str, seconds: float, seed: int) -> str:
        if kind not in made:
            made[kind] = _build(folder / kind, kind, called[kind])
        last = folder / f"last_{kind}"
        command = [made[kind], FUZZING / "corpus" / kind, str(seconds), str(seed), last]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        )
        assert done.returncode == 0, f"{_ended(last)!r}\n{done.stderr[:6000]}"
        return done.stdout

    return fuzz


def _ended(last: Path) -> bytes:
    content = last.read_bytes() if last.exists() else bytes(4)
    return content[4 : 4 + int.from_bytes(content[:4], "little")]


def _build(program: Path, kind: str, called: Sequence[Path]) -> Path:
    sources = [(path, FOLLOWED) for path in READERS[kind]]
    sources += [(path, ("-O0",)) for path in called]
    sources += [(FUZZING / f"cpp/{name}.cpp", ("-O1",)) for name in ("driver", kind)]
    included = [f"-I{folder}" for folder in INCLUDED]

    def compiled(source: tuple[Path, Sequence[str]]) -> str:
        path, flags = source
        output = program.with_name(f"{path.parent.parent.name}_{path.stem}.o")
        command = ["g++", *SANITIZED, *flags, *included, "-c", str(path), "-o", str(output)]
        if not output.exists():  # fuzzers share readers
            subprocess.run(command, check=True)
        return str(output)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    command = ["g++", *SANITIZED, *objects, "-pthread", "-ldl", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("kind", READERS)
def test_no_input_ends_a_reader(fuzzer: Fuzzer, kind: str) -> None:
    said = fuzzer(kind, SECONDS, 1)
    print(kind, said)
    runs, edges = int(said.split()[0]), int(said.split()[2])
    assert runs > 200 and edges > 300, said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("kind", READERS)
def test_no_input_ends_a_reader_in_five_minutes(whole: Fuzzer, kind: str, seed: int) -> None:
    whole(kind, 300, seed)
