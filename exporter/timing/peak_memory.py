"""Peak memory of one run, measured in a process of its own.

The probe (this file run as a program) opens a baseline, runs it once on the shortest input, then
resets the kernel's record of the peak and runs it at the size in question: the figure is how far
the peak rose above what was resident before. Linux only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linexport.system.child_process import python_module
from linexport.system.json_object import JsonObject
from linexport.targets.runtime.providers import CPU, Execution


def peak_megabytes(
    baseline: str,
    model: str,
    inputs: Path,
    small_inputs: Path,
    target: str = "ort",
    loading: Mapping[str, Any] | None = None,
    provider: str = CPU,
) -> tuple[float | None, str | None]:
    """Peak megabytes of one run and None, or None and the reason it could not be measured.

    Args:
        baseline: "onnx" (``model`` is a file) or "pytorch" (``model`` is a source to load).
        model: what to open.
        inputs: ``.npz`` of positional inputs, in order.
        small_inputs: the same for the first, unmeasured run.
        target: whose session opens an ONNX file.
        loading: options that a source is loaded with.
        provider: execution provider that runs an ONNX file.
    """
    if not sys.platform.startswith("linux"):
        return None, "peak memory is measured on Linux only"
    request = {
        "baseline": baseline,
        "model": model,
        "inputs": str(inputs),
        "small_inputs": str(small_inputs),
        "target": target,
        "loading": dict(loading or {}),
        "provider": provider,
    }
    done = subprocess.run(
        python_module("linexport.timing.peak_memory", json.dumps(request)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return None, f"the probe ended with {done.returncode}: {lines[-1][:200]}"
    return float(json.loads(done.stdout.splitlines()[-1])["megabytes"]), None


def _probe(request: JsonObject) -> float:
    import numpy as np

    def arrays(path: str) -> list[Any]:
        with np.load(path, allow_pickle=False) as file:
            return [file[name] for name in file.files]

    if request["baseline"] == "onnx":
        from linexport import targets

        session: Any = targets.find_target(request["target"]).open(
            Path(request["model"]), execution=Execution(request["provider"])
        )
        names = [i.name for i in session.inner.get_inputs()]

        def run(values: list[Any]) -> object:
            return session.run(dict(zip(names, values, strict=True)))

    else:
        import torch

        from linexport.sources import load_model

        module = load_model(request["model"], **request["loading"]).module

        def run(values: list[Any]) -> object:
            with torch.no_grad():
                return module(*[torch.from_numpy(v) for v in values])

    run(arrays(request["small_inputs"]))
    values = arrays(request["inputs"])
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = run(values)
    peak = _status("VmHWM")
    del result
    return max(0.0, (peak - before) / 1024)


def _status(field: str) -> int:
    """Kibibytes of one field of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    print(json.dumps({"megabytes": round(_probe(json.loads(sys.argv[1])), 2)}))
