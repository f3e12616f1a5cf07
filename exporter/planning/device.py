"""The device that a model is planned for: a GPU of the table, or figures given by hand.

    memory for a model = memory - what the system and the runtime's context take

A computer that shares its memory with its GPU has an operating system in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.errors import UsageError
from linexport.system.gpus import Gpu, find_gpu
from linexport.system.room import GIB

RESERVED, RESERVED_UNIFIED = 1 * GIB, 2 * GIB
"""Bytes that CUDA's context and a desktop take of a GPU's memory, and those with the operating
system where both share one memory. Assumed, and not measured on each device."""


@dataclass(frozen=True)
class PlannedDevice:
    """A device.

    Attributes:
        title: for people.
        memory: bytes.
        usable: bytes of them for a model.
        bandwidth: bytes a second.
        gpu: of the table; None for a CPU.
    """

    title: str
    memory: int
    usable: int
    bandwidth: float
    gpu: Gpu | None = None


def chosen_device(name: str | None, memory: float | None, bandwidth: float | None) -> PlannedDevice:
    """Return the device of a name, or one of so much memory and bandwidth.

    Args:
        name: of a GPU; None for a CPU, or a device that the table does not have.
        memory: GiB; in place of the table's.
        bandwidth: GB/s; in place of the table's.

    Raises:
        UsageError: the name is unknown, or there is neither a name nor both numbers.
    """
    if name is None:
        if memory is None or bandwidth is None:
            raise UsageError(
                "No device is named. Expected --device with a GPU's name, such as orin-nano, or "
                "--memory in GiB and --bandwidth in GB/s of a CPU or another device."
            )
        size = int(memory * GIB)
        return PlannedDevice("a device by hand", size, size, bandwidth * 1e9)
    gpu = find_gpu(name)
    size = int((memory or gpu.memory) * GIB)
    reserved = RESERVED_UNIFIED if gpu.unified else RESERVED
    usable = max(size - reserved, 0)
    return PlannedDevice(gpu.title, size, usable, (bandwidth or gpu.bandwidth) * 1e9, gpu)
