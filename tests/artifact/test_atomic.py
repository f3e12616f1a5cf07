"""Whatever happens while an artifact is made, what was there before stays, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from json import loads
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import linexport
from linexport.artifact import write
from linexport.cli.errors import guarded
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph import external_data
from linexport.system import folder_lock, signals

pytestmark = pytest.mark.usefixtures("one_thread")

Snapshot = dict[str, bytes]


def snapshot(folder: Path) -> Snapshot:
    """Every file below a folder, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def identity(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_mtime_ns


@pytest.fixture
def convert(factories: SimpleNamespace) -> Callable[..., Any]:
    def run(name: str, output: Path, **options: Any) -> Any:
        settings = {"bench": False, "threads": 1, **options}
        return linexport.convert(factories.source(name), output, **settings)

    return run


# Where an artifact may not go: all refused before any work is done


@pytest.fixture
def no_work(converted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    converted("small")  # what other fixtures copy is there before

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was begun")

    monkeypatch.setattr("linexport.conversion.context.load_model", load)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("kind", ["file", "fifo", "link", "dangling", "folder", "broken_artifact"])
def test_a_foreign_output_is_refused_and_left_alone(
    cli: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "fifo":
        os.mkfifo(out)
    elif kind == "link":
        (tmp_path / "there").mkdir()
        out.symlink_to(tmp_path / "there")
    elif kind == "dangling":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        name = {"folder": "thesis.txt", "broken_artifact": "manifest.json"}[kind]
        (out / name).write_text("mine")
    before = identity(out)
    result = cli("convert", "nothing:here", "-o", out, "--overwrite", "--json")
    assert result.code == 2
    assert result.json()["status"] == "error"
    assert identity(out) == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("no_work")
def test_an_artifact_is_replaced_only_on_demand(cli: Callable[..., Any], artifact: Path) -> None:
    before = snapshot(artifact)
    result = cli("convert", "nothing:here", "-o", artifact, "--json")
    assert result.code == 2
    assert "--overwrite" in result.json()["message"]
    assert snapshot(artifact) == before


@pytest.mark.usefixtures("no_work")
def test_a_foreign_folder_where_a_failed_one_would_go_is_refused(
    cli: Callable[..., Any], artifact: Path
) -> None:
    foreign = artifact.with_name(f"{artifact.name}.failed")
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    result = cli("convert", "nothing:here", "-o", artifact, "--overwrite", "--json")
    assert result.code == 2
    assert snapshot(foreign) == {"thesis.txt": b"mine"}


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("place", [".", "..", "/", "sub/.."])
def test_a_place_without_a_name_is_refused(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    result = cli("convert", "nothing:here", "-o", place, "--json")
    assert result.code == 2
    assert "artifact" in result.json()["message"]


@pytest.mark.usefixtures("no_work")
def test_a_place_that_cannot_be_written_is_an_environment_problem(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    below_a_file = tmp_path / "file" / "out"
    for place in (below_a_file, tmp_path / ("n" * 300), tmp_path / ("n" * 250), "/proc/out"):
        result = cli("convert", "nothing:here", "-o", place, "--json")
        assert result.code == 5, place
        assert "Cannot write" in result.json()["message"]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("no_work")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_an_environment_problem(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    assert cli("convert", "nothing:here", "-o", tmp_path / "out", "--json").code == 5
    tmp_path.chmod(0o700)


def test_missing_parents_and_an_empty_folder_are_fine(
    convert: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "a" / "out").mkdir(parents=True)
    for place in (tmp_path / "a" / "out", tmp_path / "b" / "c" / "out"):
        convert("small", place)
        assert linexport.load(place, threads=1).manifest.artifact == str(place)
        assert [p.name for p in place.parent.iterdir()] == ["out"]


# A run that fails


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["table", "branch", "missing"])
def test_an_error_leaves_what_was_there(
    convert: Callable[..., Any], artifact: Path, name: str, there: bool
) -> None:
    if not there:
        shutil.rmtree(artifact)
    before = snapshot(artifact.parent)
    with pytest.raises(linexport.errors.LinexportError):
        convert(name, artifact, overwrite=True)
    assert snapshot(artifact.parent) == before
    assert [p.name for p in artifact.parent.iterdir()] == (["artifact"] if there else [])


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES]
)
def test_a_disk_that_takes_no_more_is_an_environment_problem(
    cli: Callable[..., Any],
    factories: SimpleNamespace,
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    def full(model: object, apart: object, path: Path, data: Path | None) -> None:
        path.write_bytes(b"half a mod")
        raise OSError(number, os.strerror(number), str(path))

    before = snapshot(artifact.parent)
    monkeypatch.setattr(external_data, "save", full)
    source = factories.source("small")
    result = cli("convert", source, "-o", artifact, "--no-bench", "--overwrite", "--json")
    assert result.code == 5
    assert os.strerror(number) in result.json()["message"]
    assert snapshot(artifact.parent) == before


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``tiny_disk(size)``: a file system of its own; needs the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def mount(size: str) -> Path:
        nonlocal mounted
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this user may not mount a file system")
        mounted = True
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(("name", "room"), [("heavy", "300k"), ("small", "28k"), ("small", "4k")])
def test_a_disk_that_fills_up_leaves_the_earlier_artifact(
    cli: Callable[..., Any],
    factories: SimpleNamespace,
    artifact: Path,
    tiny_disk: Callable[[str], Path],
    name: str,
    room: str,
) -> None:
    """In the model, in the report, and at once."""
    kept = sum(-(-p.stat().st_size // 4096) * 4 for p in artifact.iterdir())
    disk = tiny_disk(f"{kept + int(room[:-1])}k")
    shutil.copytree(artifact, disk / "out")
    before = snapshot(disk)
    source = factories.source(name)
    result = cli("convert", source, "-o", disk / "out", "--no-bench", "--overwrite", "--json")
    assert result.code == 5
    assert "No space left" in result.json()["message"]
    assert snapshot(disk) == before
    assert [p.name for p in disk.iterdir()] == ["out"]
    linexport.load(disk / "out", threads=1)


@pytest.mark.usefixtures("no_work")
def test_a_mount_point_is_refused(
    cli: Callable[..., Any], tiny_disk: Callable[[str], Path]
) -> None:
    result = cli("convert", "nothing:here", "-o", tiny_disk("64k"), "--json")
    assert result.code == 2
    assert "Name a folder in it" in result.json()["message"]


# A run that is interrupted


MOMENTS = {
    "while it starts": lambda staged: bool(staged),
    "with the model written": lambda staged: any((s / "model.onnx").exists() for s in staged),
    "with the report written": lambda staged: any((s / "report.html").exists() for s in staged),
}


SIGNALS = {
    signal.SIGINT: (130, "Interrupted"),
    signal.SIGTERM: (143, "Terminated"),
    signal.SIGKILL: (-signal.SIGKILL, ""),
}


# Conversions in processes of their own; continuous integration runs one of them.
QUICK = {("with the model written", signal.SIGTERM)}
INTERRUPTIONS = [
    pytest.param(
        moment,
        sent,
        id=f"{moment}-{sent.name}",
        marks=pytest.mark.services if (moment, sent) in QUICK else pytest.mark.slow,
    )
    for moment in MOMENTS
    for sent in SIGNALS
]


@pytest.mark.parametrize(("moment", "sent"), INTERRUPTIONS)
def test_an_interrupted_run_leaves_the_earlier_artifact(
    start: Callable[..., subprocess.Popen[str]],
    factories: SimpleNamespace,
    artifact: Path,
    sent: signal.Signals,
    moment: str,
) -> None:
    before = snapshot(artifact)
    options = ("--no-bench", "--overwrite", "--threads", 1)
    process = start("convert", factories.source("small"), "-o", artifact, *options)
    try:
        while process.poll() is None:
            staged = list(artifact.parent.glob(".artifact.partial-*"))
            if MOMENTS[moment](staged):
                process.send_signal(sent)
                break
            time.sleep(0.0005)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    linexport.load(artifact, threads=1)
    assert "Traceback" not in err
    if process.returncode == 0:
        assert moment == "with the report written"  # the signal came when all was done
        return
    code, message = SIGNALS[sent]
    assert process.returncode == code
    assert snapshot(artifact) == before
    left = [p for p in artifact.parent.iterdir() if p.name != "artifact"]
    if sent != signal.SIGKILL:
        assert left == []
        assert message in err
    with write.staged(artifact):  # what every run begins with
        assert not [p for p in left if p.exists()]


@pytest.mark.parametrize("sent", SIGNALS)
def test_a_command_that_is_interrupted_removes_what_it_staged(
    tmp_path: Path, sent: signal.Signals
) -> None:
    """A copy of this process stages; another run removes what a killed one left."""
    output, ready = make(tmp_path / "out", "earlier"), tmp_path / "ready"
    child = os.fork()
    if child == 0:
        try:
            stage(output, ready)
        except typer.Exit as end:
            os._exit(end.exit_code)
        finally:
            os._exit(1)
    while not ready.exists() and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    os.kill(child, sent)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == SIGNALS[sent][0]
    left = {p.name for p in tmp_path.iterdir()} - {"out", "ready"}
    assert len(left) == (1 if sent == signal.SIGKILL else 0)
    with write.staged(output):
        assert not any((tmp_path / name).exists() for name in left)
    assert (output / "file").read_text() == "earlier"


def stage(output: Path, ready: Path) -> None:
    """Wait with a half-written folder, as a command does."""
    signals.install()
    with guarded(False), write.staged(output) as folder:
        (folder / "model.onnx").write_text("half")
        ready.touch()
        time.sleep(60)


@pytest.mark.parametrize("name", ["out", "out[1]", "o*t"])
def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_kept(
    tmp_path: Path, name: str
) -> None:
    """The living are told by their lock: process ids are those of another container, perhaps."""
    output = tmp_path / name
    leftovers = [tmp_path / f".{name}.partial-{end}" for end in ("1", "probe", "8f0e")]
    kept = [tmp_path / f".other.partial-{os.getpid()}", tmp_path / f"{name}.partial-1"]
    for folder in (*leftovers, *kept):
        make(folder, "half")
    with write.staged(output) as living:
        with write.staged(output) as folder:
            assert folder.parent == tmp_path and folder.is_dir() and folder != living
            assert set(tmp_path.iterdir()) == {*kept, living, folder}
        assert set(tmp_path.iterdir()) == {*kept, living}
    assert set(tmp_path.iterdir()) == set(kept)


def test_an_earlier_output_that_was_put_aside_stays_until_another_is_in_its_place(
    tmp_path: Path,
) -> None:
    output, aside = tmp_path / "out", make(tmp_path / ".out.partial-8f0e.old", "the only copy")
    with write.staged(output):
        assert aside.exists()
    output.mkdir()
    with write.staged(output):
        assert not aside.exists()


def test_without_locks_nothing_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", unsupported)
    other = make(tmp_path / ".out.partial-8f0e", "perhaps in use")
    with write.staged(tmp_path / "out") as folder:
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == [other]


def test_many_runs_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"
    lost = []

    def run(number: int) -> None:
        for _ in range(30):
            with write.staged(output) as folder:
                (folder / "file").write_text(str(number))
                time.sleep(0.0002)
                if (folder / "file").read_text() != str(number):
                    lost.append(folder)

    workers = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert lost == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_belongs_to_the_model_is_not_copied_through_a_link(tmp_path: Path) -> None:
    folder, private = make(tmp_path / "model", "inside"), make(tmp_path / "home", "private")
    (folder / "link").symlink_to(private / "file")
    (folder / "fine").symlink_to("file")
    copies = tmp_path / "copies"
    copies.mkdir()
    with pytest.raises(UsageError, match="outside its folder"):
        write.copy_files([folder / "link"], copies)
    write.copy_files([folder / "fine"], copies)
    assert snapshot(copies) == {"fine": b"inside"}
    assert not (copies / "fine").is_symlink()


@pytest.mark.usefixtures("no_work")
def test_an_output_that_is_not_text_is_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    result = cli("convert", "nothing:here", "-o", tmp_path / os.fsdecode(b"o\xff"), "--json")
    assert result.code == 2
    assert "is not text in the encoding of file names" in result.json()["message"]
    assert list(tmp_path.iterdir()) == []


# Before a command begins


@pytest.mark.parametrize("json", [True, False])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_program_is_imported_ends_it_in_its_own_words(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, sent: signal.Signals, json: bool
) -> None:
    """``typer`` is replaced by a module that sends the signal when it is imported."""
    (tmp_path / "typer.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), {int(sent)})\ntime.sleep(20)\n"
    )
    process = start("doctor", *(["--json"] if json else []), cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    code, message = SIGNALS[sent]
    assert process.returncode == code
    assert "Traceback" not in out + err
    if json:
        answer = loads(out)
        assert (answer["status"], answer["exit_code"]) == ("error", code)
        assert answer["message"].startswith(message)
    else:
        assert message in err and not out


def test_a_signal_waits_until_torch_is_imported(tmp_path: Path) -> None:
    """An exception of a handler in the middle of that ends the process by SIGABRT."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\nwhole = 1\n"
    )
    program = (
        "import sys, time\nfrom linexport.system import signals\n"
        "signals.install()\nsignals.unwind()\n"
        "try:\n    import torch\n    time.sleep(20)\n"
        "except KeyboardInterrupt:\n    print(torch.whole)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


# Publishing


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "file").write_text(text)
    return folder


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "an earlier one"])
def test_publishing_puts_the_new_in_the_place_of_the_old(tmp_path: Path, there: str) -> None:
    output, new = tmp_path / "out", make(tmp_path / "new", "new")
    if there != "nothing":
        output.mkdir()
    if there == "an earlier one":
        (output / "more").write_text("old")
    write.publish(new, output)
    assert snapshot(output) == {"file": b"new"}


def test_publishing_never_leaves_a_moment_without_the_output(tmp_path: Path) -> None:
    output = make(tmp_path / "out", "0")
    looked, missed, stop = 0, 0, threading.Event()

    def look() -> None:
        nonlocal looked, missed
        while not stop.is_set():
            looked += 1
            missed += not os.path.lexists(output)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for count in range(1, 201):
            new = make(tmp_path / "new", str(count))
            write.publish(new, output)
            assert (output / "file").read_text() == str(count)
            shutil.rmtree(new)
    finally:
        stop.set()
        watcher.join()
    assert looked > 200
    assert missed == 0


def test_without_the_system_call_two_renames_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def __init__(self, *args: object, **options: object) -> None:
            raise OSError("no such library")

    monkeypatch.setattr(write.ctypes, "CDLL", Library)
    output = make(tmp_path / "out", "old")
    write.publish(make(tmp_path / "new", "new"), output)
    assert snapshot(tmp_path) == {"out/file": b"new"}


def test_one_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    write.replace_text(path, "first")
    write.replace_text(path, "second")
    assert snapshot(tmp_path) == {"manifest.json": b"second"}

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        write.replace_text(path, "third")
    assert snapshot(tmp_path) == {"manifest.json": b"second"}


def test_check_output_is_the_same_for_the_library(tmp_path: Path, convert: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        convert("small", tmp_path / "file")
    with pytest.raises(EnvironmentProblemError, match="Cannot write"):
        convert("small", tmp_path / "file" / "out")
