"""The pack of GPU checks, played on a stand-in for the driver: what is launched, and with what.

The stand-in computes nothing, so that every result is wrong. It reads each kernel's own parameter
table, refuses pointers to no memory, and records the launches of the launchers in Python and in
C++: they have to be what the plan says.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from linexport.errors import EnvironmentProblemError
from linexport.plugins.kernels.description import MULTIPROCESSORS
from tests.support import ROOT, stand_in_driver, tensorrt_headers
from tests.support.stand_in_driver import LEFT

pytestmark = pytest.mark.services

NAMES = (
    *("prefill gated delta", "ragged batch elu1", "convolution", "layer of 4 tokens"),
    "grouped queries",  # of decays
)
"""Cases that are played where tests are not slow; all others have kernels to compile, too."""

LIFE = 5
"""Times that a node is launched with tokens: captured, again, by C++, in place, in place by C++."""


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The tool; it compiles the plugins once."""
    pytest.importorskip("triton", reason="kernels are written in Triton: pip install triton")
    pytest.importorskip("cuda.bindings", reason="launchers call the driver: cuda-bindings")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        tool = importlib.import_module("gpu_check")
        compile_plugins, made = tool.compile_plugins, tmp_path_factory.mktemp("plugins") / "made.so"

        def once(place: Path, *headers: Path) -> None:
            if headers:
                return compile_plugins(place, *headers)
            if not made.exists():
                compile_plugins(made)
            shutil.copyfile(made, place)

        patch.setattr(tool, "compile_plugins", once)
        yield tool


@pytest.fixture(scope="module")
def driver(check: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in for libcuda.so.1."""
    return stand_in_driver.compiled(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def played(
    request: pytest.FixtureRequest,
    check: ModuleType,
    driver: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> SimpleNamespace:
    """A pack, run as it is on a machine with a GPU: its exit code, results and launches."""
    folder = tmp_path_factory.mktemp("pack")
    cases = [case for case in check.CASES if request.param == "all" or case.name in NAMES]
    assert check.write(folder / "check.pyz", cases, [90]) == []
    cases.sort(key=lambda case: case.name not in importlib.import_module("gpu.run").QUICK)
    done = _run(driver, folder / "check.pyz", "--checks-only", "--json", folder / "result.json")
    log = [json.loads(line) for line in (folder / "check.log").read_text().splitlines()]
    return SimpleNamespace(
        pack=folder / "check.pyz",
        done=done,
        cases=cases,
        log=log,
        record=json.loads((folder / "result.json").read_text()),
    )


def _run(driver: Path, pack: Path, *options: Any, sm: int = 90) -> Any:
    environment = stand_in_driver.environment(driver, pack.with_suffix(".log"), sm)
    command = [sys.executable, str(pack), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def planned(check: ModuleType, case: Any, length: int) -> list[tuple[Any, ...]]:
    """Entry, grid, threads and numbers of each launch, by the plan."""
    plan = check.plan(case, 90)
    values = plan.symbols(case.batch, length, MULTIPROCESSORS[90])
    found = []
    for launch in plan.route(case.batch, length, MULTIPROCESSORS[90]).launches:
        grid = [extent.of(values) for extent in launch.grid]
        if all(grid):
            kernel = launch.kernel
            numbers = [values[a.name] for a in kernel.arguments if not a.is_pointer]
            entry = kernel.function.rpartition(".")[2]
            found.append((entry, grid, 32 * kernel.warps, numbers, len(kernel.arguments)))
    return found


def test_what_the_stand_in_does_not_compute_is_wrong(played: SimpleNamespace) -> None:
    """Every fault is one of results; none is a difference between Python and the plugin in C++."""
    assert played.done.returncode == 3, played.done.stderr
    assert played.record["machine"]["gpu"] == "stand-in for a GPU"
    rows = played.record["result"]["checks"]
    assert [row["case"] for row in rows] == [case.name for case in played.cases]
    for row in rows:
        assert any("values not written" in fault for fault in row["faults"]), row
        allowed = ("values not written", "in place", "is not its past")
        assert all(any(text in f for text in allowed) for f in row["faults"]), row


def test_both_launchers_pass_exactly_what_the_plan_says(
    check: ModuleType, played: SimpleNamespace
) -> None:
    launches = [row for row in played.log if row["call"] == "launch"]
    for case in map(importlib.import_module("gpu.case").small, played.cases):
        wanted = planned(check, case, case.length)
        rounds = [launches[i * len(wanted) : (i + 1) * len(wanted)] for i in range(LIFE)]
        del launches[: LIFE * len(wanted)]
        for row, (entry, grid, threads, numbers, count) in zip(rounds[0], wanted, strict=True):
            assert (row["entry"], row["grid"], row["threads"]) == (entry, grid, threads)
            assert row["arguments"][-2:] == [0, 0] and len(row["arguments"]) == count + 2
            assert [x for x in row["arguments"][:-2] if x < 2**20] == numbers
            assert row["captured"]
        first, again, compiled, in_place, compiled_in_place = (
            [{**row, "captured": None} for row in one] for one in rounds
        )
        assert first == again == compiled
        assert in_place == compiled_in_place
        without = planned(check, case, 0)
        python, native = launches[: len(without)], launches[len(without) : 2 * len(without)]
        del launches[: 2 * len(without)]
        assert python == native
        assert [row["grid"] for row in python] == [grid for _, grid, *_ in without]
    assert launches == []


def test_nothing_is_left_on_the_device(played: SimpleNamespace) -> None:
    assert played.log[-1] == {"call": "end"} | dict.fromkeys(LEFT, 0)


def test_the_pack_needs_no_torch_no_triton_and_no_tensorrt(check: ModuleType) -> None:
    """``modules`` imports the checks where these are missing."""
    names = dict(check.modules())
    assert {"linexport/plugins/tensorrt/launcher.py", "gpu/run.py", "gpu/layer.py"} <= set(names)
    assert not any("sources" in name for name in names)


def test_cases_of_one_node_share_its_kernels(check: ModuleType, tmp_path: Path) -> None:
    cases = [case for case in check.CASES if case.name in ("convolution", "convolution step")]
    check.write(tmp_path / "check.pyz", cases, [90])
    names = zipfile.ZipFile(tmp_path / "check.pyz").namelist()
    assert {"nodes/convolution", "nodes/convolution step"} <= set(names)
    assert len([name for name in names if name.startswith("kernels/")]) == 1


def test_a_gpu_that_the_pack_is_not_for_is_an_error(
    check: ModuleType, driver: Path, tmp_path: Path
) -> None:
    case = next(case for case in check.CASES if case.name == "convolution step")
    check.write(tmp_path / "check.pyz", [case], [90])
    done = _run(driver, tmp_path / "check.pyz", sm=89)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no kernels for compute capability 8.9" in done.stderr


def test_without_a_driver_the_pack_says_so(check: ModuleType, tmp_path: Path) -> None:
    case = next(case for case in check.CASES if case.name == "convolution step")
    check.write(tmp_path / "check.pyz", [case], [90])
    done = subprocess.run([sys.executable, str(tmp_path / "check.pyz")], capture_output=True)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 5 and b"No NVIDIA driver was found" in done.stderr


def test_an_architecture_without_kernels_is_an_error_and_no_traceback(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    place = tmp_path / "check.pyz"
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", str(place), "--sm", "75"])
    assert check.main() == 2
    assert "compute capability 7.5" in capsys.readouterr().err and not place.exists()


def test_the_plugins_compile_against_tensorrts_headers(check: ModuleType, tmp_path: Path) -> None:
    """And so does what plays their life: the stand-in's interface is TensorRT's."""
    for include in tensorrt_headers.folders():
        check.compile_plugins(tmp_path / "plugins.so", include, tensorrt_headers.of_cuda())


def test_a_plugin_says_why_it_is_not_created(check: ModuleType, tmp_path: Path) -> None:
    """Through the logger that TensorRT gives it."""
    from gpu.played import CompiledPlugin

    check.compile_plugins(tmp_path / "plugins.so")
    case = next(case for case in check.CASES if case.name == "convolution step")
    made = check.described(case, {90: check.plan(case, 90)})
    with pytest.raises(EnvironmentProblemError, match=r"attachToContext failed: .*driver"):
        CompiledPlugin.open(tmp_path / "plugins.so", made)


def test_variants_of_tiles_are_launched_in_place_of_the_plans(
    check: ModuleType, driver: Path, tmp_path: Path
) -> None:
    """Columns of a state that a block holds, 8 or 32, say how many blocks a step has."""
    variants = [{"step": [1, 128, columns, 4, 1]} for columns in (8, 32)]
    (tmp_path / "variants.json").write_text(json.dumps({"decode gated delta B=1": variants}))
    tool = [sys.executable, str(ROOT / "tools" / "gpu_tiles.py")]
    pack = tmp_path / "tiles.pyz"
    subprocess.run([*tool, str(pack), str(tmp_path / "variants.json")], check=True)

    done = _run(driver, pack, "--tiles", "--json", tmp_path / "result.json")

    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "result.json").read_text())
    assert [row["variant"] for row in record["result"]["times"]] == variants
    calls = map(json.loads, pack.with_suffix(".log").read_text().splitlines())
    grids = {call["grid"][0] for call in calls if call["call"] == "launch"}
    assert {16 * 128 // 8, 16 * 128 // 32} <= grids


def test_as_many_cases_as_there_is_time_for_are_checked(
    played: SimpleNamespace, driver: Path
) -> None:
    """One of each kind comes first, whatever the order of the pack."""
    done = _run(driver, played.pack, "--checks-only", "--seconds", 0)
    assert f"Checked 1 of {len(played.cases)} cases" in done.stdout


def test_compute_sanitizer_is_run_twice_and_says_how_many_cases_it_saw(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, pack = tmp_path / "compute-sanitizer", tmp_path / "pack.py"
    tool.write_text('#!/bin/sh\necho "== $2 SUMMARY: 0 errors"\nshift 4\nexec "$@"\n')
    tool.chmod(0o755)
    pack.write_text("import sys\nprint('Checked', sys.argv[1:])\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    run = importlib.import_module("gpu.run")
    for seconds, each in ((100, "35.0"), (10, "1.0")):
        found = run.sanitize(pack, seconds)
        for name, limit in zip(("memcheck", "racecheck"), (each, None), strict=True):
            assert found[name].startswith(f"exit 0: == {name} SUMMARY: 0 errors; Checked")
            assert limit is None or float(found[name].split("'")[-2]) == pytest.approx(
                float(limit), abs=0.1
            )
