"""Run an artifact's calls on an execution provider.

    run_provider.py PROVIDER ARTIFACT CALLS.json FOLDER

Writes FOLDER/0.npz, 1.npz, ...: the outputs of each call.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import linexport
from tests.runtimes.cases import decoded


def main(provider: str, artifact: str, calls: str, folder: str) -> None:
    model = linexport.load(artifact, threads=1, provider=provider)
    Path(folder).mkdir()
    states: dict[str, np.ndarray] = {}
    for i, call in enumerate(json.loads(Path(calls).read_text())):
        feeds = {name: decoded(value) for name, value in call["feeds"].items()}
        feeds |= {past: states[present] for past, present in call["carried"].items()}
        given = model.run_graph(feeds)
        states = {name: given[name] for name in call["kept"]}
        np.savez(Path(folder) / f"{i}.npz", **{name: given[name] for name in call["outputs"]})


if __name__ == "__main__":
    main(*sys.argv[1:])
