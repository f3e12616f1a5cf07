"""Texts of a folder for Transformers.js, by that library in node: prompts padded on the left."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources

import numpy as np

from linexport.errors import EnvironmentProblemError
from linexport.package.destination import BatchPrompts, Packaging, WrittenTexts

PROGRAM = "transformers_js.mjs"
INSTALL = (
    "--prove runs the package in Transformers.js in node: run npm install "
    "@huggingface/transformers, and the command again in that folder."
)
SECONDS = 600


def write_texts(job: Packaging, prompts: BatchPrompts) -> WrittenTexts:
    """See ``Destination.write_texts``.

    Raises:
        EnvironmentProblemError: there is no node, or no library in the current directory.
    """
    node = shutil.which("node")
    if node is None:
        raise EnvironmentProblemError(f"Found no node on PATH. {INSTALL}")
    longest = max(map(len, prompts.rows))
    ids = [[prompts.padding] * (longest - len(row)) + row.tolist() for row in prompts.rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts.rows]
    given = json.dumps({"ids": ids, "mask": mask, "tokens": prompts.tokens})
    with resources.as_file(resources.files(__package__).joinpath(PROGRAM)) as program:
        command = [node, str(program), str(job.folder.absolute())]
        try:
            done = subprocess.run(
                command, input=given, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentProblemError(f"node was not done after {SECONDS} s.") from None
    if done.returncode:
        raise EnvironmentProblemError(f"Transformers.js fails: {done.stderr.strip()[-1000:]}")
    found = json.loads(done.stdout)
    if "missing" in found:
        raise EnvironmentProblemError(f"{found['missing']}. {INSTALL}")
    rows = [np.asarray(row, np.int64).tolist() for row in found["rows"]]
    return WrittenTexts(f"Transformers.js {found['version']}", rows)
