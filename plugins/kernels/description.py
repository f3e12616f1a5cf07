"""Description of a node for its plugin: data, in two attributes of the node.

    launch     JSON: the tensors with their types and shapes, and for each compute capability the
               plan of launches (``plugins.kernels.launch``)
    binaries   the kernels of those plans, compiled ahead of time: base64, since attributes of type
               string are cut at a zero byte on some of their ways

A plugin class therefore needs no op, no ONNX and no compiler, and one class, in Python or in C++,
serves every op. Engines and models carry both: nothing is looked up when one is opened.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from linexport.errors import OpError, UnsupportedModelError, UsageError
from linexport.plugins.kernels.architectures import (
    ARCHITECTURES,
    FIRST,
    NO_TENSOR_CORES,
    runs_on,
)
from linexport.plugins.kernels.launch import (
    LEAST_CHUNKS,
    Extent,
    Kernel,
    Launch,
    LaunchPlan,
    Route,
    Scratch,
)
from linexport.system.json_object import JsonObject

FORMAT = 2
ALIGNMENT = 256
"""Alignment of buffers in a workspace, in bytes."""

LAUNCH, BINARIES = "launch", "binaries"
ROUTES = ("single", "segmented", "decode")

MULTIPROCESSORS = {sm: one.multiprocessors for sm, one in ARCHITECTURES.items()}
"""How many multiprocessors long sequences are cut into segments for, at most."""


def carried_by(node: Any) -> bool:
    """Return whether an ``onnx.NodeProto`` has a description among its attributes."""
    return any(attribute.name == LAUNCH for attribute in node.attribute)


@dataclass(frozen=True)
class TensorDescription:
    """An input or output: formal name, element type as in ``launch.BYTES``, and shape.

    Sizes are numbers, or "batch" and "length".
    """

    name: str
    type: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: its cubin, the name of its function, and its shared memory in bytes.

    Of a quick description, the code is PTX.
    """

    code: bytes
    entry: str
    shared: int


@dataclass(frozen=True)
class Description:
    """One node, ready to be launched.

    Attributes:
        op_type: its op, for messages.
        inputs: by position; None where the node has none and the tensor given means nothing.
        outputs: by position.
        plans: by compute capability.
        binaries: by compute capability and name of the kernel.
        quick: of a quickly deployable plugin; see ``quick``.
    """

    op_type: str
    inputs: tuple[TensorDescription | None, ...]
    outputs: tuple[TensorDescription, ...]
    plans: Mapping[int, LaunchPlan]
    binaries: Mapping[int, Mapping[str, Binary]]
    quick: bool = False

    @property
    def tensors(self) -> tuple[TensorDescription | None, ...]:
        """Inputs, then outputs: the order in which TensorRT counts them."""
        return (*self.inputs, *self.outputs)

    def only(self, sm: int) -> Description:
        """Without the plans and binaries of other compute capabilities."""
        return replace(self, plans={sm: self.plans[sm]}, binaries={sm: self.binaries[sm]})

    def sm_for(self, sm: int) -> int:
        """The compute capability whose binaries a GPU of capability ``sm`` runs.

        Raises:
            UsageError: there are none.
        """
        return compatible(sm, tuple(self.plans))

    def sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Batch and length, from the shapes of the inputs.

        Raises:
            OpError: a shape is not the one described.
        """
        found: dict[str, int] = {}
        for tensor, shape in zip(self.inputs, shapes, strict=True):
            if tensor is None:
                continue
            fits = len(shape) == len(tensor.shape) and all(
                size == (found.setdefault(known, size) if isinstance(known, str) else known)
                for size, known in zip(shape, tensor.shape, strict=True)
            )
            if not fits:
                raise OpError(
                    f"{self.op_type}: {tensor.name} has shape {tuple(shape)}; expected "
                    f"({', '.join(map(str, tensor.shape))})" + _bound(found) + "."
                )
        return {name: found.get(name, 1) for name in ("batch", "length")}

    def scratch(self, sm: int, batch: int, length: int) -> int:
        """Bytes of scratch memory that are enough for any batch and length up to these.

        The number of segments does not always grow with the length; its limit does.
        """
        plan, most = self.plans[sm], 0
        blocks = plan.resident * MULTIPROCESSORS[sm]
        for rows in range(1, batch + 1):
            values = plan.symbols(rows, length, MULTIPROCESSORS[sm])
            limit = min(blocks // (rows * plan.blocks), values["chunks"] // LEAST_CHUNKS)
            values["segments"] = max(limit, 1)
            for route in (plan.single, plan.segmented, plan.decode):
                buffers = route.scratch if route else ()
                most = max(most, sum(aligned(b.bytes(values)) for b in buffers))
        return most

    def attributes(self) -> dict[str, str]:
        """Return the description as attributes of the node."""
        binaries = {
            str(sm): {
                name: {**asdict(b), "code": base64.b64encode(b.code).decode()}
                for name, b in kernels.items()
            }
            for sm, kernels in self.binaries.items()
        }
        launch = {
            "format": FORMAT,
            "quick": self.quick,
            "op_type": self.op_type,
            "inputs": [x and asdict(x) for x in self.inputs],
            "outputs": [asdict(x) for x in self.outputs],
            "plans": {str(sm): _plan_json(plan, sm) for sm, plan in self.plans.items()},
        }
        return {
            LAUNCH: json.dumps(launch, separators=(",", ":")),
            BINARIES: json.dumps(binaries, separators=(",", ":")),
        }

    @classmethod
    def from_attributes(cls, attributes: JsonObject) -> Description:
        """The inverse of ``attributes``.

        Raises:
            UnsupportedModelError: not made by this version of linexport.
        """
        try:
            launch = json.loads(attributes[LAUNCH])
            binaries = json.loads(attributes[BINARIES])
            if launch["format"] != FORMAT:
                raise ValueError(f"format {launch['format']}, expected {FORMAT}")
            return cls(
                launch["op_type"],
                tuple(x and _tensor(x) for x in launch["inputs"]),
                tuple(_tensor(x) for x in launch["outputs"]),
                {int(sm): _plan(value) for sm, value in launch["plans"].items()},
                {
                    int(sm): {
                        name: Binary(base64.b64decode(b["code"]), b["entry"], b["shared"])
                        for name, b in kernels.items()
                    }
                    for sm, kernels in binaries.items()
                },
                bool(launch["quick"]),
            )
        except (*_DAMAGE, RecursionError) as error:
            raise UnsupportedModelError(
                f"A node of the linexport domain lacks a description of its kernels that this "
                f"version of linexport reads ({error!r}). Convert the model again with a TensorRT "
                "target."
            ) from None


_DAMAGE = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of values that are not of the form that is read."""


def aligned(size: int) -> int:
    """``size`` rounded up to where the next buffer in a workspace may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def compatible(sm: int, known: Sequence[int]) -> int:
    """Return the best compute capability in ``known`` whose binaries run on ``sm``.

    See ``runs_on`` for which do.

    Raises:
        UsageError: there is none.
    """
    able = [k for k in known if runs_on(k, sm)]
    if not able:
        why = f" ({NO_TENSOR_CORES})" if sm < FIRST else ""
        raise UsageError(
            f"There are no kernels for compute capability {sm / 10:.1f}{why}; there are for "
            f"{', '.join(f'{k / 10:.1f}' for k in sorted(known))}. For "
            "other GPUs: --target ort-cuda without --sm, or --target tensorrt --no-plugins."
        )
    return max(able)


def _bound(found: Mapping[str, int]) -> str:
    known = ", ".join(f"{name} {size}" for name, size in found.items())
    return f" with {known}" if known else ""


def _tensor(value: JsonObject) -> TensorDescription:
    return TensorDescription(value["name"], value["type"], tuple(value["shape"]))


def _plan_json(plan: LaunchPlan, sm: int) -> JsonObject:
    """The plan, with the name of each kernel."""

    def named(value: object) -> Any:
        if isinstance(value, Kernel):
            return {"name": value.name, **asdict(value)}
        if is_dataclass(value):
            return {f.name: named(getattr(value, f.name)) for f in fields(value)}
        return [named(x) for x in value] if isinstance(value, tuple) else value

    return {"multiprocessors": MULTIPROCESSORS[sm], **named(plan)}


def _plan(value: JsonObject) -> LaunchPlan:
    single, segmented, decode = (value[name] and _route(value[name]) for name in ROUTES)
    assert single is not None
    return LaunchPlan(
        single=single,
        segmented=segmented,
        decode=decode,
        decode_length=int(value["decode_length"]),
        chunk=int(value["chunk"]),
        blocks=int(value["blocks"]),
        resident=int(value["resident"]),
        in_place=tuple(value["in_place"]),
    )


def _route(value: JsonObject) -> Route:
    launches = [
        Launch(Kernel.from_json(x["kernel"]), tuple(_extent(e) for e in x["grid"]))  # type: ignore[arg-type]
        for x in value["launches"]
    ]
    scratch = [Scratch(x["name"], x["type"], _extent(x["elements"])) for x in value["scratch"]]
    return Route(tuple(launches), tuple(scratch))


def _extent(value: JsonObject) -> Extent:
    return Extent(int(value["factor"]), tuple(value["symbols"]))
