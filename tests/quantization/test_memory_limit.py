"""Peak memory of ``convert --weights int4``, in a control group that has no more.

    --proof whole     2.6 times the bfloat16 checkpoint and 1 GiB
    --proof layers    1.3 times the checkpoint and 1 GiB

The checkpoint is small, so that what does not depend on it counts most: larger ones have more room.
One of a public model's shape has all of its words, and layers of each of its kinds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from linexport.system.control_groups import control_groups

pytestmark = pytest.mark.slow

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "bench_memory.py"
SIZES = ("--width", "256", "--layers", "4", "--vocabulary", "32000")
MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first conversion makes the model."""
    with control_groups({"memory": MIB}) as groups:
        if "memory" not in groups:
            pytest.skip("no control group of memory can be made here")
    return tmp_path_factory.mktemp("checkpoint") / "model"


@pytest.mark.parametrize(("proof", "factor"), [("whole", 2.6), ("layers", 1.3)])
def test_a_conversion_to_int4_stays_within_its_limit(
    proof: str, factor: float, checkpoint: Path
) -> None:
    command = [sys.executable, str(TOOL), *SIZES, "--model", str(checkpoint), "--proof", proof]
    if not checkpoint.exists():
        subprocess.run([*command, "--only-make"], check=True)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    limit = int(factor * size / MIB) + 1024
    done = subprocess.run([*command, "--limit", str(limit)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "ok" and found["own"] <= limit, done.stderr


def test_a_model_of_a_public_shape_stays_within_4_gib(checkpoint: Path) -> None:
    """Four layers and 248,320 words: logits of a thousand tokens alone would be 1 GiB."""
    shape = ("--shape", "qwen3.5-0.8b", "--layers", "4", "--weights", "float32")
    limit = ("--limit", "4096")
    done = subprocess.run(
        [sys.executable, str(TOOL), *shape, *limit], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "ok" and found["own"] <= 4096, done.stderr
