"""Memory of a model on a device and the bound on its speed, by target and kind of weights.

    memory      weights + states + keys and values + scratch + runtime; on a CPU, that of opening
                the model where it is more
    a step      reads the weights once for all rows, states twice (read and written), and the keys
                and values of every row
    tokens/s    rows x bandwidth / bytes of a step, at most

A model without states reads a whole sequence in one call, which reads the weights once: its bound
is one of sequences.

Scratch is what a call holds at its worst moment, its outputs and the new states among them.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.artifact.write import EXTERNAL_ABOVE
from linexport.planning.device import PlannedDevice
from linexport.planning.planned_model import PlannedModel
from linexport.planning.weights import KINDS, Kind, bytes_read, size
from linexport.plugins.kernels.architectures import ARCHITECTURES, NO_TENSOR_CORES, TEGRA, runs_on
from linexport.plugins.tensorrt.flavour import RTX
from linexport.quantization.by_target import FORMS, FP8, LEAST_SM

CPU, CUDA, RTX_TARGET, TENSORRT = "ort", "ort-cuda", "tensorrt-rtx", "tensorrt"

PROMPT_TOKENS = 64
"""Tokens of a prompt in one call, as pools and the server feed them."""

RUNTIME = {CPU: 100 * 2**20, CUDA: 500 * 2**20, TENSORRT: 300 * 2**20, RTX_TARGET: 300 * 2**20}
"""Bytes of a target's libraries, beside the context. Measured for the CPU, assumed for others."""

INSIDE, INSIDE_OPENING = 2, 4
"""Copies of weights that are inside of model.onnx, once it is open on a CPU and while it is opened,
as ``tools/bench_plan.py`` measured them. Of weights in a file beside it there is one, and while it
is opened a second one of the largest. Weights in fp16 become float32 ones besides, twice while the
model is opened."""


@dataclass(frozen=True)
class DeviceRow:
    """A target and a kind of weights on a device.

    Attributes:
        target: of linexport.
        weights: how they are stored.
        weight_bytes: of all weights.
        memory_bytes: of everything, at its most.
        fits: there is so much on the device.
        step_bytes: that a step, or a call without states, reads and writes at least.
        tokens_per_second: of all rows together, at most; None without states.
        sequences_per_second: the same of a model without states; None of others, and where nothing
            is read.
        artifact: it is the artifact that is planned with; its weights have their exact size.
    """

    target: str
    weights: Kind
    weight_bytes: int
    memory_bytes: int
    fits: bool
    step_bytes: int
    tokens_per_second: float | None
    sequences_per_second: float | None
    artifact: bool


@dataclass(frozen=True)
class DevicePlan:
    """A model on a device.

    Attributes:
        model: one line for people.
        device: the same.
        compute_capability: times ten; None for a CPU.
        device_bytes: its memory.
        usable_bytes: that a model may take.
        bandwidth: bytes a second.
        context: tokens of a sequence.
        batch: sequences.
        streams: see ``PlannedModel``.
        state_bytes: of all sequences, states of a fixed size.
        key_value_bytes: of all sequences at the context, and whatever else grows, as the model has
            them; rows of ``ort-cuda`` count half as much with weights in fp16 or fewer bits.
        scratch_bytes: of a step, or of a piece of a prompt; of a call without states.
        prompt_bytes: of a prompt as long as the context in one call, of one sequence.
        rows: by target and kind of weights.
        warnings: what the user should know.
    """

    model: str
    device: str
    compute_capability: int | None
    device_bytes: int
    usable_bytes: int
    bandwidth: float
    context: int
    batch: int
    streams: bool
    state_bytes: int
    key_value_bytes: int
    scratch_bytes: int
    prompt_bytes: int
    rows: tuple[DeviceRow, ...]
    warnings: tuple[str, ...] = ()


def estimate(model: PlannedModel, device: PlannedDevice, context: int, batch: int) -> DevicePlan:
    """Return the plan of a model on a device.

    Args:
        model: see ``PlannedModel``.
        device: see ``PlannedDevice``.
        context: tokens of each sequence, prompt and answer together.
        batch: sequences at once.
    """
    pieces = (1, min(PROMPT_TOKENS, context)) if model.streams else (context,)
    scratch = max(model.scratch(batch, piece, context - piece) for piece in pieces)
    states, growing = batch * model.state_bytes, batch * context * model.token_bytes
    held, moved = states + scratch, 2 * states
    targets, warnings = _targets(device)
    return DevicePlan(
        model.description,
        device.title,
        device.gpu.sm if device.gpu else None,
        device.memory,
        device.usable,
        device.bandwidth,
        context,
        batch,
        model.streams,
        states,
        growing,
        scratch,
        model.scratch(1, context, 0),
        tuple(
            _row(model, device, target, kind, (held, moved, growing), batch)
            for target in targets
            for kind in _kinds(target, device)
        ),
        tuple(warnings),
    )


def _targets(device: PlannedDevice) -> tuple[list[str], list[str]]:
    """Return the targets for a device, and what the user should know of them."""
    if device.gpu is None:
        return [CPU], []
    sm = device.gpu.sm
    if not any(runs_on(known, sm) for known in ARCHITECTURES):
        return [CUDA], [
            f"{device.title}: linexport has no kernels for compute capability {sm / 10:.1f} "
            f"({NO_TENSOR_CORES}), and no engine. Left is --target ort-cuda without --sm."
        ]
    engines = [TENSORRT] if sm not in RTX.sms else [RTX_TARGET, TENSORRT]
    unified = ["The CPU and the GPU share this memory."] if sm in TEGRA else []
    return [CUDA, *engines], unified


def _kinds(target: str, device: PlannedDevice) -> tuple[Kind, ...]:
    """Return the kinds of weights that a target has on a device."""
    has_fp8 = FP8 in FORMS[target].choices and device.gpu and device.gpu.sm >= LEAST_SM[FP8]
    return (*KINDS, "fp8") if has_fp8 else KINDS


def _row(
    model: PlannedModel,
    device: PlannedDevice,
    target: str,
    kind: Kind,
    values: tuple[int, int, int],
    batch: int,
) -> DeviceRow:
    """Return a row.

    Args:
        model: see ``PlannedModel``.
        device: that it is planned for.
        target: of the row.
        kind: of its weights.
        values: bytes that calls hold and that a step moves besides weights, without keys and
            values, and bytes of these as the model has them.
        batch: sequences.
    """
    own = model.target == target and model.kind == kind
    stored = model.stored_bytes if own and model.stored_bytes is not None else None
    weights = size(model.weights, kind, target) if stored is None else stored
    keys = round(
        values[2] * (1 if own else _key_bytes(target, kind) / (2 if model.half_keys else 4))
    )
    held, moved = values[0] + keys, values[1] + keys
    computed = _computed(target, kind)
    memory = RUNTIME[target] + weights + held
    if target == CPU:
        memory = RUNTIME[CPU] + _on_cpu(model, kind, weights, held)
    step = round(bytes_read(model.weights, computed, batch, target)) + moved
    bound = batch * device.bandwidth / step if step else None
    return DeviceRow(
        target,
        kind,
        weights,
        memory,
        memory <= device.usable,
        step,
        bound if model.streams else None,
        None if model.streams else bound,
        own,
    )


def _key_bytes(target: str, kind: Kind) -> int:
    """Return the bytes of a number of keys and values: with ``--precision fp16`` 2 on a GPU.

    Engines of TensorRT keep them in float32.
    """
    return 2 if target == CUDA and kind != "float32" else 4


def _computed(target: str, kind: Kind) -> Kind:
    """Return the kind of weights that a step reads: on a CPU, fp16 is computed with in float32."""
    return "float32" if target == CPU and kind == "fp16" else kind


def _on_cpu(model: PlannedModel, kind: Kind, weights: int, held: int) -> int:
    """Return the bytes of weights and calls at most, while a model is opened or after."""
    largest = max((weight.size(kind) for weight in model.weights), default=0)
    if _computed(CPU, kind) != kind:
        floats = size(model.weights, "float32")
        return weights + max(floats + held, 2 * floats)
    if weights <= EXTERNAL_ABOVE:
        return max(INSIDE * weights + held, INSIDE_OPENING * weights)
    return weights + max(largest, held)
