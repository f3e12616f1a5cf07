"""Opening a model in ONNX Runtime: by which provider, and by which library of ours.

CPU         by the CPU library where that is asked for and runs it, else by functions
CUDA        nodes that carry kernels by the CUDA library, else by functions; with CUDA graphs
where no state grows and all of the model can be captured, else without
any other   by functions
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

from linexport.manifest.placement import ORT_CPU, PlacementRecord
from linexport.plugins.cpu import library as cpu_library
from linexport.plugins.cuda import library as cuda_library
from linexport.targets import definitions, ort_graphs, placement
from linexport.targets.kept_logits import with_kept_logits
from linexport.targets.ort_options import changed_graph, with_graph
from linexport.targets.providers import CPU, CUDA, Execution

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
    """

    inner: Any
    native: bool = False
    captures: bool = False
    placement: PlacementRecord | None = None


def opened(
    model: Path | bytes,
    options: Options,
    threads: int,
    execution: Execution,
    native: bool,
    logits: str | None = None,
) -> Opened:
    """Open a model; arguments and errors are those of ``OrtSession``."""
    source: bytes | str = model if isinstance(model, bytes) else str(model)
    if execution.provider != CPU:
        return _on_provider(source, options, threads, execution)
    if native:
        found = _tried(
            "by the CPU library", lambda: _by_cpu_library(source, options(), threads, logits)
        )
        if found is not None:
            return found
    kept, chosen = partial(_keeping, logits=logits), options()
    try:
        return Opened(_on_cpu(with_graph(source, chosen, kept) if logits else source, chosen))
    except NotImplemented:
        chosen = options()
        defined = with_graph(source, chosen, lambda model: definitions.defined(kept(model)))
        return Opened(_on_cpu(defined, chosen))


def _tried(how: str, opening: Callable[[], Opened | None]) -> Opened | None:
    try:
        return opening()
    except Exception as error:  # ONNX Runtime has no class for its own
        log.info("The model is not run %s: %s", how, error)
        return None


def _on_cpu(source: bytes | str, options: Any) -> Any:
    return onnxruntime.InferenceSession(source, options, [ORT_CPU])


def _by_cpu_library(
    source: bytes | str, options: Any, threads: int, logits: str | None
) -> Opened | None:
    if not cpu_library.register(options, threads):
        return None
    change = partial(_for_cpu_library, logits=logits)
    changed = with_graph(source, options, change)
    return Opened(_on_cpu(changed, options), native=True)


def _keeping(model: onnx.ModelProto, logits: str | None) -> onnx.ModelProto:
    return model if logits is None else with_kept_logits(model, logits)


def _for_cpu_library(model: onnx.ModelProto, logits: str | None) -> onnx.ModelProto:
    from linexport.targets.tokenwise import with_programs
    from linexport.targets.tokenwise.chains import with_chains

    cpu_library.check_nodes(model)
    return with_chains(with_programs(_keeping(model, logits)))


def _on_provider(
    source: bytes | str, options: Options, threads: int, execution: Execution
) -> Opened:
    adapted = partial(placement.adapted, provider=execution.provider)
    given, graph, settings = changed_graph(source, adapted)

    def opening(native: bool, captures: bool) -> Opened:
        chosen = options()
        for name, value in settings.items():
            chosen.add_session_config_entry(name, value)
        if native:
            cuda_library.register(chosen)
        more = ort_graphs.SETTING if captures else {}
        inner, found = placement.open_placed(given, graph, chosen, execution, threads, more)
        return Opened(inner, native, captures, found)

    *ways, last = _ways(graph) if execution.provider == CUDA else [(False, False)]
    for native, captures in ways:
        how = f"by {'the CUDA library' if native else 'functions'}"
        how += " with CUDA graphs" if captures else ""
        made = _tried(how, partial(opening, native, captures))
        if made is not None:
            return made
    return opening(*last)


def _ways(model: onnx.ModelProto) -> list[tuple[bool, bool]]:
    """Return how CUDA may run a model, best first: by the CUDA library, and with CUDA graphs."""
    from linexport.plugins.kernels.description import carried_by  # conversions for a CPU need none

    native = any(map(carried_by, model.graph.node)) and cuda_library.find() is not None
    captures = ort_graphs.are_possible(model)
    ways = [(True, True), (True, False), (False, True), (False, False)]
    return [way for way in ways if (native or not way[0]) and (captures or not way[1])]
