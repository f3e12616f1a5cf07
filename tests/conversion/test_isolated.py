"""Isolated conversion: what hostile models do ends as one clear error, and the host is unharmed."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import linexport
from linexport import manifest as manifests
from linexport.conversion import isolated
from linexport.errors import (
    LinexportError,
    StoppedAfterPass,
    UnsupportedModelError,
    UsageError,
)
from linexport.manifest import ConvertOptions, Manifest, to_json
from linexport.manifest.json_text import dumps
from linexport.system import memory, sandbox
from linexport.system.control_groups import control_groups
from linexport.system.progress import Silent

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(sys.platform != "linux", reason="confined by Linux's means"),
]

CANARY = secrets.token_hex(8)
HOSTILE = """
import ctypes, os, socket, time
import torch

def _model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4)), (torch.zeros(2, 4),)

def good():
    return _model()

def allocates():
    kept = []
    while True:
        kept.append(bytearray(2**26))

def allocates_by_torch():
    return torch.nn.Linear(2**17, 2**15), (torch.zeros(2, 2**17),)

def loops():
    while True:
        time.sleep(1)

def forks():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    ctypes.string_at(0)

def aborts():
    os.abort()

def trespasses():
    found = [" ".join(map("=".join, os.environ.items()))]
    for path in ({private!r}, "/proc/" + str(os.getppid()) + "/environ", "/proc/1/environ"):
        try:
            found.append(open(path).read())
        except OSError as error:
            found.append(str(error))
    secret = "canary" if {canary!r} in " ".join(found) else "none"
    others = len([name for name in os.listdir("/proc") if name.isdigit()])
    try:
        written = open({outside!r}, "w").write("was here")
    except OSError as error:
        written = error.strerror
    try:
        sent = socket.create_connection(("127.0.0.1", {port}), timeout=5).send(b"stolen")
    except OSError as error:
        sent = error.strerror
    raise RuntimeError(f"{{secret}} {{others}} file: {{written}}, network: {{sent}}, {{found[1]}}")

def multiplies():
    for count in range(300):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    return _model()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module of the hostile factories; somebody listens to the port that they connect to."""
    (tmp_path / "private").write_text(CANARY)
    values = {"outside": str(tmp_path / "outside"), "private": str(tmp_path / "private")}
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("LINEXPORT_TEST_SECRET", CANARY)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        text = HOSTILE.format(port=listening.getsockname()[1], canary=CANARY, **values)
        (tmp_path / "code" / "hostile_models.py").write_text(text)
        yield "hostile_models"


@pytest.fixture
def earlier(tmp_path: Path, sample_manifest: Manifest) -> dict[str, bytes]:
    """The files of an artifact that must survive."""
    folder = tmp_path / "out" / "artifact"
    folder.mkdir(parents=True)
    files = {"manifest.json": dumps(to_json(sample_manifest)).encode(), "model.onnx": b"earlier"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def convert(source: str, tmp_path: Path, **options: Any) -> Manifest:
    place = tmp_path / "out" / "artifact"
    given = {"isolated": True, "bench": False, "overwrite": True, "threads": 1} | options
    return linexport.convert(source, place, **given)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("allocates", {"max_memory": 2}, "needed more than 2 GiB in stage load.*max_memory"),
        pytest.param(
            *("allocates_by_torch", {"max_memory": 2}, "needed more than 2 GiB in stage load"),
            marks=pytest.mark.slow,
        ),
        ("loops", {"max_seconds": 8}, r"took longer than 8 s .* Allow more with max_seconds"),
        ("forks", {}, "ended by SIGSEGV in stage load: the model, or a library"),
        pytest.param("aborts", {}, "ended by SIGABRT", marks=pytest.mark.slow),
    ],
)
def test_what_a_hostile_model_does_is_one_error(
    models: str,
    earlier: dict[str, bytes],
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(LinexportError, match=words) as error:
        convert(f"{models}:{name}", tmp_path, **options)
    assert not options or error.value.exit_code == 4, "a limit was reached"
    place = tmp_path / "out" / "artifact"
    assert {p.name: p.read_bytes() for p in place.iterdir()} == earlier
    assert [p.name for p in place.parent.iterdir()] == ["artifact"]
    time.sleep(0.2)
    assert not remaining(tmp_path)


def remaining(mark: Path) -> list[str]:
    """Command lines of isolated conversions that this process started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (path / "environ").read_text()
            if str(mark) in text:
                found.append((path / "cmdline").read_text())
    return found


def test_an_isolated_conversion_gives_the_same_artifact(
    models: str, earlier: dict[str, bytes], tmp_path: Path
) -> None:
    manifest = convert(f"{models}:good", tmp_path)
    assert manifest.status == "ok" and manifest.isolation is not None
    assert "4096 open files" in manifest.isolation.applied
    place = tmp_path / "out" / "artifact"
    assert manifests.read(place) == manifest and Path(manifest.artifact) == place
    assert "Isolation" in (place / "report.html").read_text()
    assert [p.name for p in place.parent.iterdir()] == ["artifact"]


def test_an_isolated_conversion_reaches_no_secrets_files_processes_or_network(
    models: str, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="RuntimeError: none") as error:
        convert(f"{models}:trespasses", tmp_path)
    found, applied = str(error.value), what_is_applied()
    if "no network" in applied:
        assert "network: Network is unreachable" in found
    if "a temporary folder only" in applied:
        assert "file: Permission denied" in found and not (tmp_path / "outside").exists()
        assert f"Permission denied: '{tmp_path / 'private'}'" in found
    if "processes of others are hidden" in applied:
        assert "RuntimeError: none 2 " in found, "itself and the one that waits for it"


def what_is_applied() -> str:
    code = """
from linexport.system import sandbox
print(*sandbox.confine(sandbox.ProcessLimits(), []).applied, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_processes_are_limited_where_the_system_lets_us(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    with control_groups({"pids": 100}) as groups:
        if not groups:
            pytest.skip("this user may not make control groups here")
    monkeypatch.setattr(sandbox, "PROCESSES", 100)
    # A name of its own: other processes on this machine may have groups at the same time.
    name = f"of-this-test-{os.getpid()}"
    monkeypatch.setattr(secrets, "token_hex", lambda size: name)
    with pytest.raises(UsageError, match="Resource temporarily unavailable"):
        convert(f"{models}:multiplies", tmp_path)
    assert not list(groups["pids"].parent.glob(f"linexport-{name}"))


@pytest.mark.services
def test_dumps_of_passes_are_written_by_an_isolated_conversion(models: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    dumps = tmp_path / "dumps"
    with pytest.raises(StoppedAfterPass):
        convert(f"{models}:good", tmp_path, dump_passes=dumps, stop_after="simplify")
    assert {"00_traced.onnx", "result.onnx"} <= {path.name for path in dumps.iterdir()}


def test_links_among_dumps_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "without_state").mkdir()
    (tmp_path / "without_state" / "result.onnx").symlink_to("/etc/passwd")
    with pytest.raises(UnsupportedModelError, match=r"left 'result.onnx', which is not a file"):
        isolated._check(tmp_path, nested=True)


def test_links_in_the_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(UnsupportedModelError, match=r"left 'tokenizer.json', which is not a file"):
        isolated._check(tmp_path)


def test_a_shared_timing_cache_is_refused(tmp_path: Path) -> None:
    asked = ConvertOptions(isolated=True, timing_cache="cache")
    with pytest.raises(UsageError, match="an isolated conversion could write anything into it"):
        isolated.run("model.pt", tmp_path / "out", asked, tmp_path, Silent())


def test_a_host_keeps_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(memory, "_own_from", calls.append)
    with memory.low_memory():
        pass
    assert calls == []
    monkeypatch.setattr(memory, "_OWN", [True])
    with memory.low_memory():
        pass
    assert calls == [memory.MIN_MMAP_BYTES, memory._GLIBC_MOST]


def test_what_the_system_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: limits stay."""
    code = """
from linexport.system import sandbox
sandbox._unshare = lambda kind: False
sandbox.landlock.restrict = lambda readable, writable: False
found = sandbox.confine(sandbox.ProcessLimits(memory=8, file=1), [])
print(found.applied, len(found.unavailable))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'memory up to 8 GiB', 'each file up to 1 GiB'" in done.stdout
    unlimited = int(os.getuid() == 0)
    assert done.stdout.endswith(f"'no capabilities') {5 + unlimited}\n")


def test_a_confined_process_cannot_go_back_to_the_network() -> None:
    """Not even one that was started by root and holds the host's namespace open."""
    code = """
import ctypes, os, tempfile
from pathlib import Path
from linexport.system import sandbox
host = os.open("/proc/self/ns/net", os.O_RDONLY)
found = sandbox.confine(sandbox.ProcessLimits(), [Path(tempfile.gettempdir())])
libc = ctypes.CDLL(None, use_errno=True)
print("no network" in found.applied, libc.setns(host, 0x40000000))
print(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (confined, returned), [capabilities] = (line.split() for line in done.stdout.splitlines())
    if confined == "False":
        pytest.skip("this system gives no network namespace")
    assert returned == "-1" and int(capabilities, 16) == 0
