"""Try every model type with the releases that are installed; tell which of them convert and stream.

    python tools/check_versions.py [--quick] [--jobs N] [--json FILE] [--note TEXT] [MODEL_TYPE ...]

Types that a release of transformers does not have are left out. With --quick a type is loaded,
exported and run in pieces in PyTorch, which takes a third of the time; without, it is converted
as ``convert`` does it. With --json the run is added to those the file has, by its releases, which
the page "Versions" shows. Exits with 1 where a type does not stream.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from count_model_types import SOURCES, outcome, save_model

from linexport import trace
from linexport.errors import LinexportError
from linexport.loaders import load_model
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
                trace.trace(loaded)
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
    # Each row alone: the library's own padded rows may differ, see ``linexport.parity.alone``.
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


def add_run(path: Path, run: dict[str, Any]) -> None:
    """Put a run into a file, in the place of one with the same releases, and of another kind."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    same = [r for r in runs if (r["releases"], r["quick"]) == (run["releases"], run["quick"])]
    for earlier in same:
        run["types"] = {**earlier["types"], **run["types"]}
    kept = [r for r in runs if r not in same]
    text = json.dumps({"runs": [*kept, run]}, indent=2)
    path.write_text(f"{text}\n", encoding="utf-8")


def main() -> int:
    """Try the types and print a line for each."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("types", nargs="*", metavar="MODEL_TYPE", help="all, if none is given")
    options.add_argument("--quick", action="store_true", help="do not convert")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    options.add_argument("--json", type=Path, metavar="FILE", help="add the run to FILE")
    options.add_argument("--note", default="", help="what else was run in this environment")
    given = options.parse_args()
    releases = {name: version(name) or "" for name in PACKAGES}
    print(", ".join(f"{name} {release}" for name, release in releases.items()), flush=True)
    types = [name for name in given.types or SOURCES if known(name)]
    found: dict[str, str] = {}
    try_type: Callable[[str], str] = quickly if given.quick else wholly
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.jobs, initializer=be_quiet) as pool:
        for model_type, said in zip(types, pool.imap(try_type, types), strict=True):
            found[model_type] = said
            print(f"{model_type}: {said}", flush=True)
        pool.close()
        pool.join()
    if given.json:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        run = {"date": today, "python": platform.python_version(), "releases": releases}
        add_run(given.json, run | {"quick": given.quick, "note": given.note, "types": found})
    return int(any(said != "streams" for said in found.values()))


if __name__ == "__main__":
    sys.exit(main())
