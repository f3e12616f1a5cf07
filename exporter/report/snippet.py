"""manifest -> Python that runs the artifact: with linexport, and with onnxruntime alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from linexport.report.text import items, mapping, objects

NUMPY = {"float": "float32", "double": "float64", "bool": "bool_"}

STATELESS = """\
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
outputs = session.run(None, {feeds})
"""

STATEFUL = """\
import json
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
with open("manifest.json") as file:
    states = json.load(file)["states"]


def zeros(state):
    # Symbolic dimensions of a state are the batch, here 1.
    shape = [size if isinstance(size, int) else 1 for size in state["shape"]]
    return np.zeros(shape, state["dtype"])


# A new sequence begins with states of zeros.
past = {{state["past"]: zeros(state) for state in states}}
outputs = dict(zip(names, session.run(None, {feeds} | past)))

# The next piece of the same sequence continues from the states just returned.
past = {{state["past"]: outputs[state["present"]] for state in states}}
"""

OURS = """\
import numpy as np
import linexport

model = linexport.load(".")
outputs = model.run({feeds})
"""

OURS_STREAM = """
# The same sequence in pieces: the stream keeps the states between calls.
stream = model.stream()
outputs = stream.step({feeds})
"""


def with_linexport(manifest: Mapping[str, Any]) -> str:
    """Loading the folder with linexport; streaming where the model carries states."""
    code = OURS + (OURS_STREAM if objects(manifest.get("states")) else "")
    return code.format(feeds=_feeds(manifest))


def with_onnxruntime(manifest: Mapping[str, Any]) -> str:
    """Running model.onnx without linexport installed."""
    code = STATEFUL if objects(manifest.get("states")) else STATELESS
    return code.format(feeds=_feeds(manifest))


def _feeds(manifest: Mapping[str, Any]) -> str:
    past = [state.get("past") for state in objects(manifest.get("states"))]
    sizes = mapping(manifest.get("dims"))
    pairs = []
    for one in objects(manifest.get("inputs")):
        name, dtype = one.get("name"), str(one.get("dtype"))
        if name in past:
            continue
        shape = tuple(_size(dim, sizes) for dim in items(one.get("shape")))
        # A JSON string is a Python string too, whatever quotes the name holds.
        quoted = json.dumps(name, ensure_ascii=False)
        pairs.append(f"{quoted}: np.zeros({shape}, np.{NUMPY.get(dtype, dtype)})")
    return "{" + ", ".join(pairs) + "}"


def _size(dim: Any, sizes: Mapping[str, Any]) -> int:
    if isinstance(dim, int):
        return dim
    opt = mapping(sizes.get(str(dim))).get("opt")
    return opt if isinstance(opt, int) and dim != "batch" else 1
