"""Optimisation profiles of an engine, from the ranges of its dynamic dimensions.

    prefill   every dimension over its range
    decode    the same, with the sequence fixed to one token: where the model holds its state

Caches of softmax layers grow by what was fed, from nothing to the largest sequence, or to what
``--dim past`` says: prompts are then fed in pieces of the largest sequence. An engine has kernels
planned for each profile; the one a call falls into is chosen by its shapes. Logits are those of one
token, as a text that goes on needs them, up to as many as there is room for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import onnx

from linexport.graph.dims import DimRange, sequence
from linexport.manifest.engines import ProfileRecord
from linexport.targets.runtime.options import LOGITS_TO_KEEP

BATCH, LENGTH = DimRange(1, 1, 8), DimRange(1, 1024, 4096)
"""Ranges where nothing bounds a dimension: an engine cannot be built without bounds."""

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Profile:
    """Smallest, usual and largest sizes of every named dimension."""

    name: str
    dims: Mapping[str, tuple[int, int, int]]

    def record(self) -> ProfileRecord:
        """The profile as the manifest holds it."""
        return ProfileRecord(self.name, dict(self.dims))

    def shapes(self, shape: Sequence[int | str]) -> tuple[list[int], list[int], list[int]]:
        """The smallest, usual and largest shape of an input."""
        low, usual, high = (
            [self.dims[d][i] if isinstance(d, str) else d for d in shape] for i in range(3)
        )
        return low, usual, high

    def takes(self, sizes: Mapping[str, int]) -> bool:
        """Return whether a call of these sizes, whatever its logits, falls into the profile."""
        ranges = ((n, d) for n, d in self.dims.items() if n != LOGITS_TO_KEEP)
        return all(low <= sizes[n] <= high for n, (low, _, high) in ranges)


def bound(dims: Mapping[str, DimRange]) -> dict[str, DimRange]:
    """The ranges with bounds where they have none."""
    found = {}
    for name, limits in dims.items():
        default = BATCH if limits.batch else LENGTH
        high = limits.max or max(default.max or 1, limits.min)
        usual = limits.opt or min(max(default.opt or 1, limits.min), high)
        found[name] = replace(limits, opt=usual, max=high)
    return found


def profiles(
    dims: Mapping[str, DimRange],
    stateful: bool,
    grown: Iterable[str] = (),
    past: DimRange | None = None,
    kept: int = 0,
) -> list[Profile]:
    """Return the profiles of an engine.

    Args:
        dims: bounded ranges of the dimensions of inputs.
        stateful: whether the model holds its state.
        grown: names of dimensions that count tokens of a past.
        past: their range; None for what one call may be.
        kept: tokens of a call that logits are computed of, at most; 0 where an engine has no such
            dimension.
    """
    whole = {n: (d.min, d.opt or d.min, d.max or d.min) for n, d in dims.items()}
    length = sequence(dims)
    _, usual, longest = whole[length] if length else (1, 1, 1)
    given = None if past is None else (past.min, past.opt or past.min, past.max or longest)
    logits = {LOGITS_TO_KEEP: (1, 1, min(kept, longest))} if kept else {}
    prefill = Profile(
        PREFILL, {**whole, **dict.fromkeys(grown, given or (0, 0, longest)), **logits}
    )
    if not stateful or length is None or not dims[length].allows(1):
        return [prefill]
    held = dict.fromkeys(grown, given or (0, usual, longest))
    one = dict.fromkeys((length, *logits), (1, 1, 1))
    return [prefill, Profile(DECODE, {**whole, **held, **one})]


def with_pairs(chosen: Sequence[Profile]) -> list[Profile]:
    """Return the profiles with up to two tokens, of which one is usual, where there was just one.

    TensorRT-RTX 1.7.1 has no kernel of ``Attention`` for exactly one query with many keys, and none
    of a product of exactly one row with weights of 8 bits: it computes the whole matrix before.
    """
    prefill = chosen[0]
    wide = [
        {n: (1, 1, min(2, prefill.dims[n][2])) if d == (1, 1, 1) else d for n, d in p.dims.items()}
        for p in chosen[1:]
    ]
    return [prefill, *(replace(p, dims=d) for p, d in zip(chosen[1:], wide, strict=True))]


def needs_pairs(model: onnx.ModelProto) -> bool:
    """Return whether a model has weights of 8 bits, with one scale an output."""
    return any(
        node.op_type == "DequantizeLinear" and all(a.name != "block_size" for a in node.attribute)
        for node in model.graph.node
    )


def described(limits: DimRange) -> str:
    """``1:1024:4096``, as the option --dim takes it."""
    sizes = asdict(limits)
    return ":".join(str(sizes[key]) for key in ("min", "opt", "max"))
