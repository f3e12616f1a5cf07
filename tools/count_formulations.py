"""Count which formulations of linear attention and recurrences are fused, and which stream.

    python tools/count_formulations.py [--json FILE] [--tables collected,third_party] [NAME ...]

The tests' formulations, and modules of packages from PyPI that are installed, each beside its
module in float64. With ``--json`` a run adds its rows to those the file has already.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import measurement

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support import formulations
from tests.support.converted import converted
from tests.support.outcomes import outcome_of
from tests.support.strangers import STRANGERS
from tests.support.third_party import MODULES

TABLES = {
    name: getattr(formulations, name.upper())
    for name in ("causal", "bidirectional", "separate", "collected")
} | {"third_party": MODULES, "strangers": STRANGERS}

CONVERTED = ("third_party", "strangers")
"""Tables of modules that are converted as a user converts them."""


def main() -> None:
    """A line for each formulation, then how many there are of each kind."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--tables", default="collected", help="of " + ", ".join(TABLES))
    measurement.add_option(options)
    options.add_argument("names", nargs="*")
    given = options.parse_args()
    rows = []
    for table in given.tables.split(","):
        for name in given.names or TABLES[table]:
            if name not in TABLES[table]:
                continue
            if table == "third_party" and not MODULES[name].installed:
                print(f"{name:34} skipped: {MODULES[name].package} is not installed", flush=True)
                continue
            found = converted(name) if table in CONVERTED else outcome_of(name)
            # Later lines have places on this machine.
            first = [reason.partition("\n")[0] for reason in found.reasons]
            row = {"table": table, "formulation": name, **vars(found), "reasons": first}
            rows.append(row | _facts(table, name))
            _write(given.json, rows)
            reasons = "; ".join(found.reasons).replace("\n", " ")[:160]
            print(
                f"{name:34} {found.kind:8} {found.fused} {found.error:.0e}  {reasons}", flush=True
            )
    counts = Counter(row["kind"] for row in rows)
    print(f"{len(rows)} formulations:", ", ".join(f"{n} {kind}" for kind, n in counts.items()))


def _write(path: Path | None, rows: list[dict[str, object]]) -> None:
    """Write the rows, and those of the file that this run has not measured again."""
    kept: list[dict[str, object]] = []
    if path is not None and path.exists():
        again = {row["formulation"] for row in rows}
        kept = [r for r in measurement.read(path)["rows"] if r["formulation"] not in again]
    measurement.write(path, {"rows": [*kept, *rows]})


def _facts(table: str, name: str) -> dict[str, object]:
    """Return the package of a module, and whether it is linear and causal."""
    if table == "strangers":
        return {"linear": STRANGERS[name].linear}
    if table != "third_party":
        return {"linear": True}
    found = MODULES[name]
    return {"package": found.package, "linear": found.linear, "causal": found.causal}


if __name__ == "__main__":
    main()
