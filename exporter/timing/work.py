"""The work of a graph, counted as ONNX Runtime runs it: bytes moved, and numbers multiplied.

    estimate = START + nodes * NODE + calls * CALL + bytes / BANDWIDTH + products / PRODUCTS
               + sum over functions f of values of f * FUNCTIONS[f]

The graph is run once with ONNX Runtime's profile, which lists every node that was executed, in
bodies and behind its own rewrites, with the sizes of what it read and wrote. Counts do not depend
on what else a machine does, nor on how fast it is: two graphs of one model are compared by them.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from linexport.graph.operators import BODIES, SIZES_ONLY, VIEWS, Trait, having
from linexport.system.json_object import JsonObject

START, NODE, CALL = 9.0, 1.0, 0.1
"""Microseconds of a run, of a node, and of each product of small matrices in a batch of them."""

BANDWIDTH, PRODUCTS = 2e4, 3e4
"""Bytes that are read or written, and numbers that are multiplied and added, in a microsecond by
one thread of a CPU of 2020: 20 GB and 60 GFLOP a second."""

FUNCTIONS = {
    **dict.fromkeys(("Celu", "Elu", "Log", "Selu", "Sin", "Cos"), 2e-3),
    **dict.fromkeys(("Mish", "Softplus"), 1.2e-2),
}
"""Microseconds of a value of functions that ONNX Runtime computes one by one (1.32, measured)."""

UNREAD = VIEWS | SIZES_ONLY
"""Operators that read sizes, or give the memory they are given, in ONNX Runtime."""

PARTS = having(Trait.SELECTS)
"""Operators that read of their input what they give."""

MATRICES = {"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "MatMulNBits"}

_KERNEL = "_kernel_time"


@dataclass(frozen=True)
class Work:
    """Work of a graph in one call.

    Attributes:
        nodes: that were executed, those of a body each time.
        calls: products of matrices, each of a batch.
        bytes: read and written.
        products: multiplications.
        functions: microseconds of functions that are computed value by value.
    """

    nodes: int = 0
    calls: int = 0
    bytes: int = 0
    products: int = 0
    functions: float = 0.0

    @property
    def microseconds(self) -> float:
        """The estimate above."""
        return (
            START
            + self.nodes * NODE
            + self.calls * CALL
            + self.bytes / BANDWIDTH
            + self.products / PRODUCTS
            + self.functions
        )


def work_of(model: Path | bytes, fed: Mapping[str, np.ndarray]) -> Work:
    """Run a model once on the CPU and count.

    Args:
        model: with the bodies of its functions.
        fed: its inputs by name.

    Raises:
        Exception: whatever ONNX Runtime raises.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "run")
        source = model if isinstance(model, bytes) else str(model)
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        session.run(None, dict(fed))
        events = json.loads(Path(session.end_profiling()).read_text())
    return counted(events)


def counted(events: Iterable[JsonObject]) -> Work:
    """Add up the events of a profile."""
    nodes = calls = moved = products = 0
    functions = 0.0
    for event in events:
        kind = event.get("args", {}).get("op_name")
        own = event.get("cat") == "Node" and str(event["name"]).endswith(_KERNEL)
        if not own or kind in BODIES:
            continue
        given, made = (
            _tensors(event["args"][f"{side}_type_shape"]) for side in ("input", "output")
        )
        nodes += 1
        written = sum(bytes for bytes, _ in made)
        if kind in PARTS:
            moved += 2 * written
        elif kind not in UNREAD:
            moved += written + sum(bytes for bytes, _ in given)
        batch, multiplied = _products(kind, [s for _, s in given], [s for _, s in made])
        calls, products = calls + batch, products + multiplied
        functions += FUNCTIONS.get(kind, 0.0) * sum(math.prod(shape) for _, shape in made)
    return Work(nodes, calls, moved, products, functions)


def _tensors(listed: Sequence[Mapping[str, Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
    """Return bytes and shape of each tensor of an event."""
    found = []
    for entry in listed:
        for kind, shape in entry.items():
            found.append((SIZES.get(kind, 4) * math.prod(shape), shape))
    return found


SIZES = {"float16": 2, "bfloat16": 2, "double": 8, "int64": 8, "uint64": 8, "int16": 2} | {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "uint16": 2,
}
"""Bytes of a value of each type as profiles call them; 4 of any other."""


def _products(
    kind: str, given: Sequence[Sequence[int]], made: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """Return how many matrices are multiplied, and how many numbers."""
    if not given or not made or not given[0]:
        return 0, 0
    first, out = given[0], math.prod(made[0])
    if kind in MATRICES:
        # With weights, which are constants and not listed, a batch is one product of matrices.
        batched = len(given) > 1 and len(given[1]) > 2
        # Of the first, which may be transposed, a row or column for each row of the result.
        summed = math.prod(first) // max(math.prod(made[0][:-1]), 1) or first[-1]
        return math.prod(made[0][:-2]) if batched else 1, out * summed
    if kind == "Gemm":
        return 1, out * math.prod(first) // max(made[0][0], 1)
    if kind == "Einsum" and len(given) > 1:
        return 1, math.isqrt(out * math.prod(given[0]) * math.prod(given[1]))
    if kind == "Conv" and len(given) > 1:
        return 1, out * math.prod(given[1][1:])
    if kind in ("LinearAttention", "GatedDeltaNet") and len(made) > 1:
        return math.prod(made[1][:2]), 2 * first[1] * math.prod(made[1])
    return 0, 0
