"""The core install: models are converted where no optional package is to be had.

A package that is None in ``sys.modules`` cannot be imported, as one that is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import FACTORIES

pytestmark = pytest.mark.smoke

OPTIONAL = (
    *("transformers", "tokenizers", "safetensors", "triton", "tensorrt", "tensorrt_rtx"),
    *("starlette", "uvicorn", "sklearn", "cuda", "peft"),
)

RUN = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL}))
from linexport.__main__ import main
main()
"""


def test_a_model_is_converted_inspected_and_run(factories: SimpleNamespace, tmp_path: Path) -> None:
    artifact = str(tmp_path / "artifact")
    for command in (
        ["convert", factories.source("language_model"), "--output", artifact, "--no-bench"],
        ["inspect", artifact],
        ["generate", artifact, "--prompt", "a", "--max-tokens", "2"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", RUN, *command],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(FACTORIES)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
