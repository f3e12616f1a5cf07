"""Texts of a folder for Transformers.js, by that library in node: prompts padded on the left."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.package.destination import BatchPrompts, Packaging, WrittenTexts

PROGRAM, NAME = "transformers_js.mjs", "model"
INSTALL = (
    "--prove runs the package in Transformers.js in node: run npm install "
    "@huggingface/transformers, and the command again in that folder."
)
SECONDS = 600


def write_texts(job: Packaging, prompts: BatchPrompts) -> WrittenTexts:
    """See ``Destination.write_texts``.

    Raises:
        EnvironmentProblemError: node, or the library in the current directory, is not installed.
    """
    node = shutil.which("node")
    if node is None:
        raise EnvironmentProblemError(f"Found no node on PATH. {INSTALL}")
    longest = max(map(len, prompts.rows))
    ids = [[prompts.padding] * (longest - len(row)) + row.tolist() for row in prompts.rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts.rows]
    given = {"ids": ids, "mask": mask, "tokens": prompts.tokens}
    program = resources.files(__package__).joinpath(PROGRAM)
    with resources.as_file(program) as script, tempfile.TemporaryDirectory() as place:
        # The library takes no folder whose name begins with a point, as one does that is written.
        Path(place, NAME).symlink_to(job.folder.absolute(), target_is_directory=True)
        found = _run([node, str(script), place, NAME], given)
    if "missing" in found:
        raise EnvironmentProblemError(f"{found['missing']}. {INSTALL}")
    return WrittenTexts(f"Transformers.js {found['version']}", found["rows"])


def _run(command: list[str], given: Mapping[str, object]) -> Any:
    """Run a program that takes and gives JSON."""
    try:
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentProblemError(f"node was not done after {SECONDS} s.") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or [
            "no reason given"
        ]
        raise EnvironmentProblemError(f"Transformers.js does not run the package: {lines[0]}")
    return json.loads(done.stdout)
