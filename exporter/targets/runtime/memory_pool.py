"""Pool of device memory: a freed block serves again for requests not larger than it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from linexport.errors import EnvironmentProblemError


class Blocks:
    """Blocks of a device's memory.

    Args:
        take: returns the address of that many bytes of new memory.
        give: gives a block back to the device.
        wait: waits until nothing uses what was given back here.
    """

    def __init__(
        self, take: Callable[[int], int], give: Callable[[int], None], wait: Callable[[], None]
    ) -> None:
        self._take, self._give, self._wait = take, give, wait
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}

    def reuse(self, size: int) -> int | None:
        """Return the address of a block that was given back; None where none fits."""
        try:
            # The lowest: the states of a sequence then go back and forth between the same places.
            return heapq.heappop(self._free[rounded_up(size)])
        except (KeyError, IndexError):
            return None

    def take(self, size: int) -> int:
        """Return the address of new memory.

        Raises:
            EnvironmentProblemError: the device has none left.
        """
        rounded = rounded_up(size)
        idle = sum(size * len(held) for size, held in list(self._free.items()))
        if 2 * idle > sum(self._sizes.values()):
            self._trim()
        try:
            address = self._take(rounded)
        except EnvironmentProblemError:  # what lies idle may be enough
            self._trim()
            address = self._take(rounded)
        self._sizes[address] = rounded
        return address

    def release(self, address: int) -> None:
        """Take a block back; any thread may do so, also in a garbage collection."""
        heapq.heappush(self._free.setdefault(self._sizes[address], []), address)

    def close(self) -> None:
        """Give all blocks back, those that are in use too."""
        self._free.clear()
        for address in self._sizes:
            self._give(address)
        self._sizes.clear()

    def _trim(self) -> None:
        """Give what is idle back."""
        self._wait()
        for addresses in list(self._free.values()):
            while addresses:
                address = addresses.pop()
                self._give(address)
                del self._sizes[address]


def rounded_up(size: int) -> int:
    """Return the size that memory of ``size`` bytes is taken in: at most a quarter more.

    States that grow by a token a call then need other memory every so often only.
    """
    size = max(size, 256)
    step = 1 << max(size.bit_length() - 3, 8)
    return -(-size // step) * step
