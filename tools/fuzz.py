"""Fuzz everything that linexport reads, and its rewrites, in a process with limits.

    python tools/fuzz.py manifest --count 10000 --seed 1
    python tools/fuzz.py pt --seed 1 --only 4711          one case again, with its traceback

Kinds: pt, pt2, onnx, config, safetensors, manifest, state: a valid file mutated and read. graphs: a
random ONNX graph rewritten and compared. modules: a random module converted. A seed and an index
always make the same case. Exit code 1 says that there was a wrong result, a traceback, an abort, a
hang, or memory beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.fuzzing import campaign
from tests.support.fuzzing.kinds import KINDS

EVERY = 60
"""Seconds between two lines of progress."""


def main() -> int:
    """Attempt the cases and print the counts."""
    given = arguments()
    started = shown = time.monotonic()

    def progress(index: int, report: campaign.Report) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= EVERY:
            shown, done = now, index - given.first + 1
            rate = done / (now - started)
            print(f"{done} cases, {rate:.2f}/s: {dict(report.counts)}", file=sys.stderr)
            for found in report.findings.values():
                print(f"    {found.count} x {found.outcome}: {found.where}", file=sys.stderr)

    indices = (
        [given.only] if given.only is not None else range(given.first, given.first + given.count)
    )
    with tempfile.TemporaryDirectory() as folder:
        worker = campaign.Worker(given.samples or Path(folder), given.memory * 2**20)
        report = campaign.run(given.kind, given.seed, indices, worker, progress)
        worker.stop()
    seconds = time.monotonic() - started
    if given.json:
        found = [asdict(f) for f in report.findings.values()]
        print(
            json.dumps(
                {
                    "kind": given.kind,
                    "seed": given.seed,
                    "first": given.first,
                    "counts": dict(report.counts),
                    "findings": found,
                    "seconds": round(seconds),
                },
                indent=1,
            )
        )
    else:
        print(f"{given.kind}: {dict(report.counts)} in {seconds:.0f} s")
        for finding in sorted(report.findings.values(), key=lambda f: -f.count):
            print(f"{finding.count} x {finding.outcome} (--only {finding.index}): {finding.where}")
            print(f"    {finding.detail}")
            if given.only is not None:
                print(finding.trace)
    return int(bool(report.findings))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("kind", choices=KINDS)
    options.add_argument("--count", type=int, default=1000, help="number of cases")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--first", type=int, default=0, help="index of the first case")
    options.add_argument("--only", type=int, help="index of the one case to attempt")
    options.add_argument("--memory", type=int, default=1024, help="MB a case may take (1024)")
    options.add_argument("--samples", type=Path, help="folder that keeps the valid samples")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
