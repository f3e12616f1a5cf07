"""What becomes of a module of another package: converted as a user converts it, then checked.

The check is independent of linexport: plain ONNX Runtime beside the module in float64, at lengths
that were never traced, in pieces and in single tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.export import Dim

import linexport
from linexport.errors import LinexportError
from linexport.sources.factory import load_module
from tests.support.independent import check_independently
from tests.support.outcomes import Outcome
from tests.support.strangers import STRANGERS, Stranger
from tests.support.third_party import MODULES, WIDTH, ThirdParty

LENGTHS = (1, 7, 130)
LIMIT = 1e-4
"""Difference from float64, of the largest output: modules are several layers deep."""


def converted(name: str) -> Outcome:
    """Convert and run a module of ``MODULES`` or ``STRANGERS``.

    Without a linear operator a correct artifact is "carried" if it streams all the same, and
    "left" if not.
    """
    found: ThirdParty | Stranger = MODULES[name] if name in MODULES else STRANGERS[name]
    torch.manual_seed(0)
    module = found.build().eval()
    example = torch.randn(2, 16 if found.unit == 1 else 4 * found.unit, WIDTH)
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "artifact"
        try:
            loaded = load_module((module, (example,), dynamic), f"third_party:{name}")
            manifest = linexport.convert(loaded, place, bench=False, threads=1)
        except LinexportError as error:
            return Outcome("refused", reasons=(str(error),))
        except Exception as error:
            return Outcome("crashed", reasons=(f"{type(error).__name__}: {error}",))
        reasons = tuple(n.reason for n in manifest.rejected)
        if manifest.status != "ok":
            return Outcome("refused", reasons=("its parity check failed", *reasons))
        longest = min((d.max for d in manifest.dims.values() if d.max), default=max(LENGTHS))
        if longest < max(LENGTHS):
            return Outcome("refused", reasons=(f"its code limits the length to {longest}",))
        fused = sum(n for op, n in manifest.fused.items() if op in LINEAR)
        lengths = LENGTHS if found.unit == 1 else (found.unit, 8 * found.unit)
        lengths = tuple(length for length in lengths if _runs(module, length))
        try:
            check_independently(place, module, WIDTH, lengths=lengths, unit=found.unit, limit=LIMIT)
        except Exception as error:
            return Outcome("wrong", fused, (*reasons, f"{type(error).__name__}: {error}"))
    streams = manifest.streaming is not None and manifest.streaming.passed
    kinds = ("streams", "fused") if fused else ("carried", "left")
    return Outcome(kinds[not streams], fused, reasons)


def _runs(module: torch.nn.Module, length: int) -> bool:
    """Return whether the original itself takes that many tokens: some trees do not take one."""
    try:
        with torch.no_grad():
            module(torch.randn(3, length, WIDTH))
    except Exception:
        return False
    return True


LINEAR = ("DiagonalStateSpace", "GeneralizedDeltaRule", "LinearAttention")
