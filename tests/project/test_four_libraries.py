"""An artifact is opened, run and streamed by what a server installs: four libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

LIBRARIES = ("numpy", "onnx", "onnxruntime", "pydantic")

OF_THESE = ("annotated_types", "flatbuffers", "google", "ml_dtypes", "packaging", "protobuf")
OF_THESE += ("pydantic_core", "typing_extensions", "typing_inspection")
"""What they install with themselves, by the names of modules."""

RUN = f"""
import sys
from importlib.abc import MetaPathFinder

ALLOWED = {{"linexport", *{LIBRARIES}, *{OF_THESE}, *sys.stdlib_module_names}}

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in ALLOWED and not name.startswith("_"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import numpy as np
import linexport

artifact = linexport.load(sys.argv[1], threads=1)
x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
whole = artifact.run(x)["output"]
with artifact.stream() as stream:
    pieces = [stream.step(part)["output"] for part in (x[:, :2], x[:, 2:3], x[:, 3:])]
np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=1e-5)
found = linexport.inspect(sys.argv[2]).ops
print("equal", any(op.attributes.get("feature_map") or op.op == "FeatureMap" for op in found))
"""


def test_an_artifact_runs_by_four_libraries(converted: Callable[..., Path]) -> None:
    command = [
        sys.executable,
        "-c",
        RUN,
        *map(str, (converted("small"), converted("language_model"))),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "equal True\n", done.stderr
