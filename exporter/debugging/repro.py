"""A folder that repeats one wrong value, with nothing but NumPy and ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from linexport.artifact import write
from linexport.debugging.differences import Differences
from linexport.system.npz import save_npz

RUN = '''"""Run the first wrong value's node on the original's inputs, and on the artifact's own.

    python run.py        needs numpy and onnxruntime
"""

from pathlib import Path

import numpy as np
import onnxruntime

HERE = Path(__file__).parent
session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), providers=["CPUExecutionProvider"])
expected = np.load(HERE / "expected.npz")
names = [output.name for output in session.get_outputs()]
for what in ("original", "artifact"):
    inputs = np.load(HERE / f"inputs_of_{what}.npz")
    values = session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})
    for name, got in zip(names, values):
        error = np.abs(np.float64(got) - expected[name])
        largest = np.abs(expected[name]).max() or 1.0
        place = np.unravel_index(error.argmax(), error.shape)
        print(
            f"with the inputs of the {what}: {name} is off by {error.max() / largest:.2e} of its "
            f"largest value, at {tuple(map(int, place))}"
        )
'''


def write_repro(
    place: Path,
    findings: Differences,
    part: onnx.ModelProto,
    original: Mapping[str, np.ndarray],
    artifact: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
) -> None:
    """Write the folder in one step.

    Args:
        place: a new or empty folder.
        findings: written as ``findings.json``.
        part: the node, or nodes, that compute the value.
        original: its inputs as the original computes them.
        artifact: its inputs as the artifact computes them.
        expected: its outputs as the original computes them.

    Raises:
        UsageError: the folder has something in it.
        EnvironmentProblemError: it cannot be written.
    """
    write.check_output(place, overwrite=False)
    with write.staged(place) as folder:
        write.save_model(part, folder)
        save_npz(folder / "inputs_of_original.npz", original)
        save_npz(folder / "inputs_of_artifact.npz", artifact)
        save_npz(folder / "expected.npz", expected)
        (folder / "findings.json").write_text(json.dumps(findings.json(), indent=2) + "\n")
        (folder / "run.py").write_text(RUN)
        write.publish(folder, place)
