"""Try every model type with the releases that are installed; tell which of them convert and stream.

    python tools/check_versions.py [--quick] [--jobs N] [--json FILE] [--continue] [MODEL_TYPE ...]
    python tools/check_versions.py --json FILE --also "smoke tests=1,297 passed"

Types that a release of transformers does not have are left out. With --quick a type is loaded,
exported and run in pieces in PyTorch, which takes a third of the time; without, it is converted
as ``convert`` does it. With --json every outcome is at once added to those the file has for these
releases, which the page "Versions" shows; --also adds what else was run with them, and tries types
only where some are named. Exits with 1 where a type does not stream.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import multiprocessing
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from count_model_types import SOURCES, outcome, save_model

from linexport import trace
from linexport.errors import LinexportError
from linexport.sources import load_model
from linexport.system.environment import version

PACKAGES = ("transformers", "torch", "onnx", "onnxruntime", "onnxscript", "numpy")
"""Packages whose releases a run is named by."""

TOKENS, PIECES, PADDING = 40, (30, 1, 9), 5
"""Tokens of a sequence, how it is cut to pieces, and what of the first row is padding."""

CLOSE = {"atol": 2e-5, "rtol": 1e-4}
"""Difference allowed between pieces with states and the library's own call."""


def quickly(model_type: str) -> str:
    """Load and export a tiny model, and run it in pieces; return "streams", or what is wrong."""
    config, auto, _ = SOURCES[model_type]
    with tempfile.TemporaryDirectory() as work:
        save_model(config, model_type, Path(work), auto)
        try:
            loaded = load_model(work, vision=False)
            if not has_exported_text_model(model_type):
                loaded, _ = trace.trace_or_whole(loaded)
        except LinexportError as error:
            return f"refused: {str(error).partition(chr(10))[0]}"
        step = loaded.decode_module
        if step is None:
            return f"converts without states: {loaded.unread}"
        ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :PADDING] = 0
        past: dict[str, torch.Tensor] = {}
        parts = []
        with torch.no_grad():
            expected = [
                loaded.module(row[real][None], real[real][None].long())
                for row, real in zip(ids, mask.bool(), strict=True)
            ]
            with step.patched():
                for piece, own in zip(ids.split(PIECES, 1), mask.split(PIECES, 1), strict=True):
                    output, past = step.module(piece, own, past)
                    parts.append(output)
    # Each row alone: the library's own padded rows may differ, see ``parity.language.rows_alone``.
    found, whole = torch.cat(parts, 1)[mask.bool()], torch.cat(expected, 1)[0]
    try:
        torch.testing.assert_close(found, whole, **CLOSE)
    except AssertionError as error:
        return f"differs: {str(error).partition(chr(10))[0]}"
    return "streams"


def has_exported_text_model(model_type: str) -> bool:
    """Return whether the text model within a type is a type that is exported for itself."""
    parsed = transformers.AutoConfig.for_model(model_type, **SOURCES[model_type][0])
    inner = parsed.get_text_config(decoder=True).model_type
    return inner != model_type and inner in SOURCES


def wholly(model_type: str) -> str:
    """Convert a tiny model; return "streams", or what is wrong."""
    row = outcome(model_type)
    if row["status"] == "refused":
        return f"refused: {row['reason']}"
    return "streams" if row["status"] == "ok" and row["streams"] else str(row["status"])


def outcome_of(model_type: str, quick: bool) -> tuple[str, str]:
    """Return a type, and "streams" or what is wrong with it, whatever that is."""
    try:
        return model_type, (quickly if quick else wholly)(model_type)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return model_type, f"failed: {type(error).__name__}: {first_line}"


def known(model_type: str) -> bool:
    """Return whether this transformers has a type, and the type of the text model in it."""
    config = SOURCES[model_type][0]
    inner = (config.get("text_config") or {}).get("model_type")
    return all(name is None or name in transformers.CONFIG_MAPPING for name in (model_type, inner))


def be_quiet() -> None:
    """Let the library say nothing of writing shards, and of kernels that are not installed."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def environment_run(quick: bool) -> dict[str, Any]:
    """Return the run of this environment, of which nothing was tried yet."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "releases": {name: version(name) or "" for name in PACKAGES},
        "quick": quick,
        "also": {},
        "types": {},
    }


def is_same(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two runs are of one kind, with the same releases and minor of Python."""
    kinds = [(r["releases"], r["quick"], r["python"].split(".")[:2]) for r in (run, other)]
    return kinds[0] == kinds[1]


def runs_of(path: Path | None) -> list[dict[str, Any]]:
    """Return the runs that a file has."""
    found: list[dict[str, Any]] = []
    if path and path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return found


def add_run(path: Path | None, run: dict[str, Any]) -> None:
    """Put a run into a file, with what the file has of the same releases."""
    if path is None:
        return
    kept = []
    for earlier in runs_of(path):
        if is_same(earlier, run):
            run = run | {part: earlier[part] | run[part] for part in ("also", "types")}
            run["types"] = {name: run["types"][name] for name in SOURCES if name in run["types"]}
        else:
            kept.append(earlier)
    text = json.dumps({"runs": [*kept, run]}, indent=2)
    path.write_text(f"{text}\n", encoding="utf-8")


def named_outcome(text: str) -> tuple[str, str]:
    """Return what was run and its outcome, of "NAME=OUTCOME"."""
    name, _, outcome = text.partition("=")
    if not outcome:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected NAME=OUTCOME")
    return name, outcome


def parsed_options() -> argparse.Namespace:
    """Return what was given on the command line."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="all, if none is given")
    options.add_argument("--quick", action="store_true", help="do not convert")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    options.add_argument("--json", type=Path, metavar="FILE", help="add the run to FILE")
    options.add_argument(
        "--continue", action="store_true", dest="again", help="leave out types that FILE has"
    )
    options.add_argument(
        "--also",
        type=named_outcome,
        action="append",
        default=[],
        metavar="NAME=OUTCOME",
        help="add what else was run",
    )
    return options.parse_args()


def main() -> int:
    """Try the types and print a line for each."""
    given = parsed_options()
    run = environment_run(given.quick) | {"also": dict(given.also)}
    print(", ".join(f"{name} {release}" for name, release in run["releases"].items()), flush=True)
    add_run(given.json, run)
    named = given.types or ([] if given.also else SOURCES)
    types = [name for name in named if known(name)]
    if given.again:
        had = {name for r in runs_of(given.json) if is_same(r, run) for name in r["types"]}
        types = [name for name in types if name not in had]
    try_type = partial(outcome_of, quick=given.quick)
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.jobs, initializer=be_quiet) as pool:
        for model_type, said in pool.imap_unordered(try_type, types):
            run["types"][model_type] = said
            print(f"{model_type}: {said}", flush=True)
            add_run(given.json, run)
        pool.close()
        pool.join()
    return int(any(said != "streams" for said in run["types"].values()))


if __name__ == "__main__":
    sys.exit(main())
