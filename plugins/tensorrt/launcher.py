"""Launching a described node on a GPU through the CUDA driver: no Triton, no runtime compiler."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from linexport.plugins.kernels.description import MULTIPROCESSORS, Binary, Description, aligned
from linexport.plugins.kernels.launch import Kernel, Launch, LaunchPlan
from linexport.plugins.tensorrt.flavour import driver
from linexport.plugins.tensorrt.modules import Modules, checked

SHARED = 48 * 1024
"""Bytes of shared memory a kernel gets without asking."""

LANES = 32
"""Threads of a warp."""


def capability() -> int:
    """Compute capability of the current context's GPU, times ten."""
    return 10 * _attribute("COMPUTE_CAPABILITY_MAJOR") + _attribute("COMPUTE_CAPABILITY_MINOR")


def multiprocessors(sm: int) -> int:
    """Return the multiprocessors of the current context's GPU that a plan for ``sm`` counts on.

    No more than the plan was made for: its scratch memory is enough for those.
    """
    return min(_attribute("MULTIPROCESSOR_COUNT"), MULTIPROCESSORS[sm])


def _attribute(name: str) -> int:
    cuda = driver()
    kind = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(checked(cuda.cuDeviceGetAttribute(kind, checked(cuda.cuCtxGetDevice()))))


class Launcher:
    """The kernels of one node, loaded into the current CUDA context.

    Raises:
        EnvironmentProblemError: no driver, or the driver refuses a kernel.
        UsageError: the node has no kernels for this GPU.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.sm = description.sm_for(capability())
        self.multiprocessors = multiprocessors(self.sm)
        self.plan: LaunchPlan = description.plans[self.sm]
        self._modules = Modules()
        # TensorRT tells a plugin in Python nothing when it drops it.
        self._closing = weakref.finalize(self, self._modules.close)
        self._closing.atexit = False
        self.functions = {
            kernel.name: self._load(description.binaries[self.sm][kernel.name])
            for kernel in self.plan.kernels()
        }

    def close(self) -> None:
        """Unload the kernels; nothing can be launched afterwards."""
        self._closing()

    def _load(self, binary: Binary) -> tuple[Any, int]:
        cuda = driver()
        module = self._modules.load(binary.code)
        function = checked(cuda.cuModuleGetFunction(module, binary.entry.encode()))
        if binary.shared > SHARED:
            kind = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(cuda.cuFuncSetAttribute(function, kind, binary.shared))
        # Otherwise at the first launch, which a graph may capture; drivers before 12.4 lack it.
        with suppress(RuntimeError):
            checked(cuda.cuFuncLoad(function))
        return function, binary.shared

    def enqueue(
        self,
        shapes: Sequence[Sequence[int]],
        addresses: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch on ``stream``; ``addresses`` are those of the inputs, then of the outputs.

        Raises:
            OpError: a shape is not the one the node was described with.
            EnvironmentProblemError: the driver refuses a launch.
        """
        sizes = self.description.sizes(shapes)
        found = launches(
            self.description, self.sm, self.multiprocessors, sizes, addresses, workspace
        )
        for launch, values in found:
            self._launch(launch, values, stream)

    def _launch(self, launch: tuple[Launch, Sequence[int]], values: object, stream: int) -> None:
        cuda = driver()
        what, grid = launch
        function, shared = self.functions[what.kernel.name]
        handle = cuda.CUstream(stream)
        threads = LANES * what.kernel.warps
        checked(cuda.cuLaunchKernel(function, *grid, threads, 1, 1, shared, handle, values, 0))


def launches(
    description: Description,
    sm: int,
    multiprocessors: int,
    sizes: Mapping[str, int],
    addresses: Sequence[int],
    workspace: int,
) -> list[tuple[tuple[Launch, Sequence[int]], object]]:
    """Every launch with its grid, and its arguments as values and their C types."""
    plan = description.plans[sm]
    batch, length = sizes["batch"], sizes["length"]
    route = plan.route(batch, length, multiprocessors)
    known: dict[str, int] = dict(plan.symbols(batch, length, multiprocessors))
    for tensor, address in zip(description.tensors, addresses, strict=True):
        if tensor is not None:
            known[tensor.name] = address
    place = workspace
    for buffer in route.scratch:
        known[buffer.name] = place
        place += aligned(buffer.bytes(known))
    found: list[tuple[tuple[Launch, Sequence[int]], object]] = []
    for launch in route.launches:
        grid = [extent.of(known) for extent in launch.grid]
        if all(grid):
            found.append(((launch, grid), arguments(launch.kernel, known)))
    return found


def arguments(kernel: Kernel, known: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Values and C types of a kernel's arguments, the two trailing null pointers included."""
    values = tuple(known[a.name] for a in kernel.arguments)
    types = tuple(ctypes.c_void_p if a.is_pointer else ctypes.c_int32 for a in kernel.arguments)
    return (*values, 0, 0), (*types, ctypes.c_void_p, ctypes.c_void_p)
