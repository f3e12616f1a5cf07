"""Sessions on an execution provider, and which nodes it runs, by ONNX Runtime's own record.

ONNX Runtime puts the bodies of functions in the place of their nodes before providers choose, and
its record has the names of nodes:

    node of the graph            its name
    node of an op's function     _inlfunc_LinearAttention_<name>, for the second op of that type
                                 _inlfunc_LinearAttention_token_1_<name>
    a node of ONNX Runtime's     a name of its own, or none

Arithmetic of shapes is not part of an op: see ``shape_arithmetic``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx

from linexport.errors import EnvironmentProblemError
from linexport.graph.walk import all_nodes, nodes_within
from linexport.manifest.placement import ORT_CPU, PlacementRecord
from linexport.plugins.ops.op import DOMAIN
from linexport.system.time_limit import opening
from linexport.targets.lowering import op_functions
from linexport.targets.runtime.providers import PROVIDERS, Execution, add_provider
from linexport.targets.runtime.shape_arithmetic import shape_arithmetic

if TYPE_CHECKING:
    import onnxruntime

RECORDED = "session.record_ep_graph_assignment_info"
"""Setting of ONNX Runtime: keep which provider got which node."""

STATE = "present_"
"""Beginning of the names of outputs that are states."""

MARK = "__"
"""Beginning of the names that nodes of functions get."""

SHAPES = "__shapes_"
"""Beginning of the names of those that are arithmetic of shapes."""

UNKNOWN = "no known op"
"""Key of ``PlacementRecord.on_cpu`` for nodes whose op is not known: they may be of any."""

_INSIDE = re.compile(rf"_inlfunc_(\w+?)(?:_token_\d+)?_({SHAPES}|{MARK})\d+")

_PERMUTED = re.compile(r"Gather(?:_token_\d+)?")
"""ONNX Runtime's names of nodes that put sizes in the order of a transpose that it moved."""


def adapted(model: onnx.ModelProto, provider: str) -> onnx.ModelProto:
    """Return a copy for an execution provider.

    Every node of a function has a name that says so, and what the provider lacks or computes
    wrongly is written otherwise.
    """
    named = onnx.ModelProto()
    named.CopyFrom(model if PROVIDERS[provider].has_kernels else op_functions.defined(model))
    for function in named.functions:
        for i, node in enumerate(nodes_within(function.node)):
            node.name = f"{MARK}{i}"
        for node in shape_arithmetic(function.node):
            node.name = node.name.replace(MARK, SHAPES)
    PROVIDERS[provider].amend(all_nodes(named))
    return named


def open_placed(
    source: bytes | str,
    graph: onnx.ModelProto,
    options: onnxruntime.SessionOptions,
    execution: Execution,
    threads: int,
    settings: Mapping[str, str] | None = None,
) -> tuple[object, PlacementRecord]:
    """Open a model on another execution provider than the CPU's.

    Args:
        source: a file, or a serialised model; as ``adapted`` leaves it.
        graph: of it.
        options: an ``onnxruntime.SessionOptions``, which gets the provider.
        execution: the provider, and whether it may leave ops or states to the CPU.
        threads: 0 for the provider's own choice.
        settings: further options of the provider.

    Returns:
        An ``onnxruntime.InferenceSession``, and what the provider runs of it.

    Raises:
        EnvironmentProblemError: the provider is not installed, does not start, or takes no node;
            or, where that is strict, leaves a part of a linexport op or of a state to the CPU.
    """
    import onnxruntime

    name = execution.provider
    package = add_provider(options, name, threads, settings)
    options.add_session_config_entry(RECORDED, "1")
    # ONNX Runtime plans which tensors share memory by the order of the graph, and the part on the
    # CPU may run ahead of the device's: a shape must not be written over before it is read.
    options.enable_mem_reuse = False
    try:
        with opening(options):
            session = onnxruntime.InferenceSession(source, options, enable_fallback=0)
        assigned = session.get_provider_graph_assignment_info()
    except Exception as error:  # ONNX Runtime has no class for its own
        raise EnvironmentProblemError(
            f"The execution provider {name} ({package}) does not open the model: {error}"
        ) from None
    found = _placement(assigned, graph, name, package)
    ort_name = PROVIDERS[name].ort_name
    if not found.nodes.get(ort_name):
        raise EnvironmentProblemError(
            f"The execution provider {name} ({package}) takes none of the "
            f"{sum(found.nodes.values())} nodes of the model: all of it would run on the CPU. "
            "Leave out --provider for that."
        )
    if execution.strict and found.on_cpu:
        raise EnvironmentProblemError(
            f"{found.described()}. --strict allows no part of a linexport op or a state there; "
            "leave it out to run the model so."
        )
    return session, found


def _placement(
    assigned: Any, graph: onnx.ModelProto, provider: str, package: str
) -> PlacementRecord:
    nodes: Counter[str] = Counter()
    on_cpu: dict[str, Counter[str]] = defaultdict(Counter)
    homes, kernels = _homes(graph), 0
    for part in assigned:
        nodes[part.ep_name] += len(part.get_nodes())
        # Nodes that a library of ours does not run are their functions' by now.
        kernels += sum(node.domain == DOMAIN for node in part.get_nodes())
        for node in part.get_nodes() if part.ep_name == ORT_CPU else ():
            home = _home(node, homes)
            if home:
                on_cpu[home][node.op_type] += 1
    return PlacementRecord(
        provider, package, dict(nodes), {home: dict(ops) for home, ops in on_cpu.items()}, kernels
    )


def _home(node: Any, homes: dict[str, str]) -> str:
    """Return the op or the states that a node of the record is of; "" for neither."""
    inside = _INSIDE.fullmatch(node.name)
    if inside:
        return "" if inside[2] == SHAPES else inside[1]
    moved = node.op_type == "Gather" and _PERMUTED.fullmatch(node.name)
    return homes.get(node.name, "" if moved else UNKNOWN)


def _homes(graph: onnx.ModelProto) -> dict[str, str]:
    """Return the op or the states that each node of the graph is of, by name; "" for neither."""
    nodes, found = graph.graph.node, {}
    shapes = {node.name for node in shape_arithmetic(nodes, graph.graph.initializer)}
    # In a graph whose functions were put in place, nodes of ops are like any others.
    other = "" if any(node.domain == DOMAIN for node in nodes) else UNKNOWN
    for node in nodes:
        states = ", ".join(name for name in node.output if name.startswith(STATE))
        rest = "" if node.name in shapes else other
        found[node.name] = node.op_type if node.domain == DOMAIN else states or rest
    found.pop("", None)
    return found
