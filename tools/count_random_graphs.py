"""Count what is recognised in random graphs with linear attention, whole or spoiled in one place.

    python tools/count_random_graphs.py [--count 500] [--first 0]

Every rewritten graph is run beside its original at a length the proof did not use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support import random_graphs


def main() -> None:
    """Draw, rewrite, count."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--count", type=int, default=500)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    given = options.parse_args()
    tally = random_graphs.tally(range(given.first, given.first + given.count))
    print(f"{tally.graphs} graphs, {tally.true} with linear attention")
    print(f"found: {tally.found} of {tally.true} ({tally.found / max(tally.true, 1):.1%})")
    print(
        f"others taken for it: {len(tally.mistaken)}; rewrites that are wrong: {len(tally.wrong)}"
    )
    for what in ("missed", "mistaken", "wrong"):
        for seed, detail in getattr(tally, what):
            print(f"{what}: seed {seed}: {detail}")


if __name__ == "__main__":
    main()
