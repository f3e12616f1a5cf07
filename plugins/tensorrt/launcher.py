"""Launching a described node on a GPU through the CUDA driver: no Triton, no runtime compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.plugins.kernels.launch import Kernel, Launch, LaunchPlan
from linexport.plugins.tensorrt.description import MULTIPROCESSORS, Binary, Description, aligned
from linexport.plugins.tensorrt.flavour import driver

SHARED = 48 * 1024
"""Bytes of shared memory a kernel gets without asking."""

LANES = 32
"""Threads of a warp."""


def checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call; a tuple where it has several, or none.

    Raises:
        EnvironmentProblemError: it failed; names CUDA's error.
    """
    error, *values = result
    if int(error):
        raise EnvironmentProblemError(f"The CUDA driver reports {error.name}.")
    return values[0] if len(values) == 1 else values


def capability() -> int:
    """Compute capability of the current context's GPU, times ten."""
    cuda = driver()
    device = checked(cuda.cuCtxGetDevice())
    kinds = cuda.CUdevice_attribute
    major, minor = (
        checked(cuda.cuDeviceGetAttribute(kind, device))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return int(10 * major + minor)


class Launcher:
    """The kernels of one node, loaded into the current CUDA context.

    Raises:
        EnvironmentProblemError: no driver, or the driver refuses a kernel.
        UsageError: the node has no kernels for this GPU.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.sm = description.sm_for(capability())
        self.plan: LaunchPlan = description.plans[self.sm]
        self._modules: list[Any] = []
        self.functions = {
            kernel.name: self._load(description.binaries[self.sm][kernel.name])
            for kernel in self.plan.kernels()
        }

    def close(self) -> None:
        """Unload the kernels; nothing can be launched afterwards."""
        while self._modules:
            checked(driver().cuModuleUnload(self._modules.pop()))

    def _load(self, binary: Binary) -> tuple[Any, int]:
        cuda = driver()
        module = checked(cuda.cuModuleLoadData(binary.code))
        self._modules.append(module)
        function = checked(cuda.cuModuleGetFunction(module, binary.entry.encode()))
        if binary.shared > SHARED:
            kind = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(cuda.cuFuncSetAttribute(function, kind, binary.shared))
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
        for launch, values in launches(self.description, self.sm, sizes, addresses, workspace):
            self._launch(launch, values, stream)

    def _launch(self, launch: tuple[Launch, Sequence[int]], values: Any, stream: int) -> None:
        cuda = driver()
        what, grid = launch
        function, shared = self.functions[what.kernel.name]
        handle = cuda.CUstream(stream)
        threads = LANES * what.kernel.warps
        checked(cuda.cuLaunchKernel(function, *grid, threads, 1, 1, shared, handle, values, 0))


def launches(
    description: Description,
    sm: int,
    sizes: Mapping[str, int],
    addresses: Sequence[int],
    workspace: int,
) -> list[tuple[tuple[Launch, Sequence[int]], Any]]:
    """Every launch with its grid, and its arguments as values and their C types."""
    plan = description.plans[sm]
    batch, length = sizes["batch"], sizes["length"]
    route = plan.route(batch, length, MULTIPROCESSORS[sm])
    known: dict[str, int] = dict(plan.symbols(batch, length, MULTIPROCESSORS[sm]))
    for tensor, address in zip(description.tensors, addresses, strict=True):
        if tensor is not None:
            known[tensor.name] = address
    place = workspace
    for buffer in route.scratch:
        known[buffer.name] = place
        place += aligned(buffer.bytes(known))
    found: list[tuple[tuple[Launch, Sequence[int]], Any]] = []
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
