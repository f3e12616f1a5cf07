"""One node on a GPU as a plugin plays it: launched by Python and by C++, captured, in place."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu.case import DTYPES, Case
from gpu.device import Device, Memory
from linexport.errors import EnvironmentProblemError
from linexport.plugins.kernels.description import Description, TensorDescription
from linexport.plugins.tensorrt.launcher import Launcher

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Relative, in the Euclidean norm. Looser than in the interpreter by the rounding of tensor cores'
operands, which it does not have."""

ELEMENTS = {
    "fp32": DTYPES["float32"],
    "fp16": DTYPES["float16"],
    "bf16": DTYPES["bfloat16"],
    "i8": np.dtype(np.int8),
}

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class CompiledPlugin:
    """The plugin in C++ of one node, through TensorRT's interfaces, with the call of ``Launcher``.

    Raises:
        EnvironmentProblemError: the driver refuses a kernel or a launch.
    """

    library: ctypes.CDLL
    opened: int

    @classmethod
    def open(cls, library: Path, description: Description) -> CompiledPlugin:
        """Build it, write it, open it and attach it, which loads the kernels."""
        found = ctypes.CDLL(str(library))
        found.linexport_open.restype = ctypes.c_void_p
        found.linexport_scratch.restype = ctypes.c_int64
        text = ctypes.create_string_buffer(1000)
        attributes = [value.encode() for value in description.attributes().values()]
        opened = found.linexport_open(*attributes, text, ctypes.c_size_t(len(text)))
        if not opened:
            raise EnvironmentProblemError(text.value.decode())
        return cls(found, opened)

    def scratch(self, batch: int, length: int) -> int:
        """Bytes of workspace that it asks for where these are the largest sizes."""
        sizes, text = map(ctypes.c_int64, (batch, length)), ctypes.create_string_buffer(1000)
        found = self.library.linexport_scratch(
            ctypes.c_void_p(self.opened), *sizes, text, ctypes.c_size_t(len(text))
        )
        if found < 0:
            raise EnvironmentProblemError(text.value.decode())
        return int(found)

    def enqueue(
        self, shapes: list[tuple[int, ...]], addresses: list[int], workspace: int, stream: int
    ) -> None:
        """See ``Launcher.enqueue``."""
        text = ctypes.create_string_buffer(1000)
        flat, ranks = list(itertools.chain(*shapes)), [len(shape) for shape in shapes]
        failed = self.library.linexport_enqueue(
            ctypes.c_void_p(self.opened),
            (ctypes.c_int64 * len(flat))(*flat),
            (ctypes.c_int * len(ranks))(*ranks),
            len(ranks),
            (ctypes.c_void_p * len(addresses))(*addresses),
            len(addresses),
            ctypes.c_void_p(workspace),
            ctypes.c_void_p(stream),
            text,
            ctypes.c_size_t(len(text)),
        )
        if failed:
            raise EnvironmentProblemError(text.value.decode())

    def close(self) -> None:
        """Unload the kernels."""
        self.library.linexport_close(ctypes.c_void_p(self.opened))


class Played:
    """A node with memory for its inputs, outputs and scratch."""

    def __init__(
        self, description: Description, device: Device, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.description, self.device = description, device
        self.shapes = [tuple(shapes[t.name]) if t else () for t in description.inputs]
        self.sizes = description.sizes(self.shapes)
        self.inputs = {t.name: Memory(self._bytes(t)) for t in description.inputs if t is not None}
        self.outputs = {t.name: Memory(self._bytes(t)) for t in description.outputs}
        self.sm = description.sm_for(device.sm)
        self.plan = description.plans[self.sm]
        self.workspace = Memory(description.scratch(self.sm, *self.sizes.values()))

    def put(self, given: Mapping[str, np.ndarray]) -> None:
        """Fill the inputs, and make what is to be written NaN."""
        for name, x in given.items():
            self.inputs[name].put(x)
        for memory in (*self.outputs.values(), self.workspace):
            memory.poison()

    def enqueue(self, launcher: Any, in_place: bool = False) -> None:
        """Launch the node once; states over their past where that is asked for and allowed."""
        places = dict(self.outputs)
        if in_place:
            for name in self.plan.in_place:
                places[name] = self.inputs[name.replace("present", "past")]
        places |= self.inputs
        addresses = [places[t.name].address if t else 0 for t in self.description.tensors]
        stream = int(self.device.stream)
        launcher.enqueue(self.shapes, addresses, self.workspace.address, stream)

    def results(self, in_place: bool = False) -> Arrays:
        """Return what the outputs hold."""
        self.device.wait()
        found = {}
        for tensor in self.description.outputs:
            memory = self.outputs[tensor.name]
            if in_place and tensor.name in self.plan.in_place:
                memory = self.inputs[tensor.name.replace("present", "past")]
            found[tensor.name] = memory.get(self._shape(tensor), ELEMENTS[tensor.type])
        return found

    def free(self) -> None:
        """Give all memory back."""
        for memory in (*self.inputs.values(), *self.outputs.values(), self.workspace):
            memory.free()

    def _shape(self, tensor: TensorDescription) -> tuple[int, ...]:
        return tuple(self.sizes[n] if isinstance(n, str) else n for n in tensor.shape)

    def _bytes(self, tensor: TensorDescription) -> int:
        return int(np.prod(self._shape(tensor))) * ELEMENTS[tensor.type].itemsize


def expected(case: Case) -> tuple[Arrays, Arrays]:
    """Return inputs of a small case, and the oracle's results."""
    given = case.inputs()
    return given, case.wanted(given)


def check(
    case: Case,
    given: Arrays,
    wanted: Arrays,
    description: Description,
    device: Device,
    library: Path,
) -> dict[str, Any]:
    """Play a small case; return its errors, and what was not as it has to be."""
    faults = []
    played = Played(description, device, case.shapes())
    python = Launcher(description)
    compiled = CompiledPlugin.open(library, description)
    most = description.scratch(played.sm, *played.sizes.values())
    if compiled.scratch(*played.sizes.values()) < most:
        faults.append("C++ plans less scratch memory than Python")

    # The first launch there is, captured: what is loaded late would fail here.
    played.put(given)
    graph = device.captured(lambda: played.enqueue(python))
    graph.replay()
    found = played.results()
    errors = {name: relative(found[name], want) for name, want in wanted.items()}
    faults += [
        f"{name} has an error of {e:.1e}" if math.isfinite(e) else f"{name} has values not written"
        for name, e in errors.items()
        if not e <= TOLERANCE[case.dtype]
    ]
    graphs = [graph]
    for title, launcher, in_place in (
        ("launched again", python, False),
        ("captured from the plugin in C++", compiled, False),
        ("in place", python, True),
        ("in place by C++", compiled, True),
    ):
        played.put(given)
        if launcher is compiled and not in_place:  # the first launch that this object makes
            graphs.append(device.captured(partial(played.enqueue, compiled)))
            graphs[-1].replay()
        else:
            played.enqueue(launcher, in_place)
        again = played.results(in_place)
        faults += [
            f"{n} differs, {title}" for n in wanted if again[n].tobytes() != found[n].tobytes()
        ]
    for graph in graphs:
        graph.free()
    played.free()
    past = {name: given[name] for name in case.states()}
    launchers = {"": python, " by C++": compiled}
    faults += _without_tokens(case, past, description, device, launchers)
    compiled.close()
    python.close()
    return {"case": case.name, "dtype": case.dtype, "errors": errors, "faults": faults}


def _without_tokens(
    case: Case,
    past: Arrays,
    description: Description,
    device: Device,
    launchers: Mapping[str, Any],
) -> list[str]:
    """Return what is wrong with the states after no token: they are the past ones, bit for bit."""
    named = {t.name: t.shape for t in description.inputs if t is not None}
    shapes = {
        name: tuple(
            0 if known == "length" else size for size, known in zip(s, named[name], strict=True)
        )
        for name, s in case.shapes().items()
    }
    states = case.states()
    played, faults = Played(description, device, shapes), []
    for title, launcher in launchers.items():
        played.put(past)
        played.enqueue(launcher)
        found = played.results()
        faults += [
            f"{name} is not its past after no token{title}"
            for name, x in past.items()
            if found[states[name]].tobytes() != x.tobytes()
        ]
    played.free()
    return faults


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Error in the Euclidean norm over that of what is wanted; infinite where there are NaN.

    Where nothing but zeros is wanted it is not relative.
    """
    scale = np.linalg.norm(wanted) or 1.0
    error = float(np.linalg.norm(np.float64(found) - wanted) / scale)
    return math.inf if math.isnan(error) else error
