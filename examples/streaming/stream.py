"""An artifact run token by token with ONNX Runtime and NumPy alone, without linexport.

    python stream.py ARTIFACT TOKEN...

Prints the argmax of the logits after each token. ``stream.cpp`` is the same program in C++.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime


def main(folder: Path, tokens: list[int]) -> None:
    """Feed the tokens one by one, carrying every ``present_*`` output to its ``past_*`` input."""
    states = json.loads((folder / "manifest.json").read_text())["states"]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    carried = {s["past"]: s["present"] for s in states}
    state = {s["past"]: np.full([1, *s["shape"][1:]], s["initial"], s["dtype"]) for s in states}
    token_input = next(i.name for i in session.get_inputs() if i.name not in carried)
    outputs = [o.name for o in session.get_outputs()]
    for token in tokens:
        feeds = {token_input: np.array([[token]]), **state}
        results = dict(zip(outputs, session.run(outputs, feeds), strict=True))
        state = {past: results[present] for past, present in carried.items()}
        print(int(results[outputs[0]].argmax()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(token) for token in sys.argv[2:]])
