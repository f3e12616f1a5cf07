"""The file a benchmark writes: what was run, when, on which machine, and the numbers.

    {"command": ..., "date": ..., "environment": {...}, "result": ...}

Every ``tools/bench_*`` script takes ``--json FILE`` from here, so that ``docs/benchmarks.md`` can
be generated from the files in ``docs/data/`` whichever script wrote them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from linexport.system import environment


def add_option(parser: argparse.ArgumentParser, text: str = "write the numbers to FILE") -> None:
    """Add ``--json FILE`` to a script's options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)


def write(path: Path | None, result: Any) -> None:
    """Write a result with its circumstances; do nothing where no file was asked for."""
    if path is None:
        return
    record = {
        "command": shlex.join(["python", "tools/" + Path(sys.argv[0]).name, *_arguments()]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "environment": environment.describe(),
        "result": result,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> Any:
    """Return the result that an earlier run wrote to the file."""
    return json.loads(path.read_text(encoding="utf-8"))["result"]


def _arguments() -> list[str]:
    """Return the script's arguments without ``--json FILE``, a path of that machine."""
    kept: list[str] = []
    given = iter(sys.argv[1:])
    for argument in given:
        if argument == "--json":
            next(given, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return kept
