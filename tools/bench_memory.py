"""Memory of a conversion to int4, stage by stage, of a bfloat16 checkpoint with random weights.

    python tools/bench_memory.py [MODEL_TYPE] [--width 1024] [--layers 12] [--vocabulary 32000]
                                 [--weights int4] [--proof whole|layers] [--limit MIB] [--json FILE]
    python tools/bench_memory.py --shape qwen3.5-0.8b [--layers 4]

Memory of the process is sampled every 5 ms, in MiB: what is its own, and pages of files that are
mapped, which leave when others need them. Before it are the second at which a stage begins, and the
seconds that processors work in it, which other programs lengthen less. ``--limit`` converts in a
control group that has no more than this, pages of files among it. Runs are added to those in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measurement
import real_shapes
from bench_weights import sized

from linexport.system.control_groups import control_groups
from linexport.system.progress import Silent

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.families import TINY

MIB = 2**20
LAYERS = 12
EVERY = 0.005


def make(model_type: str, sizes: tuple[int, int, int], folder: Path) -> None:
    """Save a model of random weights in bfloat16, in a process of its own."""
    code = (
        "import torch; from tests.support.families import save_model;"
        "torch.set_default_dtype(torch.bfloat16);"
        f"from pathlib import Path; save_model({sized(model_type, *sizes)!r}, {model_type!r}, "
        f"Path({str(folder)!r}))"
    )
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


class Sampled(Silent):
    """Progress that keeps the largest memory of every stage, and of what follows it."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.stages: list[dict[str, Any]] = []
        self._begin("start")
        threading.Thread(target=self._sample, daemon=True).start()

    def _begin(self, name: str) -> None:
        self.end()
        seconds = round(time.perf_counter() - self.begun, 1)
        self._used = processor()
        row = {"name": name, "own": 0.0, "all": 0.0, "at": seconds, "processor": 0.0}
        self.stages.append(row)

    def end(self) -> None:
        """Close the stage that is running."""
        if self.stages:
            self.stages[-1]["processor"] = round(processor() - self._used, 1)
            print(line(self.stages[-1]), file=sys.stderr, flush=True)

    def _sample(self) -> None:
        while True:
            row, (own, files) = self.stages[-1], resident()
            row["own"], row["all"] = max(row["own"], own), max(row["all"], own + files)
            time.sleep(EVERY)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See ``linexport.system.progress.Progress``."""
        self._begin(name)
        yield
        self._begin(f"after {name}")

    def note(self, text: str) -> None:
        """See ``Progress``."""
        print(text, file=sys.stderr, flush=True)


def line(row: dict[str, Any]) -> str:
    """Return when a stage began, and its largest memory."""
    numbers = (
        f"{row['at']:8.1f} s {row['processor']:7.1f} s {row['own']:6.0f} {row['all']:6.0f} MiB"
    )
    return f"{numbers}  {row['name']}"


def processor() -> float:
    """Return the seconds that processors have worked for this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def resident() -> tuple[float, float]:
    """Return MiB of this process: its own, and of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    own, files, shared = (int(fields[n].split()[0]) for n in ("RssAnon", "RssFile", "RssShmem"))
    return own / 1024, (files + shared) / 1024


def convert(folder: Path, output: Path, weights: str, proof: str, threads: int) -> dict[str, Any]:
    """Convert in this process, as the program does."""
    import linexport
    from linexport.system import memory

    memory.own_process()
    shown = Sampled()
    options: dict[str, Any] = {"weights": weights, "bench": False, "threads": threads}
    if proof:
        options["proof"] = proof
    manifest = linexport.convert(folder, output, progress=shown, **options)
    shown.end()
    seconds = round(time.perf_counter() - shown.begun)
    stages = [{**r, "own": round(r["own"]), "all": round(r["all"])} for r in shown.stages]
    return {
        "status": manifest.status,
        "file": round(sum(p.stat().st_size for p in folder.glob("*.safetensors")) / MIB),
        "own": max(row["own"] for row in stages),
        "all": max(row["all"] for row in stages),
        "seconds": seconds,
        "processor": round(sum(row["processor"] for row in stages)),
        "load": round(os.getloadavg()[0], 1),
        "stages": [row for row in stages if row["all"]],
    }


def limited(command: list[str], limit: int | None) -> dict[str, Any]:
    """Run the conversion in a process of its own, which has no more MiB than this."""
    with control_groups({} if limit is None else {"memory": limit * MIB}) as groups:
        if limit is not None and "memory" not in groups:
            raise SystemExit("no control group can be made here: leave out --limit")

        def join() -> None:
            for folder in groups.values():
                (folder / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=join
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    """Convert once, and print the memory of every stage."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("family", nargs="?", default="qwen3_5_text", help=", ".join(TINY))
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--layers", type=int, help="12, or those of the shape")
    real_shapes.add_options(options)
    options.add_argument("--vocabulary", type=int, default=32000)
    options.add_argument("--weights", default="int4", help="those of linexport convert")
    options.add_argument("--proof", default="", help="that of linexport convert")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--limit", type=int, help="MiB of memory that there are")
    options.add_argument("--model", type=Path, help="a folder to make the model in, or to find it")
    options.add_argument("--only-make", action="store_true", help="make the model, and no more")
    options.add_argument("--alone", help=argparse.SUPPRESS)
    measurement.add_option(options)
    given = options.parse_args()
    shape = real_shapes.chosen(given)
    with tempfile.TemporaryDirectory() as work:
        folder = given.model or Path(work) / "model"
        if given.alone:
            print(
                json.dumps(
                    convert(
                        folder, Path(work) / "artifact", given.weights, given.proof, given.threads
                    )
                )
            )
            return
        if not folder.is_dir():
            if shape is not None:
                shape.save(folder)
            else:
                make(given.family, (given.width, given.layers or LAYERS, given.vocabulary), folder)
        if given.only_make:
            return
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", "1", "--model", str(folder)]
        found = limited(command, given.limit)
    stages = found.pop("stages")
    print(json.dumps(found))
    most = max(stages, key=lambda row: row["own"])["name"]
    run = {**found, "proof": given.proof or "whole", "limit": given.limit, "stage": most}
    earlier = measurement.read(given.json)["runs"] if given.json and given.json.exists() else []
    made = given.family if shape is None else str(shape)
    run = {**run, "weights": given.weights}
    measurement.write(given.json, {"family": made, "runs": [*earlier, run]})


if __name__ == "__main__":
    main()
