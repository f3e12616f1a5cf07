"""``triton``: a model repository of NVIDIA Triton Inference Server, sequences kept by the server.

    REPOSITORY/NAME/config.pbtxt      what comes in, what goes out, how sequences are batched
    REPOSITORY/NAME/1/model.onnx      backend onnxruntime: the server carries implicit states
    REPOSITORY/NAME/1/model.py        backend python: the model carries them itself, in a pool

The server matches the states of a model in the lexicographic order of their names (server issue
8586), so the names of inputs and outputs must sort alike. Its python backend accepts implicit
states and never carries them. An implicit state has a start of fixed size, so that rows which grow
with the tokens, and a state of all sequences together, need the python backend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from linexport.artifact import write
from linexport.errors import UsageError
from linexport.graph.states import State
from linexport.manifest import MODEL
from linexport.manifest.records import TensorRecord
from linexport.package.destination import Destination, Packaged, Packaging
from linexport.package.standalone import rename_records, standalone
from linexport.system import environment

TYPES = {
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "float64": "TYPE_FP64",
    "int64": "TYPE_INT64",
    "int32": "TYPE_INT32",
    "bool": "TYPE_BOOL",
}
CONTROLS = (
    ("START", "CONTROL_SEQUENCE_START", "fp32_false_true: [ 0, 1 ]"),
    ("END", "CONTROL_SEQUENCE_END", "fp32_false_true: [ 0, 1 ]"),
    ("READY", "CONTROL_SEQUENCE_READY", "fp32_false_true: [ 0, 1 ]"),
    ("CORRID", "CONTROL_SEQUENCE_CORRID", "data_type: TYPE_UINT64"),
)
MAX_BATCH, MAX_SEQUENCES = 16, 128
IDLE_SECONDS = 60
OPTIONS = {
    "backend": "onnxruntime or python; the former unless a state needs the latter.",
    "max-batch": f"sequences of one call, {MAX_BATCH} by default.",
    "idle-seconds": f"a sequence without a request for so long ends, {IDLE_SECONDS} by default.",
    "decoupled": "with python: true streams tokens; a request says how many by MAX_TOKENS.",
}


def _write(job: Packaging) -> Packaged:
    backend = job.options.get("backend") or ("python" if _why_python(job) else "onnxruntime")
    decoupled = _flag(job, "decoupled")
    if backend not in ("onnxruntime", "python"):
        raise UsageError(f"backend={backend}: expected onnxruntime or python.")
    if backend == "onnxruntime":
        reason = _why_python(job) or ("tokens are streamed" if decoupled else None)
        if reason is not None:
            raise UsageError(
                f"The onnxruntime backend cannot hold {job.source}: {reason}. Pass --option "
                "backend=python, whose model carries the states itself."
            )
    folder = job.folder / job.name
    version = folder / "1"
    version.mkdir(parents=True)
    model, renamed = standalone(job)
    write.save_model(model, version)
    # From here on names are plain ones: they become paths, and text of the configuration.
    job = replace(job, manifest=rename_records(job.manifest, renamed))
    states = [State.from_record(s) for s in job.manifest.states]
    if backend == "python":
        _write_python(job, version, states, decoupled)
    else:
        _check_order(states)
        _write_starts(folder, states)
    (folder / "config.pbtxt").write_text("\n".join(_config(job, backend, states, decoupled)) + "\n")
    return Packaged(renamed, _notes(backend))


def _why_python(job: Packaging) -> str | None:
    """Return why the server itself cannot carry the states; None where it can."""
    for state in job.manifest.states:
        if state.grows is not None:
            return f"the state {state.past} grows with the tokens and begins empty"
        if isinstance(state.shape[0], int):
            return f"the state {state.past} is one of all sequences together"
    return None


def _notes(backend: str) -> tuple[str, ...]:
    runtime = environment.version("onnxruntime")
    if backend == "python":
        return (
            f"The server's Python needs numpy and onnxruntime {runtime}; see requirements.txt.",
        )
    return (
        f"Made for ONNX Runtime {runtime}. A server with an older one may lack kernels that target "
        "ort uses: convert with --target onnx for it.",
    )


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


def _config(
    job: Packaging, backend: str, states: Sequence[State], decoupled: bool
) -> Iterator[str]:
    """Yield the lines of config.pbtxt."""
    pasts, presents = {s.past for s in states}, {s.present for s in states}
    yield f'name: "{job.name}"'
    yield f'backend: "{backend}"'
    yield f"max_batch_size: {_number(job, 'max-batch', MAX_BATCH)}"
    inputs = [i for i in job.manifest.inputs if i.name not in pasts]
    outputs = [o for o in job.manifest.outputs if o.name not in presents]
    for record in inputs:
        optional = " optional: true" if record.default is not None else ""
        yield f"input [ {{ {_tensor(record)}{optional} }} ]"
    if decoupled:
        yield 'input [ { name: "MAX_TOKENS" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]'
        yield "model_transaction_policy { decoupled: true }"
    for result in outputs:
        yield f"output [ {{ {_tensor(result)} }} ]"
    if states:
        yield from _sequences(job, backend, states)
    else:
        yield "dynamic_batching { }"
    yield "instance_group [ { kind: KIND_CPU count: 1 } ]"
    if not states:
        yield from _warmup(inputs)


def _sequences(job: Packaging, backend: str, states: Sequence[State]) -> Iterator[str]:
    yield "sequence_batching {"
    yield f"  max_sequence_idle_microseconds: {_number(job, 'idle-seconds', IDLE_SECONDS)}000000"
    yield f"  oldest {{ max_candidate_sequences: {MAX_SEQUENCES} }}"
    if backend == "python":  # the graph of the other backend has no such inputs
        for name, kind, form in CONTROLS:
            yield f'  control_input [ {{ name: "{name}" control [ {{ kind: {kind} {form} }} ] }} ]'
    else:
        for state in states:
            yield from _state(state)
    yield "}"


def _state(state: State) -> Iterator[str]:
    kind, dims = TYPES[state.dtype], ", ".join(map(str, state.shape[1:]))
    start = "zero_data: true" if state.initial_value == 0 else f'data_file: "{state.past}"'
    yield "  state [ {"
    yield f'    input_name: "{state.past}" output_name: "{state.present}"'
    yield f"    data_type: {kind} dims: [ {dims} ]"
    yield f"    initial_state: {{ data_type: {kind} dims: [ {dims} ] {start}"
    yield f'      name: "{state.past}" }}'
    yield "  } ]"


def _tensor(record: TensorRecord) -> str:
    if record.dtype not in TYPES:
        raise UsageError(f"{record.name} is {record.dtype}; the server has {', '.join(TYPES)}.")
    if not record.shape or isinstance(record.shape[0], int):
        raise UsageError(
            f"{record.name} has the shape {list(record.shape)}; the server stacks requests along a "
            "dynamic first axis. Convert with a dynamic batch."
        )
    dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in record.shape[1:])
    shape = dims or "1"
    reshape = "" if dims else " reshape: { shape: [ ] }"
    return f'name: "{record.name}" data_type: {TYPES[record.dtype]} dims: [ {shape} ]{reshape}'


def _warmup(inputs: Sequence[TensorRecord]) -> Iterator[str]:
    """Yield one request of zeros, so that the first of a user does not wait for the model."""
    yield 'model_warmup [ { name: "zeros" batch_size: 1'
    for record in inputs:
        dims = ", ".join(str(d) if isinstance(d, int) else "1" for d in record.shape[1:]) or "1"
        yield f'  inputs {{ key: "{record.name}" value: {{ data_type: {TYPES[record.dtype]} ' + (
            f"dims: [ {dims} ] zero_data: true }} }}"
        )
    yield "} ]"


def _write_starts(folder: Path, states: Sequence[State]) -> None:
    """Write the states that do not begin with zero, where the server looks for them."""
    for state in states:
        if state.initial_value != 0:
            place = folder / "initial_state"
            place.mkdir(exist_ok=True)
            (place / state.past).write_bytes(np.ascontiguousarray(state.start(1)).tobytes())


def _write_python(job: Packaging, version: Path, states: Sequence[State], decoupled: bool) -> None:
    pasts, presents = {s.past for s in states}, {s.present for s in states}
    spec = {
        "model": MODEL,
        "idle_seconds": _number(job, "idle-seconds", IDLE_SECONDS),
        "decoupled": decoupled,
        "inputs": [
            {"name": i.name, "default": i.default}
            for i in job.manifest.inputs
            if i.name not in pasts
        ],
        "outputs": [o.name for o in job.manifest.outputs if o.name not in presents],
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
    runtime = environment.version("onnxruntime")
    (version.parent / "requirements.txt").write_text(f"numpy\nonnxruntime=={runtime}\n")


DESTINATION = Destination(
    "triton",
    "A model repository of NVIDIA Triton Inference Server, with sequences and their states.",
    _write,
    OPTIONS,
)
