"""Convert a tiny model of every model type of transformers with linear layers; write the table.

    python tools/count_model_types.py [--json FILE] [MODEL_TYPE ...]

Linear recurrences, state spaces and short convolutions. Every row is converted and checked as
``convert`` checks it, with its vision tower where linexport takes that, or refused by a reason.
With ``--json`` a run adds its rows to those the file has already.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import measurement

import linexport
from linexport.errors import LinexportError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.families import BASES, TINY, WITH_TOWERS, save_model
from tests.support.towers import WITH_PICTURES

SOURCES: dict[str, tuple[dict[str, Any], str, str]] = {
    **{name: (config, "AutoModelForCausalLM", "text") for name, config in TINY.items()},
    **{
        name: (config, "AutoModelForImageTextToText", "text and images")
        for name, config in WITH_PICTURES.items()
    },
    **{
        name: (config, "AutoModelForMultimodalLM", "text, without its towers")
        for name, config in WITH_TOWERS.items()
    },
    **{name: (config, "AutoModel", "hidden states") for name, config in BASES.items()},
}
"""Configuration, class of transformers and what goes in, by model type."""


def outcome(model_type: str) -> dict[str, Any]:
    """Convert a tiny model of a type: what was fused and how far it is from the original."""
    import transformers

    config, auto, inputs = SOURCES[model_type]
    found: dict[str, Any] = {"model_type": model_type, "inputs": inputs}
    if model_type not in transformers.CONFIG_MAPPING:
        return found | {"status": "unknown to this transformers"}
    with tempfile.TemporaryDirectory() as work:
        source, artifact = Path(work, "model"), Path(work, "artifact")
        save_model(config, model_type, source, auto)
        try:
            manifest = linexport.convert(
                source, artifact, bench=False, threads=1, vision=inputs == "text and images"
            )
        except LinexportError as error:
            return found | {"status": "refused", "reason": str(error).partition("\n")[0]}
    return found | {
        "status": manifest.status,
        "fused": manifest.fused,
        "streams": manifest.streaming.passed,
        "error": manifest.parity.max_relative_error,
    }


def main() -> None:
    """Convert the types and print a line for each."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="all, if none is given")
    measurement.add_option(options)
    given = options.parse_args()
    unknown = set(given.types) - set(SOURCES)
    if unknown:
        options.error(f"{', '.join(sorted(unknown))}: not among {', '.join(SOURCES)}")
    kept = measurement.read(given.json)["rows"] if given.json and given.json.exists() else []
    rows = {row["model_type"]: row for row in kept if row["model_type"] in SOURCES}
    for model_type in given.types or SOURCES:
        row = rows[model_type] = outcome(model_type)
        print(", ".join(f"{value}" for value in row.values()), flush=True)
        ordered = [rows[name] for name in SOURCES if name in rows]
        measurement.write(given.json, {"rows": ordered})


if __name__ == "__main__":
    main()
