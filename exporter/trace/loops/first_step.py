"""Loops that begin at the second token, whose first step is one like the others, from a constant.

    h_0 = b_0,  h_t = a_t h_{t-1} + b_t        is        h_{-1} = 0,   t from 0 on
    h_0 = x_0,  h_t = max(h_{t-1}, x_t)        is        h_{-1} = -inf
    h_0 = x_0,  h_t = h_{t-1} x_t              is        h_{-1} = 1

Both are run on random numbers. Values that are computed before the loop are numbers of their own:
what is equal for all of them is equal for those the model computes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence, Set

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from linexport.graph.walk import reads
from linexport.plugins.ops.body import OPSET
from linexport.trace.loops.body import LoopBody
from linexport.trace.loops.unrolled import Unrolled

log = logging.getLogger(__name__)

DRAWS = 3

STARTS = (0.0, 1.0, -np.inf, np.inf)
"""Numbers that states may begin with: those of sums, products, maxima and minima."""

MAX_COMBINED_STATES = 3
"""States of which all combinations of these are tried."""

SIZE = 3
"""Sizes of the dimensions that vary."""

TINY = 1e-3
"""Where all values are smaller, the difference allowed is that of this one."""

LIMIT = 1e-5
"""Difference allowed, of the largest value."""

FLOATS = (onnx.TensorProto.FLOAT,)


def start_of(unrolled: Unrolled, body: LoopBody, first: str) -> tuple[float, ...] | None:
    """Return the constants from which the body computes what the model does with a first token.

    Args:
        unrolled: the graph.
        body: of a loop that begins at the second token.
        first: the result that is computed before it.

    Returns:
        A constant for each state; None where none was found.
    """
    begins = [unrolled.one(state.before[0]) for state in body.states]
    wholes = [scanned.whole for scanned in body.scanned]
    if not begins or not all(wholes):
        return None
    own = {s.name for s in body.states} | {s.name for s in body.scanned}
    given = {i for n in body.nodes for i in n.input if i} - own
    given -= {o for n in body.nodes for o in n.output}
    leaves = {*wholes, *(name for name in given if _is_float(unrolled, name))}
    results = [*begins, unrolled.one(first)]
    before = _nodes(unrolled, results, leaves)
    sizes = _nodes(unrolled, sorted(given - leaves), leaves)
    after = [*body.next_values(), body.result]
    random = np.random.default_rng(0)
    most = len(STARTS) if len(begins) <= MAX_COMBINED_STATES else 1
    left = list(itertools.product(STARTS[:most], repeat=len(begins)))
    try:
        for _ in range(DRAWS):
            values = _drawn(unrolled, [*before, *sizes, *body.nodes], leaves, random)
            expected = _run(unrolled, before, values, results)
            for scanned in body.scanned:
                values[scanned.name] = values[scanned.whole].take(0, scanned.axis)
            kept = []
            for start in left:
                for state, number in zip(body.states, start, strict=True):
                    shape = _sizes(unrolled, state.name)
                    values[state.name] = np.full(shape, number, expected[0].dtype)
                found = _run(unrolled, [*sizes, *body.nodes], values, after)
                if all(map(_equal, found, expected)):
                    kept.append(start)
            left = kept
            if not left:
                return None
    except Exception as reason:
        log.debug("the first step is not compared with the others: %s", reason)
        return None
    return left[0]


def _is_float(unrolled: Unrolled, name: str) -> bool:
    found = unrolled.types.get(name)
    stored = unrolled.constants.get(name)
    if stored is not None:
        return stored.data_location == onnx.TensorProto.EXTERNAL and stored.data_type in FLOATS
    return found is not None and found.type.tensor_type.elem_type in FLOATS


def _nodes(unrolled: Unrolled, names: Sequence[str], leaves: Set[str]) -> list[onnx.NodeProto]:
    """Return the nodes that compute values from leaves, in order."""
    found: dict[str, onnx.NodeProto] = {}

    def visit(name: str) -> None:
        node = unrolled.producer.get(name)
        if node is None or name in leaves or node.output[0] in found:
            return
        for given in reads(node):
            visit(given)
        found[node.output[0]] = node

    for name in names:
        visit(name)
    return list(found.values())


def _drawn(
    unrolled: Unrolled,
    nodes: Sequence[onnx.NodeProto],
    leaves: Set[str],
    random: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Return random leaves, and other values that nodes read and do not compute."""
    made = {o for n in nodes for o in n.output}
    read = {i for n in nodes for i in reads(n)} - made
    return {
        name: random.standard_normal(_sizes(unrolled, name)).astype(np.float32)
        for name in sorted(leaves | read)
        if name in leaves or (_is_float(unrolled, name) and name in unrolled.types)
    }


def _sizes(unrolled: Unrolled, name: str) -> list[int]:
    """Return the sizes of a value; those that vary are ``SIZE``."""
    return [n if isinstance(n, int) and n else SIZE for n in unrolled.shape(name) or []]


def _run(
    unrolled: Unrolled,
    nodes: Sequence[onnx.NodeProto],
    values: Mapping[str, np.ndarray],
    results: Sequence[str],
) -> list[np.ndarray]:
    """Return what nodes compute."""
    made = {o for n in nodes for o in n.output}
    read = {i for n in nodes for i in reads(n)} - made
    copies = {name: f"{name}/copy" for name in dict.fromkeys(results)}
    ends = [helper.make_node("Identity", [name], [copy]) for name, copy in copies.items()]
    feeds = {name: values[name] for name in values if name in {*read, *results} - made}
    graph = helper.make_graph(
        [*nodes, *ends],
        "first",
        [
            helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, x.shape)
            for n, x in feeds.items()
        ],
        [helper.make_empty_tensor_value_info(copy) for copy in copies.values()],
        [
            unrolled.constants[name]
            for name in sorted(read)
            if name in unrolled.constants and name not in feeds
        ],
    )
    imports = [helper.make_opsetid(*pair) for pair in (("", OPSET),)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    got = dict(zip(copies, session.run(list(copies.values()), feeds), strict=True))
    return [got[name] for name in results]


def _equal(found: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether numbers are equal up to rounding, where one side may be repeated."""
    with np.errstate(all="ignore"):
        difference = np.abs(found - expected).max(initial=0.0)
    return bool(difference <= LIMIT * max(np.abs(expected).max(initial=0.0), TINY))
