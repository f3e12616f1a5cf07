"""manifest -> Python that runs the artifact: with linexport, and with onnxruntime alone."""

from __future__ import annotations

from dataclasses import replace

from linexport.manifest import Manifest
from linexport.manifest.records import TOKENS, DimRecord, InputRecord, PackedRecord
from linexport.system.escape import python_string

STATELESS = """\
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("model.onnx", providers=["{provider}"])
outputs = session.run(None, {feeds})
"""

STATEFUL = """\
import json
import numpy as np
import onnxruntime as ort

session = ort.InferenceSession("model.onnx", providers=["{provider}"])
names = [output.name for output in session.get_outputs()]
with open("manifest.json") as file:
    states = json.load(file)["states"]


def begin(state):
    # Symbolic dimensions of a state are the batch, here {batch}.
    shape = [size if isinstance(size, int) else {batch} for size in state["shape"]]
    return np.full(shape, state["initial"], state["dtype"])


# A new sequence begins with the states that the manifest names.
past = {{state["past"]: begin(state) for state in states}}
outputs = dict(zip(names, session.run(None, {feeds} | past)))

# The next piece of the same sequence continues from the states just returned.
past = {{state["past"]: outputs[state["present"]] for state in states}}
"""

SIDE_BY_SIDE = [0, 3, 5]
"""Ends of the sequences of an example."""

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


def with_linexport(manifest: Manifest) -> str:
    """Loading the folder with linexport; streaming where the model carries states."""
    code = OURS + (OURS_STREAM if manifest.states else "")
    return code.format(feeds=_feeds(manifest))


def with_onnxruntime(manifest: Manifest) -> str:
    """Running model.onnx without linexport installed."""
    code = STATEFUL if manifest.states else STATELESS
    provider = f"{'CUDA' if manifest.target == 'ort-cuda' else 'CPU'}ExecutionProvider"
    packed = manifest.packed
    feeds = _feeds(manifest) if packed is None else _side_by_side(manifest, packed)
    batch = 1 if packed is None else len(SIDE_BY_SIDE) - 1
    return code.format(feeds=feeds, provider=provider, batch=batch)


def _side_by_side(manifest: Manifest, packed: PackedRecord) -> str:
    """Feeds of two sequences side by side, of three tokens and of two."""
    tokens = DimRecord(1, SIDE_BY_SIDE[-1], None, batch=False, traced=1)
    others = tuple(InputRecord(**vars(i)) for i in packed.inputs if i.name != packed.ends)
    feeds = _feeds(replace(manifest, inputs=others, dims={TOKENS: tokens}))
    return f"{feeds[:-1]}, {python_string(packed.ends)}: np.array({SIDE_BY_SIDE}, np.int32)}}"


def _feeds(manifest: Manifest) -> str:
    pasts = {state.past for state in manifest.states}
    pairs = []
    for one in manifest.inputs:
        if one.name in pasts:
            continue
        shape = tuple(_size(dim, manifest.dims) for dim in one.shape)
        name, dtype = python_string(one.name), python_string(one.dtype)
        pairs.append(f"{name}: np.zeros({shape}, {dtype})")
    return "{" + ", ".join(pairs) + "}"


def _size(dim: int | str | None, dims: dict[str, DimRecord]) -> int:
    if isinstance(dim, int):
        return dim
    limits = dims.get(str(dim))
    if limits is None:
        return 1
    return limits.multiple if limits.batch or limits.opt is None else limits.opt
