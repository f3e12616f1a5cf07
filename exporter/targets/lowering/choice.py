"""Choosing how each linexport op is lowered: by rule, or by measuring the candidates."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from linexport.plugins.ops.op import DOMAIN, VERSION, Lowering, Node, Op
from linexport.plugins.ops.registry import (
    attach_functions,
    known_shapes,
    known_types,
    linexport_nodes,
)
from linexport.system.json_object import JsonObject

log = logging.getLogger(__name__)

PORTABLE = "portable"
"""Name of the lowering to standard operators, which every op has."""


@dataclass(frozen=True)
class Candidate:
    """One way to lower a node, with the reason a rule would choose it."""

    name: str
    reason: str
    write: Lowering


Candidates = Callable[[Op, Node], Sequence[Candidate]]
"""The correct lowerings of a node on a target; the first is the one measured rules choose."""

Rules = Mapping[Op, Callable[[Node], Sequence[Candidate]]]
"""Candidates by op; any other op has its portable lowering only."""


def by_rules(rules: Rules, reason: str = "standard operators") -> Candidates:
    """Return the candidates that ``rules`` give, ``reason`` being that of the portable lowering."""

    def candidates(op: Op, node: Node) -> Sequence[Candidate]:
        found = rules[op](node) if op in rules else ()
        return found or [Candidate(PORTABLE, reason, op.portable)]

    return candidates


@dataclass(frozen=True)
class Choice:
    """The lowering a node got. ``tuned`` lists what was measured, None if a rule decided."""

    node: str
    op: str
    lowering: str
    reason: str
    tuned: tuple[JsonObject, ...] | None = None

    def json(self) -> JsonObject:
        """Return the record as written to the manifest."""
        return asdict(self)


Runner = Callable[[onnx.ModelProto], Callable[[Mapping[str, np.ndarray]], object]]
"""Opens a model and returns a function that runs it on named inputs."""


def lower(
    model: onnx.ModelProto,
    candidates: Candidates,
    runner: Runner | None = None,
    sizes: Mapping[str, int] | None = None,
    portable: Mapping[str, str] | None = None,
) -> tuple[onnx.ModelProto, list[Choice]]:
    """A copy of the model in which every linexport node has the body of its chosen lowering.

    With a ``runner``, all candidates of each distinct node are timed on it, at the given ``sizes``
    of the dynamic dimensions; without, the first candidate is taken. Nodes named in ``portable``
    have their portable lowering, with the reason given there.

    Raises:
        OpError: a node contradicts its op's definition.
    """
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    chosen: dict[str, Lowering] = {}
    choices: list[Choice] = []
    measured: dict[str, list[JsonObject]] = {}
    for node, op, view in linexport_nodes(lowered):
        options = list(candidates(op, view))
        if portable and node.name in portable:
            options = [Candidate(PORTABLE, portable[node.name], op.portable)]
        choice, tuned = options[0], None
        if runner is not None and len(options) > 1:
            key = repr((view.op_type, sorted(view.attributes.items()), sorted(view.shapes.items())))
            if key not in measured:
                measured[key] = _time_all(node, lowered, options, runner, sizes or {})
            tuned = measured[key]
            fastest = min(tuned, key=lambda t: float(t["median_ms"]))["lowering"]
            choice = next(c for c in options if c.name == fastest)
        log.info("%s %r is lowered as %s", op.name, node.name, choice.name)
        for other in options:
            if other is not choice:
                log.debug("%s %r is not lowered as %s", op.name, node.name, other.name)
        chosen[node.name] = choice.write
        reason = "fastest when measured here" if tuned else choice.reason
        choices.append(
            Choice(node.name, op.name, choice.name, reason, None if tuned is None else tuple(tuned))
        )
    attach_functions(lowered, lambda node, op, view: chosen[node.name])
    return lowered, choices


def _time_all(
    node: onnx.NodeProto,
    model: onnx.ModelProto,
    options: Sequence[Candidate],
    runner: Runner,
    sizes: Mapping[str, int],
) -> list[dict[str, object]]:
    """Median milliseconds of each candidate alone, interleaved."""
    feeds = _random_inputs(node, model, sizes)
    runs = []
    for option in options:
        alone = _single_node_model(node, model)
        attach_functions(alone, lambda *_, write=option.write: write)
        runs.append(runner(alone))
    times: list[list[float]] = [[] for _ in options]
    for repeat in range(2 + 9):
        for run, record in zip(runs, times, strict=True):
            start = time.perf_counter()
            run(feeds)
            if repeat >= 2:
                record.append(1e3 * (time.perf_counter() - start))
    return [
        {"lowering": option.name, "median_ms": round(statistics.median(record), 4)}
        for option, record in zip(options, times, strict=True)
    ]


def _single_node_model(node: onnx.NodeProto, model: onnx.ModelProto) -> onnx.ModelProto:
    shapes, types = known_shapes(model), known_types(model)
    inputs = [
        helper.make_tensor_value_info(name, types[name], list(shapes[name]))
        for name in dict.fromkeys(filter(None, node.input))
    ]
    outputs = [
        helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), shapes.get(name))
        for name in filter(None, node.output)
    ]
    graph = helper.make_graph([node], "alone", inputs, outputs)
    opsets = [*model.opset_import, *([] if _has_domain(model) else [_domain()])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)


def _has_domain(model: onnx.ModelProto) -> bool:
    return any(o.domain == DOMAIN for o in model.opset_import)


def _domain() -> onnx.OperatorSetIdProto:
    return helper.make_opsetid(DOMAIN, VERSION)


def _random_inputs(
    node: onnx.NodeProto, model: onnx.ModelProto, sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    shapes, types = known_shapes(model), known_types(model)
    random = np.random.default_rng(0)
    feeds = {}
    for name in filter(None, node.input):
        shape = [d if isinstance(d, int) else sizes.get(str(d), 2) for d in shapes[name]]
        dtype = helper.tensor_dtype_to_np_dtype(types[name])
        # Small and negative: a valid decay as much as a valid key.
        values = -0.1 * random.random(shape)
        feeds[name] = np.ones(shape, dtype) if dtype == np.bool_ else values.astype(dtype)
    return feeds
