"""The checks and times of a pack on this machine's GPU; ``tools/gpu_check.py`` makes packs.

    python FILE [--json RESULT] [--quick] [--checks-only] [--seconds 540]
    python FILE --tiles [--json RESULT]           of a pack of ``tools/gpu_tiles.py``

Every node is checked against float64, launched by Python and by C++, under capture, in place and
without tokens; then timed; then checked again under compute-sanitizer, where that is found: one of
each kind first, and as many others as there is time for. Exit code 0: all right; 3: something is
wrong; 5: no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu import peers
from gpu.case import Case, small
from gpu.cases import CASES
from gpu.device import Device
from gpu.played import Played, check, expected, relative
from gpu.table import HEADER, line, roofline
from linexport.errors import LinexportError
from linexport.plugins.kernels.description import Description
from linexport.plugins.tensorrt.launcher import Launcher
from linexport.system import environment

LIBRARY, NODES, KERNELS, VARIANTS = "launcher.so", "nodes", "kernels", "variants"
"""Places in a pack. A file in ``NODES`` has a case's name and names one in ``KERNELS``, since cases
may be one node at different sizes."""

QUICK = (
    *("prefill linear", "prefill gated delta", "decode gated delta", "convolution", "map favor+"),
    *("layer of 4 tokens", "layer prefill"),
)
"""Cases of ``--quick``, and the first ones under compute-sanitizer."""

Variant = dict[str, Any]
"""Tiles that a plan has in place of its own; see ``tools/gpu_tiles.py``."""

TOOLS = ("memcheck", "racecheck")
ENDING = 15
"""Seconds that a run under compute-sanitizer gets to check its last case and to end."""

CHECKED = "Checked"
"""Beginning of the line that says how many cases were."""

DRAWN = 2**22
"""Values drawn of a tensor that is timed; a larger one repeats them."""

SHORT, MOST = 0.2, 20
"""Milliseconds that a graph takes at least, by its node's floor, and most calls that make it so:
launching a graph takes longer than a step of one sequence does."""


class Pack:
    """Descriptions by the name of a case, and the launcher in C++."""

    def __init__(self, file: Path) -> None:
        self.archive = zipfile.ZipFile(file)

    def cases(self, quick: bool) -> list[Case]:
        """Return the cases there are."""
        places = map(Path, self.archive.namelist())
        there = {place.name for place in places if place.parent == Path(NODES)}
        return [c for c in CASES if c.name in there and (c.name in QUICK or not quick)]

    def description(self, case: Case) -> Description:
        """Return the node of a case.

        Raises:
            UnsupportedModelError: the pack is of another version.
        """
        place = self.archive.read(f"{NODES}/{case.name}").decode()
        return Description.from_attributes(json.loads(self.archive.read(place)))

    def variants(self) -> Iterator[tuple[Case, Variant, Description]]:
        """Yield the cases with other tiles than their plans choose."""
        cases = {case.name: case for case in CASES}
        for place in sorted(self.archive.namelist()):
            if place.startswith(f"{VARIANTS}/"):
                found = json.loads(self.archive.read(place))
                description = Description.from_attributes(found["node"])
                yield cases[found["case"]], found["variant"], description

    def library(self, folder: Path) -> Path:
        """Write the launcher in C++ into a folder."""
        return Path(self.archive.extract(LIBRARY, folder))


def time_case(case: Case, description: Description, device: Device, speed: float) -> dict[str, Any]:
    """Times of a case and its peers, and its floor."""
    row, launcher = roofline(case, speed), Launcher(description)
    calls = max(1, min(MOST, round(SHORT / row["floor_ms"])))
    row["ms"] = milliseconds(case, launcher, device, case.inputs(most=DRAWN), calls)
    row["ratio_to_floor"] = row["ms"] / row["floor_ms"]
    launcher.close()
    return {**row, **peers.times(case)}


def milliseconds(
    case: Case, launcher: Launcher, device: Device, given: Mapping[str, Any], calls: int = 1
) -> float:
    """Time of one of several calls that a graph makes."""
    played = Played(launcher.description, device, case.shapes())
    played.put(given)
    graph = device.captured(lambda: [played.enqueue(launcher) for _ in range(calls)])
    found = device.milliseconds(graph) / calls
    graph.free()
    played.free()
    return found


def time_variants(pack: Pack, device: Device, first: int) -> None:
    """Print the time of every variant from ``first`` on, and its largest error at a small size.

    Raises:
        EnvironmentProblemError: a kernel failed in such a way that the GPU is to be opened anew.
    """
    given = functools.cache(lambda case, most: case.inputs(most=most))
    wanted = functools.cache(lambda case: case.wanted(given(case, None)))
    for case, variant, description in itertools.islice(pack.variants(), first, None):
        row: dict[str, Any] = {"case": case.name, "variant": variant}
        try:
            launcher = Launcher(description)
            played = Played(description, device, small(case).shapes())
            played.put(given(small(case), None))
            played.enqueue(launcher)
        except LinexportError as error:
            print(json.dumps(row | {"fault": str(error)}), flush=True)
            continue
        found = played.results()
        row["error"] = max(relative(found[n], x) for n, x in wanted(small(case)).items())
        played.free()
        row["ms"] = milliseconds(case, launcher, device, given(case, DRAWN))
        launcher.close()
        print(json.dumps(row), flush=True)


def all_variants(file: Path) -> list[dict[str, Any]]:
    """Time every variant, in as many processes as it takes: a failing kernel ends its own."""
    rows: list[dict[str, Any]] = []
    while True:
        command = [sys.executable, str(file), "--tiles", "--first", str(len(rows))]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            for line in child.stdout or ():
                print(line, end="", flush=True)
                rows.append(json.loads(line))
            reason = child.stderr.read() if child.stderr else ""
        if not child.returncode:
            return rows
        rows.append({"fault": reason.strip()[-200:]})
        print(json.dumps(rows[-1]), flush=True)


def sanitize(file: Path, seconds: float) -> dict[str, str]:
    """Run the checks under each of compute-sanitizer's tools; return what each said last."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return dict.fromkeys(TOOLS, "not run: compute-sanitizer is not installed")
    found, ends = {}, time.monotonic() + seconds
    for left, tool in zip(range(len(TOOLS), 0, -1), TOOLS, strict=True):
        share = max((ends - time.monotonic()) / left, 1)
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, str(file)]
        try:
            done = subprocess.run(
                [*command, "--checks-only", "--seconds", str(max(share - ENDING, 1))],
                capture_output=True,
                text=True,
                timeout=share,
            )
        except subprocess.TimeoutExpired:
            found[tool] = "not run to its end: no time was left"
            continue
        lines = done.stdout.splitlines()
        said = [x for x in lines if "SUMMARY" in x][-1:] or [done.stderr[-300:]]
        said += [x for x in lines if x.startswith(CHECKED)]
        found[tool] = f"exit {done.returncode}: {'; '.join(said)}"
    return found


def measure(given: argparse.Namespace, pack: Pack, device: Device) -> dict[str, Any]:
    """Check everything, then time everything."""
    begun, checks, times = time.monotonic(), [], []
    cases = pack.cases(given.quick)
    if given.checks_only:
        cases.sort(key=lambda case: case.name not in QUICK)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as oracles:
        library = pack.library(Path(folder))
        for case, found in zip(cases, oracles.map(expected, map(small, cases)), strict=True):
            if checks and given.checks_only and time.monotonic() - begun > given.seconds:
                oracles.shutdown(wait=False, cancel_futures=True)
                break
            row = check(small(case), *found, pack.description(case), device, library)
            checks.append(row)
            worst = max(row["errors"].values())
            print(f"{case.name:40} {worst:.1e} {'; '.join(row['faults'])}", flush=True)
    done = f"{len(checks)} of {len(cases)} cases in {time.monotonic() - begun:.0f} s"
    print(f"{CHECKED} {done}", flush=True)
    result: dict[str, Any] = {"checks": checks, "times": times}
    wrong = any(row["faults"] for row in checks)
    if not given.checks_only:
        result["bandwidth"] = device.bandwidth()
        print(f"Copy bandwidth {result['bandwidth'] / 1e12:.2f} TB/s\n{HEADER}")
        for case in cases:
            times.append(
                row := time_case(case, pack.description(case), device, result["bandwidth"])
            )
            print(line(row), flush=True)
        left = given.seconds - (time.monotonic() - begun)
        result["sanitizer"] = sanitize(Path(sys.argv[0]).resolve(), left)
        print(*(f"{tool}: {said}" for tool, said in result["sanitizer"].items()), sep="\n")
        wrong |= any(
            said.startswith("exit") and not said.startswith("exit 0")
            for said in result["sanitizer"].values()
        )
    seconds = round(time.monotonic() - begun, 1)
    return {"status": "wrong" if wrong else "ok", "seconds": seconds, **result}


def main() -> int:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path, help="write the results to a file")
    options.add_argument("--quick", action="store_true", help="one case of each kind only")
    options.add_argument("--tiles", action="store_true", help="time the variants of the pack")
    options.add_argument("--first", type=int, help="in this process, from this variant on")
    options.add_argument(
        "--checks-only",
        action="store_true",
        help="no times, no sanitizer; as many as there is time for",
    )
    options.add_argument("--seconds", type=float, default=540.0, help="time for all of it")
    given = options.parse_args()
    try:
        with Device() as device:
            machine = {**environment.describe(), **device.describe()}
            pack = Pack(Path(sys.argv[0]))
            if given.first is not None:
                time_variants(pack, device, given.first)
                return 0
            if given.tiles:
                result = {"status": "ok", "times": all_variants(Path(sys.argv[0]))}
            else:
                result = measure(given, pack, device)
    except LinexportError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if given.json:
        record = {
            "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine,
            "result": result,
        }
        given.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return {"ok": 0, "wrong": 3}[result["status"]]
