"""Multiply-adds and real time of feed-forward layers, and of the forms that can cost less.

    python tools/bench_feed_forward.py [--json FILE]

Blocks linear, GELU, linear of several sizes with weights of a fresh initialisation, and their
``low-rank`` and ``chebyshev`` forms with the second layer folded in: multiply-adds, error on
held-out rows, and time in ONNX Runtime on one thread, in turns. Ratios are of the new layer to the
block: below 1 it pays. Low-rank forms are of the rank that multiply-adds and error choose, and of
lower ones, which fewer multiply-adds leave: does the chosen one pay where any does?
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import measurement
import torch
from torch import nn

from linexport.linearization.feed_forward_times import Before, feed_forward_times
from linexport.models.feed_forward import linearize_feed_forward
from linexport.models.feed_forward.powers import MAX_COST

SIZES = [
    ("chebyshev", (1, 64, 1)),
    ("chebyshev", (1, 256, 8)),
    ("chebyshev", (2, 256, 3)),
    ("chebyshev", (2, 1024, 3)),
    ("chebyshev", (3, 1024, 4)),
    ("chebyshev", (4, 1024, 4)),
    ("low-rank", (8, 256, 8)),
    ("low-rank", (16, 512, 4)),
    ("low-rank", (32, 1024, 8)),
    ("low-rank", (64, 1024, 16)),
    ("low-rank", (64, 512, 64)),
]
"""Forms and widths: of the input, inside, of the output."""

TARGET = 0.01
"""Squared error, for one token, of the activation's output."""

FEWER = (0.5, 0.25)
"""Multiply-adds that lower ranks may take, as parts of those of the chosen one."""


def main() -> None:
    """Print a table, and write it with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    measurement.add_option(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("form       sizes            degree  rank  error    multiply-adds  time at 1, 64, 1,024")
    rows = [row for form, sizes in SIZES for row in measured(form, sizes)]
    load = round(os.getloadavg()[0], 1)
    print(f"load average {load}")
    measurement.write(chosen.json, {"load": load, "rows": rows})


def measured(form: str, sizes: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Lines of one size: the form as it is chosen, and at lower ranks."""
    torch.manual_seed(0)
    width, inside, out = sizes
    first, last = nn.Linear(width, inside), nn.Linear(inside, out)
    x = torch.randn(4000, width).clamp(-3, 3)
    best = line(form, first, last, x)
    yield best
    if form == "low-rank":
        before = inside * (width + out)
        for part in FEWER:
            yield line(form, first, last, x, int(part * best["multiply_adds"] * before))


def line(
    form: str, first: nn.Linear, last: nn.Linear, x: torch.Tensor, most: int = MAX_COST
) -> dict[str, Any]:
    """One form of one size, of at most so many multiply-adds."""
    target = TARGET if form == "chebyshev" else None
    layer, report = linearize_feed_forward(
        first, "gelu", x, form, following=last, target_error=target, max_cost=most
    )
    before = Before(first, "gelu", last if report.folded else None)
    times = feed_forward_times(before, layer, x, 1)
    factor = report.multiply_adds / report.multiply_adds_before
    sizes = (first.in_features, first.out_features, last.out_features)
    print(
        f"{form:10} {' -> '.join(map(str, sizes)):16} {report.degree:6}  {report.rank or '':4}  "
        f"{report.relative_error:.1e}  {factor:13.2f}  "
        + "  ".join(f"{one.factor:.2f}" for one in times),
        flush=True,
    )
    return {
        "form": form,
        "sizes": sizes,
        "degree": report.degree,
        "rank": report.rank,
        "chosen": most == MAX_COST,
        "relative_error": report.relative_error,
        "multiply_adds": factor,
        "times": {str(one.rows): one.factor for one in times},
    }


if __name__ == "__main__":
    main()
