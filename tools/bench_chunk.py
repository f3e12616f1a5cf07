"""Times of the parts of a chunk of causal elu+1 attention in the CPU library.

    python tools/bench_chunk.py [--keys 64] [--values 64] [--set avx512|avx2|base] [--json FILE]

The kernel's own headers are compiled into a small program, in which all is in the first caches and
one thread runs. At the speed of a product of matrices in the kernel's own tiles, 768 deep, the
recurrence, which has 4 d^2 operations a token, would take the time of the last line.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import tempfile
from pathlib import Path

import measurement

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "plugins" / "cpu" / "cpp"
COMPILED = ("division.cc", "instruction_set.cc")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-wrapv", "-Wno-psabi")
"""Options that ``setup.py`` compiles the library with."""

TOKENS, CHUNKS = 16, 16
"""Tokens of a chunk, and chunks of the whole sequence."""


def measured(keys: int, values: int, instructions: str) -> dict[str, float]:
    """Compile and run; return nanoseconds by part, and the operations of a product."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "chunk_parts"
        sources = [Path(__file__).with_name("chunk_parts.cc"), *(SOURCES / n for n in COMPILED)]
        namespace = f"-DKERNELS=linexport::{instructions}"
        command = [
            "g++",
            *FLAGS,
            namespace,
            f"-I{SOURCES}",
            f"-I{ROOT / 'tools'}",
            *sources,
            "-o",
            program,
        ]
        subprocess.run(list(map(str, command)), check=True)
        given = [str(program), str(keys), str(values)]
        done = subprocess.run(given, check=True, capture_output=True, text=True)
    lines = (line.split("\t") for line in done.stdout.splitlines())
    return {name: float(number) for name, number in lines}


def main() -> None:
    """Print a line a part."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--keys", type=int, default=64, help="channels of a key")
    options.add_argument("--values", type=int, default=64, help="channels of a value")
    default = "avx512" if platform.machine() == "x86_64" else "base"
    options.add_argument("--set", default=default, help="instructions, default %(default)s")
    measurement.add_option(options)
    given = options.parse_args()
    found = measured(given.keys, given.values, given.set)
    rate = found.pop("operations of a product") / found.pop("product")
    whole = found.pop("all chunks") / CHUNKS
    bound = 4 * given.keys * given.values * TOKENS / rate
    print(f"products: {rate:.1f} operations a nanosecond")
    for name, time in found.items():
        print(f"{name:24}{time:8.0f} ns {time / bound:6.2f}")
    print(f"{'a chunk in all':24}{whole:8.0f} ns {whole / bound:6.2f}")
    print(f"{'recurrence, as products':24}{bound:8.0f} ns   1.00")
    measurement.write(given.json, {**found, "whole": whole, "bound": bound, "rate": rate})


if __name__ == "__main__":
    main()
