"""Bytes of all requests in flight: counted before they are taken.

    body as it comes  ->  what is read of it  ->  tensors of the call  ->  answer

A request that would take more than all there is has an answer that says how much; one that has to
wait for others is refused for now.
"""

from __future__ import annotations

from linexport.serving.http.errors import ProtocolError

MIB = 2**20

READ = 4
"""Bytes that one of a body takes at most once it is read: a number of two characters takes 8."""


class Budget:
    """Bytes that requests may take together.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    def open(self) -> Charge:
        """Return the account of a request."""
        return Charge(self)


class Charge:
    """Bytes of one request; ``close`` gives them back."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._own = budget, 0

    def take(self, size: int, what: str) -> None:
        """Take bytes.

        Args:
            size: of them.
            what: needs them, in words.

        Raises:
            ProtocolError: 413 where there are never so many; 429 where others have them now.
        """
        budget = self._budget
        if self._own + size > budget.most:
            raise ProtocolError(
                413,
                f"This request needs {self._own + size:,} bytes for {what}; this server has "
                f"{budget.most:,} for all requests (--memory-mib). Send fewer tokens or smaller "
                "images, or ask for fewer outputs.",
                code="request_too_large",
            )
        if budget.taken + size > budget.most:
            raise ProtocolError(
                429,
                f"Other requests have {budget.taken:,} of the {budget.most:,} bytes that this "
                f"server has for all; this one needs {size:,} more. Try again later.",
                "rate_limit_error",
                "out_of_memory",
                headers={"Retry-After": "1"},
            )
        budget.taken += size
        self._own += size

    def close(self) -> None:
        """Give everything back."""
        self._budget.taken -= self._own
        self._own = 0
