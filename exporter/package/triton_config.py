"""Lines of Triton's ``config.pbtxt``: what comes in, what goes out, how sequences are batched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from linexport.errors import UsageError
from linexport.graph.states import State
from linexport.manifest.records import InputRecord, TensorRecord
from linexport.package.destination import Packaging
from linexport.system.escape import protobuf_string

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
CPU = "instance_group [ { kind: KIND_CPU count: 1 } ]"
MAX_SEQUENCES = 128


def config(
    job: Packaging,
    backend: str,
    states: Sequence[State],
    most: int,
    idle: int,
    decoupled: bool = False,
) -> Iterator[str]:
    """Yield all lines but those of the place where it runs.

    Args:
        job: the artifact.
        backend: that runs it.
        states: of the artifact.
        most: sequences of one call.
        idle: seconds after which a sequence without a request ends.
        decoupled: a request may have several answers.

    Raises:
        UsageError: an input or output that the server does not have.
    """
    yield f"name: {protobuf_string(job.name)}"
    yield f"backend: {protobuf_string(backend)}"
    yield f"max_batch_size: {most}"
    for record in own_inputs(job):
        optional = " optional: true" if record.default is not None and backend != "tensorrt" else ""
        yield f"input [ {{ {_tensor(record)}{optional} }} ]"
    if decoupled:
        yield 'input [ { name: "MAX_TOKENS" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]'
        yield "model_transaction_policy { decoupled: true }"
    for result in own_outputs(job):
        yield f"output [ {{ {_tensor(result)} }} ]"
    if states:
        yield from _sequences(backend, states, idle)
    else:
        yield "dynamic_batching { }"


def _sequences(backend: str, states: Sequence[State], idle: int) -> Iterator[str]:
    yield "sequence_batching {"
    yield f"  max_sequence_idle_microseconds: {idle}000000"
    yield f"  oldest {{ max_candidate_sequences: {MAX_SEQUENCES} }}"
    if backend == "python":  # the graphs of the others have no such inputs
        for name, kind, form in CONTROLS:
            yield f'  control_input [ {{ name: "{name}" control [ {{ kind: {kind} {form} }} ] }} ]'
    else:
        for state in states:
            yield from _state(state)
    yield "}"


def _state(state: State) -> Iterator[str]:
    kind, dims = TYPES[state.dtype], ", ".join(map(str, state.shape[1:]))
    past, present = protobuf_string(state.past), protobuf_string(state.present)
    start = "zero_data: true" if state.initial_value == 0 else f"data_file: {past}"
    yield "  state [ {"
    yield f"    input_name: {past} output_name: {present}"
    yield f"    data_type: {kind} dims: [ {dims} ]"
    yield f"    initial_state: {{ data_type: {kind} dims: [ {dims} ] {start}"
    yield f"      name: {past} }}"
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
    name = protobuf_string(record.name)
    return f"name: {name} data_type: {TYPES[record.dtype]} dims: [ {shape} ]{reshape}"


def warmup(inputs: Sequence[TensorRecord]) -> Iterator[str]:
    """Yield one request of zeros, so that the first of a user does not wait for the model."""
    yield 'model_warmup [ { name: "zeros" batch_size: 1'
    for record in inputs:
        dims = ", ".join(str(d) if isinstance(d, int) else "1" for d in record.shape[1:]) or "1"
        value = f"{{ data_type: {TYPES[record.dtype]} dims: [ {dims} ] zero_data: true }}"
        yield f"  inputs {{ key: {protobuf_string(record.name)} value: {value} }}"
    yield "} ]"


def own_inputs(job: Packaging) -> list[InputRecord]:
    """Return the inputs that are no states."""
    pasts = {s.past for s in job.manifest.states}
    return [i for i in job.manifest.inputs if i.name not in pasts]


def own_outputs(job: Packaging) -> list[TensorRecord]:
    """Return the outputs that are no states."""
    presents = {s.present for s in job.manifest.states}
    return [o for o in job.manifest.outputs if o.name not in presents]
