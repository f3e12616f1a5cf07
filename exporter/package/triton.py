"""``triton``: a model repository of NVIDIA Triton Inference Server, sequences kept by the server.

    REPOSITORY/NAME/config.pbtxt      what comes in, what goes out, how sequences are batched
    REPOSITORY/NAME/1/model.onnx      backend onnxruntime: the server carries implicit states
    REPOSITORY/NAME/1/model.plan      backend tensorrt: the same of an engine, see triton_engine
    REPOSITORY/NAME/1/model.py        backend python: the model carries them itself, in a pool

The server matches the states of a model in the lexicographic order of their names (server issue
8586), so the names of inputs and outputs must sort alike. Its python backend accepts implicit
states and never carries them. An implicit state has a start of fixed size, so that rows which grow
with the tokens, and a state of all sequences together, need the python backend.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import onnxruntime

from linexport.artifact import write
from linexport.errors import UsageError
from linexport.graph.states import State
from linexport.manifest import MODEL
from linexport.package import triton_cuda, triton_engine
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.proving import triton as proving
from linexport.package.standalone import rename_records, standalone
from linexport.package.triton_config import CPU, config, own_inputs, own_outputs, warmup

MAX_BATCH = 16
IDLE_SECONDS = 60
OPTIONS = {
    "backend": "onnxruntime, tensorrt or python; by default python where a state needs it, and "
    "tensorrt where there is an engine of it.",
    "max-batch": f"sequences of one call, {MAX_BATCH} by default.",
    "idle-seconds": f"a sequence without a request for so long ends, {IDLE_SECONDS} by default.",
    "sm": "with tensorrt: which engine, such as 89, where there are several.",
    "plugins": "with tensorrt: the library that linexport plugins build made; is copied.",
    "decoupled": "with python: true streams tokens; a request says how many by MAX_TOKENS.",
}


def _write(job: Packaging) -> Packaged:
    backend = job.options.get("backend") or _backend(job)
    decoupled = _flag(job, "decoupled")
    if backend not in ("onnxruntime", "tensorrt", "python"):
        raise UsageError(f"backend={backend}: expected onnxruntime, tensorrt or python.")
    if backend != "python":
        reason = _why_python(job) or ("tokens are streamed" if decoupled else None)
        if reason is not None:
            raise UsageError(
                f"The {backend} backend cannot hold {job.source}: {reason}. Pass --option "
                "backend=python, whose model carries the states itself."
            )
    folder = job.folder / job.name
    version = folder / "1"
    version.mkdir(parents=True)
    most, idle = _number(job, "max-batch", MAX_BATCH), _number(job, "idle-seconds", IDLE_SECONDS)
    renamed: dict[str, str] = {}
    library = None
    if backend == "tensorrt":
        engine = triton_engine.chosen(job)
        notes = triton_engine.write_engine(job, engine, version)
        most = triton_engine.largest_batch(job, engine, most)
        place = [*triton_engine.kept_logits(engine), *triton_engine.instances(engine)]
    else:
        on_gpus = triton_cuda.is_for_gpus(job)
        model, renamed = triton_cuda.model(job) if on_gpus else standalone(job)
        # From here on names are plain ones: they become paths, and text of the configuration.
        job = replace(job, manifest=rename_records(job.manifest, renamed))
        notes, place = _notes(backend, on_gpus), [CPU]
        if on_gpus:
            library = triton_cuda.write_library(job, model)
            notes += tuple(triton_cuda.notes(job, backend, library))
            place = [*triton_cuda.place(backend, library)]
        write.save_model(model, version)
        place += [] if job.manifest.states else warmup(own_inputs(job))
    states = [State.from_record(s) for s in job.manifest.states]
    if backend == "python":
        _write_python(job, version, states, decoupled, library)
    else:
        _check_order(states)
        _write_starts(folder, states)
    lines = [*config(job, backend, states, most, idle, decoupled), *place]
    (folder / "config.pbtxt").write_text("\n".join(lines) + "\n")
    return Packaged(renamed, notes)


def _backend(job: Packaging) -> str:
    if _why_python(job):
        return "python"
    return "tensorrt" if triton_engine.has_engine(job) else "onnxruntime"


def _why_python(job: Packaging) -> str | None:
    """Return why the server itself cannot carry the states; None where it can."""
    for state in job.manifest.states:
        if state.grows is not None:
            return f"the state {state.past} grows with the tokens and begins empty"
        if isinstance(state.shape[0], int):
            return f"the state {state.past} is one of all sequences together"
    return None


def _notes(backend: str, on_gpus: bool) -> tuple[str, ...]:
    runtime = onnxruntime.__version__
    if backend == "python":
        package = f"onnxruntime-gpu {triton_cuda.OLDEST} to" if on_gpus else "onnxruntime"
        return (f"The server's Python needs numpy and {package} {runtime}; see requirements.txt.",)
    lacks = f"Made for ONNX Runtime {runtime}. A server with an older one may lack kernels that "
    if on_gpus:
        return (f"{lacks}target ort-cuda uses.",)
    return (f"{lacks}target ort uses: convert with --target onnx for it.",)


def _flag(job: Packaging, name: str) -> bool:
    value = job.options.get(name, "false")
    if value not in ("true", "false"):
        raise UsageError(f"{name}={value}: expected true or false.")
    return value == "true"


def _number(job: Packaging, name: str, usual: int) -> int:
    value = job.options.get(name, str(usual))
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{name}={value}: expected a positive integer.")
    return int(value)


def _check_order(states: Sequence[State]) -> None:
    pasts = sorted(states, key=lambda s: s.past)
    if pasts != sorted(states, key=lambda s: s.present):
        raise UsageError(
            "The names of the states' inputs and outputs do not sort alike, by which the server "
            "would mix them up. Pass --option backend=python."
        )


def _write_starts(folder: Path, states: Sequence[State]) -> None:
    """Write the states that do not begin with zero, where the server looks for them."""
    for state in states:
        if state.initial_value != 0:
            place = folder / "initial_state"
            place.mkdir(exist_ok=True)
            (place / state.past).write_bytes(np.ascontiguousarray(state.start(1)).tobytes())


def _write_python(
    job: Packaging, version: Path, states: Sequence[State], decoupled: bool, library: str | None
) -> None:
    spec = {
        "model": MODEL,
        "idle_seconds": _number(job, "idle-seconds", IDLE_SECONDS),
        "decoupled": decoupled,
        "library": library,
        "inputs": [{"name": i.name, "default": i.default} for i in own_inputs(job)],
        "outputs": [o.name for o in own_outputs(job)],
        "states": [
            {
                "past": s.past,
                "present": s.present,
                "dtype": s.dtype,
                "shape": [d if isinstance(d, int) else 0 for d in s.shape],
                "batched": not isinstance(s.shape[0], int),
                "growing": s.growing_axis is not None,
                "initial": s.initial_value,
            }
            for s in states
        ],
    }
    (version / "states.json").write_text(json.dumps(spec, indent=2) + "\n")
    text = resources.files("linexport.package").joinpath("triton_model.txt").read_text()
    (version / "model.py").write_text(text)
    runtime = onnxruntime.__version__
    needed = f"onnxruntime=={runtime}"
    if triton_cuda.is_for_gpus(job):
        needed = triton_cuda.requirement(runtime)
    (version.parent / "requirements.txt").write_text(f"numpy\n{needed}\n")


DESTINATION = Destination(
    "triton",
    "A model repository of NVIDIA Triton Inference Server, with sequences and their states.",
    _write,
    OPTIONS,
    write_texts=proving.write_texts,
    by_prompt=True,
)
