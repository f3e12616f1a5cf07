"""An artifact run token by token with ONNX Runtime and NumPy alone, without linexport.

    python stream.py ARTIFACT TOKEN...

Prints the argmax of the logits after each token. ``stream.cpp`` is the same program in C++.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


def first(state: dict[str, Any]) -> np.ndarray:
    """Return a state of a batch of one; one that grows, as keys and values do, begins empty."""
    shape = [1, *state["shape"][1:]]
    if state["grows"] is not None:
        shape[state["grows"]] = 0
    return np.full(shape, state["initial"], state["dtype"])


def main(folder: Path, tokens: list[int]) -> None:
    """Feed the tokens one by one, carrying every ``present_*`` output to its ``past_*`` input."""
    manifest = json.loads((folder / "manifest.json").read_text())
    states = manifest["states"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    carried = {s["past"]: s["present"] for s in states}
    state = {s["past"]: first(s) for s in states}
    masks = [i["name"] for i in manifest["inputs"] if i["default"] == 1]
    token_input = next(i.name for i in session.get_inputs() if i.name not in carried)
    outputs = [o.name for o in session.get_outputs()]
    for token in tokens:
        feeds = {token_input: np.array([[token]]), **state}
        feeds |= {mask: np.array([[1]]) for mask in masks}
        results = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        state = {past: results[present] for past, present in carried.items()}
        print(int(results[outputs[0]].argmax()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(token) for token in sys.argv[2:]])
