"""The program ``linexport`` as a process of its own, with the factories on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import FACTORIES


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Return standard output, which must be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


PROGRAM = ("-m", "linexport")


def start(
    *arguments: object, cwd: Path | None = None, program: Sequence[str] = PROGRAM
) -> subprocess.Popen[str]:
    """Start the program, or another that runs it."""
    environment = {**os.environ, "PYTHONPATH": str(FACTORIES), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
    )


def run(*arguments: object, cwd: Path | None = None, program: Sequence[str] = PROGRAM) -> Result:
    """Run the program, or another that runs it, to its end."""
    process = start(*arguments, cwd=cwd, program=program)
    out, err = process.communicate(timeout=300)
    return Result(process.returncode, out, err)
