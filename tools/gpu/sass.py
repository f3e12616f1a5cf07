"""Machine code of a kernel: its loops, the fewest instructions a warp issues, and its products.

A loop is what lies between a branch and its target before it. With n its trips, and counting the
instructions of a loop that are in no loop inside of it:

    issued = fewest on a way from the first one to an EXIT + sum over loops of
             n * (fewest on a way from the target to the branch + the same of loops inside)

Branches forwards are taken or not, whichever is shorter: it is a bound from below. An instruction
whose predicate is false is issued, too. Products are counted wherever they are in a loop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LINE = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE
)
TARGET = re.compile(r"\b0x([0-9a-f]+)$")
PRODUCT = re.compile(r"(?:HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.16(8\d+))")

WARPGROUP = 4
"""Warps that execute one HGMMA; an HMMA is of one."""


@dataclass(frozen=True)
class Instruction:
    """One line of a listing; ``target`` is where a branch goes to."""

    address: int
    predicated: bool
    opcode: str
    target: int | None

    @property
    def ends(self) -> bool:
        """The instruction after it is never reached from it."""
        return self.opcode.startswith(("EXIT", "BRA")) and not self.predicated

    @property
    def flops(self) -> float:
        """Multiplications and additions of a warp's products of matrices."""
        found = PRODUCT.match(self.opcode)
        if not found:
            return 0
        if found[4]:
            return 2 * 16 * 8 * int(found[4][1:])
        return 2 * int(found[1]) * int(found[2]) * int(found[3]) / WARPGROUP


@dataclass(frozen=True)
class Loop:
    """First and last instruction, by place in the listing, and how many loops are around it."""

    first: int
    last: int
    depth: int

    def holds(self, place: int) -> bool:
        """Return whether an instruction is in it."""
        return self.first <= place <= self.last


def parsed(listing: str) -> list[Instruction]:
    """Return the instructions of a listing of cuobjdump."""
    found = []
    for address, predicate, opcode, operands in LINE.findall(listing):
        target = TARGET.search(operands) if opcode.startswith("BRA") else None
        place = int(target[1], 16) if target else None
        found.append(Instruction(int(address, 16), bool(predicate), opcode, place))
    return found


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """Return the loops in the order in which they begin; those around others first."""
    places = {instruction.address: i for i, instruction in enumerate(code)}
    ends: dict[int, int] = {}
    for i, instruction in enumerate(code):
        first = places.get(-1 if instruction.target is None else instruction.target, i)
        if first < i:
            ends[first] = max(ends.get(first, i), i)
    spans = sorted(ends.items(), key=lambda span: (span[0], -span[1]))
    return [
        Loop(first, last, sum(a <= first and last <= b for a, b in spans) - 1)
        for first, last in spans
    ]


def issued(code: Sequence[Instruction], trips: Mapping[Loop, int | None]) -> int:
    """Return the fewest instructions that a warp issues; those of a loop without trips are none."""
    owners = _owners(code, list(trips))
    total = _fewest(code, None, owners)
    for loop in trips:
        total += _times(loop, trips) * _fewest(code, loop, owners)
    return total


def flops(code: Sequence[Instruction], trips: Mapping[Loop, int | None]) -> dict[str, float]:
    """Return multiplications and additions of products of a warp, by type of operands."""
    owners, found = _owners(code, list(trips)), {"half": 0.0, "tf32": 0.0}
    for instruction, owner in zip(code, owners, strict=True):
        times = 1 if owner is None else _times(owner, trips)
        found["tf32" if "TF32" in instruction.opcode else "half"] += times * instruction.flops
    return found


def of_a_trip(code: Sequence[Instruction], loop: Loop, trips: Mapping[Loop, int | None]) -> int:
    """Return the fewest instructions of one trip of a loop, those of loops inside of it with it."""
    owners = _owners(code, list(trips))
    inside = [x for x in trips if loop.first <= x.first and x.last <= loop.last]
    return sum(_times(x, trips) * _fewest(code, x, owners) for x in inside) // max(
        trips[loop] or 0, 1
    )


def _times(loop: Loop, trips: Mapping[Loop, int | None]) -> int:
    """How often a loop is gone through, with those around it."""
    times = 1
    for around, number in trips.items():
        if around.first <= loop.first and loop.last <= around.last:
            times *= number or 0
    return times


def _owners(code: Sequence[Instruction], found: Sequence[Loop]) -> list[Loop | None]:
    """The innermost loop of each instruction."""
    return [
        max((x for x in found if x.holds(i)), key=lambda x: x.depth, default=None)
        for i in range(len(code))
    ]


def _fewest(code: Sequence[Instruction], loop: Loop | None, owners: Sequence[Loop | None]) -> int:
    """Fewest instructions of a loop itself on a way through it; without one, of the code around."""
    first, last = (loop.first, loop.last) if loop else (0, len(code) - 1)
    places = {instruction.address: i for i, instruction in enumerate(code)}
    reached, ways = {first: 0}, []
    for i in range(first, last + 1):
        if i not in reached:
            continue
        so_far = reached[i] + (owners[i] == loop)
        if i == last or (loop is None and code[i].opcode == "EXIT"):
            ways.append(so_far)
        target = code[i].target
        after = [] if code[i].ends else [i + 1]
        after += [places[target]] if target in places else []
        for j in after:
            if i < j <= last:
                reached[j] = min(reached.get(j, so_far), so_far)
    return min(ways, default=0)
