"""Accuracy of classifiers in linear form, and time of pseudo-keys in place of stored images.

    python tools/bench_linear_models.py digits [--json FILE]
    python tools/bench_linear_models.py memory [--json FILE]

Both train the model in full, 800 steps from seed 0, and run ``linexport linearize`` as a user does:
``digits`` with two maps, as fitted and distilled; ``memory`` at several numbers of queries, with
one thread and with two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measurement

SAMPLES = "linexport.models.samples"
DIGITS = (
    ("--map", "favor+", "--features", "128"),
    ("--map", "favor+", "--features", "128", "--distil", "200"),
    ("--map", "taylor2"),
    ("--map", "taylor2", "--distil", "200"),
)
QUERIES, THREADS = "1,16,64,256,1024", (1, 2)


def train(kind: str, folder: Path, *options: str) -> Path:
    """A model of ``linexport.models.train``."""
    found = folder / f"{kind}.pt"
    command = [sys.executable, "-m", "linexport.models.train", kind, "--out", str(found)]
    subprocess.run([*command, *options], check=True, stdout=sys.stderr)
    return found


def linearize(model: Path, data: str, score: str, *options: str) -> Any:
    """The report of the command; exit code 3, not worth it, is a result as well."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / ("linear.pt" if score == "accuracy" else "linear.pt2")
        command = [sys.executable, "-m", "linexport", "linearize", str(model), "-o", str(output)]
        command += ["--data", f"{SAMPLES}:{data}", "--evaluate", f"{SAMPLES}:{score}", "--json"]
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 3):
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def digits(folder: Path) -> Any:
    """Accuracy before and after, and errors of the layers."""
    model, rows = train("digits", folder, "--attention", "softmax"), []
    for options in DIGITS:
        report = linearize(model, "digits", "accuracy", "--no-bench", *options)
        layers = [
            row["attention_error"] if row["distilled_error"] is None else row["distilled_error"]
            for row in report["layers"]
        ]
        metric = report["metric"]
        rows.append(
            {
                "options": " ".join(options),
                "softmax": metric["before"],
                "linear": metric["after"],
                "errors": layers,
            }
        )
        print(rows[-1])
    return {"rows": rows}


def gain(row: Any) -> float:
    """Time of the faster original over that of the linear form."""
    best: float = min(row["original_ms"], row["original_pytorch_ms"])
    return best / row["linear_ms"]


def memory(folder: Path) -> Any:
    """Times at several numbers of queries, and what the pseudo-keys lose."""
    model, asked = train("digit-memory", folder), ("questions", "memory_accuracy")
    reports = [
        linearize(model, *asked, "--lengths", QUERIES, "--threads", str(count)) for count in THREADS
    ]
    (layer,) = reports[0]["layers"]
    one, two = (report["latency"] for report in reports)
    found = {
        "rows": [
            {
                "queries": row["length"],
                "linear_ms": row["linear_ms"],
                "onnx_ms": row["original_ms"],
                "pytorch_ms": row["original_pytorch_ms"],
                "gain_1": gain(row),
                "gain_2": gain(again),
            }
            for row, again in zip(one, two, strict=True)
        ],
        "layer": {
            name: layer[name]
            for name in ("keys", "pseudo_keys", "held_out_error", "mean_of_values_error")
        },
        "accuracy": [reports[0]["metric"]["before"], reports[0]["metric"]["after"]],
    }
    print(json.dumps(found, indent=1))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of them."""
    kinds: dict[str, Callable[[Path], Any]] = {"digits": digits, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=kinds)
    measurement.add_option(parser)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = kinds[chosen.kind](Path(folder))
    measurement.write(chosen.json, {"load": round(os.getloadavg()[0], 1), **result})


if __name__ == "__main__":
    main()
