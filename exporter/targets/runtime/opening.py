"""Opening a model in ONNX Runtime: by which provider, and by which library of ours.

CPU         by the CPU library where that is requested and runs it, its calls appending to caches
of keys and values; else by functions
CUDA        nodes that carry kernels by the CUDA library, else by functions; with CUDA graphs
where no state grows and all of the model can be captured, else without
any other   by functions
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

from linexport.graph.external_data import ModelSource
from linexport.manifest.placement import ORT_CPU, PlacementRecord
from linexport.plugins.cpu import library as cpu_library
from linexport.plugins.cuda import library as cuda_library
from linexport.system.time_limit import opening
from linexport.targets.lowering import op_functions
from linexport.targets.lowering.kept_logits import with_kept_logits
from linexport.targets.lowering.transposed_weights import with_transposed_weights
from linexport.targets.runtime import cuda_graphs, placement
from linexport.targets.runtime.options import changed_graph, given
from linexport.targets.runtime.providers import CPU, CUDA, PROVIDERS, Execution

if TYPE_CHECKING:
    from linexport.targets.cpu_fusion.cache_capacity import Caches

log = logging.getLogger(__name__)

Options = Callable[[], Any]
"""Makes an ``onnxruntime.SessionOptions``: those of a session that was not opened are not used."""


@dataclass(frozen=True)
class Opened:
    """A session.

    Attributes:
        inner: an ``onnxruntime.InferenceSession``.
        native: whether a library of ours runs nodes of it.
        captures: whether it captures calls as CUDA graphs; see ``ort_graphs``.
        placement: what the execution provider runs; None for the CPU.
        caches: that its calls append to; None where they make new ones.
    """

    inner: Any
    native: bool = False
    captures: bool = False
    placement: PlacementRecord | None = None
    caches: Caches | None = None


def opened(
    model: ModelSource,
    options: Options,
    threads: int,
    execution: Execution,
    native: bool,
    logits: str | None = None,
) -> Opened:
    """Open a model; arguments and errors are those of ``OrtSession``."""
    if execution.provider != CPU:
        keeps = PROVIDERS[execution.provider].keeps_logits
        return _on_provider(model, options, threads, execution, logits if keeps else None)
    if native:
        found = _tried(
            "by the CPU library", lambda: _by_cpu_library(model, options(), threads, logits)
        )
        if found is not None:
            return found
    kept = partial(_for_cpu, logits=logits)
    try:
        return Opened(_on_cpu(changed_graph(model, kept)[0], options()))
    except NotImplemented:
        defined = changed_graph(model, lambda graph: op_functions.defined(kept(graph)))[0]
        return Opened(_on_cpu(defined, options()))


def _tried(how: str, opening: Callable[[], Opened | None]) -> Opened | None:
    try:
        return opening()
    except Exception as error:  # ONNX Runtime has no class for its own
        log.info("The model is not run %s: %s", how, error)
        return None


def _on_cpu(model: ModelSource, options: object) -> object:
    with opening(options):
        return onnxruntime.InferenceSession(given(model, options), options, [ORT_CPU])


def _by_cpu_library(
    model: ModelSource, options: object, threads: int, logits: str | None
) -> Opened | None:
    if not cpu_library.register(options, threads):
        return None
    found: list[Caches] = []
    changed = changed_graph(model, partial(_for_cpu_library, logits=logits, found=found))[0]
    return Opened(_on_cpu(changed, options), native=True, caches=next(iter(found), None))


def _keeping(model: onnx.ModelProto, logits: str | None) -> onnx.ModelProto:
    return model if logits is None else with_kept_logits(model, logits)


def _for_cpu(model: onnx.ModelProto, logits: str | None) -> onnx.ModelProto:
    return with_transposed_weights(_keeping(model, logits))


def _for_cpu_library(
    model: onnx.ModelProto, logits: str | None, found: list[Caches]
) -> onnx.ModelProto:
    """Return a model as the CPU library runs it; ``found`` gets the caches that calls append to."""
    from linexport.targets.cpu_fusion import with_programs
    from linexport.targets.cpu_fusion.cache_capacity import find_caches, with_capacity
    from linexport.targets.cpu_fusion.chains import with_chains
    from linexport.targets.cpu_fusion.integer_products import with_integer_products

    cpu_library.check_nodes(model)
    made = with_programs(_for_cpu(model, logits))
    caches = find_caches(made)
    if caches is not None:
        made = with_capacity(made, caches)
        found.append(caches)
    return with_integer_products(with_chains(made))


def _on_provider(
    model: ModelSource, options: Options, threads: int, execution: Execution, logits: str | None
) -> Opened:
    def adapted(graph: onnx.ModelProto) -> onnx.ModelProto:
        return placement.adapted(_keeping(graph, logits), execution.provider)

    changed, graph = changed_graph(model, adapted)

    def way(native: bool, captures: bool) -> Opened:
        chosen = options()
        if native:
            cuda_library.register(chosen)
        more = cuda_graphs.SETTING if captures else {}
        source = given(changed, chosen)
        inner, found = placement.open_placed(source, graph, chosen, execution, threads, more)
        return Opened(inner, native, captures, found)

    *ways, last = _ways(graph) if execution.provider == CUDA else [(False, False)]
    for native, captures in ways:
        how = f"by {'the CUDA library' if native else 'functions'}"
        how += " with CUDA graphs" if captures else ""
        made = _tried(how, partial(way, native, captures))
        if made is not None:
            return made
    return way(*last)


def _ways(model: onnx.ModelProto) -> list[tuple[bool, bool]]:
    """Return how CUDA may run a model, best first: by the CUDA library, and with CUDA graphs."""
    from linexport.plugins.kernels.description import carried_by  # conversions for a CPU need none

    native = any(map(carried_by, model.graph.node)) and cuda_library.find() is not None
    captures = cuda_graphs.are_possible(model)
    ways = [(True, True), (True, False), (False, True), (False, False)]
    return [way for way in ways if (native or not way[0]) and (captures or not way[1])]
