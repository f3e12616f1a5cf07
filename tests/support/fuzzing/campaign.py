"""Campaigns: cases are sent to a worker, which is started again after a crash, and counted.

A case that hangs or lacks memory is attempted once more in a fresh worker, since an earlier case
may be to blame; the second outcome counts. Time is counted without what the worker waits for a
processor, so a busy machine makes no case hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import FACTORIES, ROOT
from tests.support.fuzzing.kinds import KINDS

BAD = ("wrong", "traceback", "abort", "hang", "memory")
"""Outcomes that are faults."""

MEMORY = 2**30
"""Bytes by which the address space of a worker may grow in one case."""

STARTING = 120
"""Seconds that the first case of a worker may take on top: it imports, and makes the samples."""


@dataclass
class Finding:
    """Faults of one kind in one place; ``index`` is the first case."""

    outcome: str
    where: str
    detail: str
    index: int
    trace: str = ""
    count: int = 1


@dataclass
class Report:
    """Counts by outcome, and the faults."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def add(self, index: int, answer: dict[str, str]) -> None:
        """Count one case."""
        outcome, where = answer["outcome"], answer.get("where", "")
        self.counts[outcome] += 1
        if outcome not in BAD:
            return
        known = self.findings.get((outcome, where))
        if known:
            known.count += 1
        else:
            self.findings[outcome, where] = Finding(
                outcome, where, answer.get("detail", ""), index, answer.get("trace", "")
            )


class Worker:
    """A worker process and what to tell it."""

    def __init__(self, folder: Path, memory: int = MEMORY) -> None:
        self.folder, self.memory = folder, memory
        self.log = folder / "worker.log"
        self.process: subprocess.Popen[str] | None = None
        self.known: set[str] = set()

    def ask(self, kind: str, seed: int, index: int) -> dict[str, str]:
        """Return what became of a case."""
        if self.process is None:
            self.start()
        process = self.process
        assert process is not None and process.stdin and process.stdout
        seconds = KINDS[kind].seconds + (0 if kind in self.known else STARTING)
        with contextlib.suppress(BrokenPipeError):  # it has ended, and so has its answer
            process.stdin.write(f"{kind} {seed} {index}\n")
            process.stdin.flush()
        if not answered(process, seconds):
            self.stop()
            return {"outcome": "hang", "where": f"{seconds} s"}
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            if not (KINDS[kind].samples(self.folder) / "complete").exists():
                log = self.log.read_text(errors="replace")
                raise RuntimeError(f"The samples of {kind} could not be made: {log[-2000:]}")
            self.stop()
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            return {"outcome": "abort", "where": f"exit code {code}", "detail": "".join(last)[:300]}
        self.known.add(kind)
        answer: dict[str, str] = json.loads(line)
        return answer

    def twice(self, kind: str, seed: int, index: int) -> dict[str, str]:
        """Return what became of a case, where it needs to in a fresh process."""
        answer = self.ask(kind, seed, index)
        if answer["outcome"] in ("hang", "memory"):
            self.stop()
            answer = self.ask(kind, seed, index)
        return answer

    def start(self) -> None:
        """Start the process."""
        path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(ROOT), str(FACTORIES)))
        self.folder.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.fuzzing.worker",
                    str(self.folder),
                    str(self.memory),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "HF_HUB_OFFLINE": "1",
                },
            )

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.process, self.known = None, set()


def answered(process: subprocess.Popen[str], seconds: float) -> bool:
    """Wait until a process writes; return whether it does within seconds of its own time."""
    start, waited = time.monotonic(), queued(process.pid)
    while not select.select([process.stdout], [], [], 1)[0]:
        if time.monotonic() - start - (queued(process.pid) - waited) > seconds:
            return False
    return True


def queued(process: int) -> float:
    """Return for how many seconds a process was ready to run and had no processor."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:  # it has ended, as its silence will say
        return 0.0


def run(
    kind: str,
    seed: int,
    indices: Iterable[int],
    worker: Worker,
    progress: Callable[[int, Report], None] = lambda index, report: None,
) -> Report:
    """Attempt cases of one kind."""
    report = Report()
    for index in indices:
        report.add(index, worker.twice(kind, seed, index))
        progress(index, report)
    return report
