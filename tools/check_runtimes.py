"""Try portable artifacts in the runtimes that people have, against their PyTorch originals.

tools/runtimes_environment .runtimes
python tools/check_runtimes.py .runtimes --json docs/data/runtimes.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import measurement

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support/factories")]
from tests.runtimes.matrix import subjects, tried  # noqa: E402
from tests.runtimes.runtimes import RUNTIMES  # noqa: E402


def main() -> None:
    """Print a line for each model in each runtime."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("environment", type=Path, help="made by tools/runtimes_environment")
    measurement.add_option(parser)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = list(subjects(Path(folder)))
        for runtime in RUNTIMES:
            with tempfile.TemporaryDirectory() as work:
                found += tried(runtime, options.environment.resolve(), chosen, Path(work))
            for one in found[-len(chosen) :]:
                said = one.refused if one.error is None else f"{one.error:.1e}"
                print(f"{one.runtime:<28}{one.form:<10}{one.model:<15}{said}", flush=True)
    measurement.write(options.json, [one.to_json() for one in found])


if __name__ == "__main__":
    main()
