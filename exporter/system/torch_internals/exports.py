"""torch's exporters: work of theirs that is left out, and state that they keep.

A small model took half of the time of its translation for work that does not depend on it:

- The source of some 500 translations is parsed for every export, always with the same outcome.
- The composite operators are looked up in the dispatcher once for each namespace of operators,
  some thirty times, for each of two tables, and replaced on every kind of device that torch knows.
- The pass that makes casts explicit computes every value of the program again, to know its type.
  The program states it.
- Results of operators on fake tensors are kept and looked up by their inputs. Where sizes are
  symbols a look-up costs more than the operator.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from unittest import mock

import torch
from torch.fx import Node

from linexport.system.torch_internals import Internal
from linexport.system.torch_internals.compiled import functions_uncompiled
from linexport.system.untyped import Keywords, TorchCallable, TorchInternal

SLOWER = "left alone: every export takes longer"

TRANSLATIONS = Internal(
    "torch.onnx._internal.exporter._registration",
    "ONNXRegistry.from_torchlib",
    "reads the table of ONNX translations once a process",
    SLOWER,
)
DECOMPOSITIONS = Internal(
    "torch.onnx._internal.exporter._decomp",
    "create_onnx_friendly_decomposition_table",
    "decomposes operators on complex numbers",
)
TRANSLATED = Internal(
    "torch.onnx._internal.exporter._decomp",
    "get_onnx_implemented_overloads",
    "decomposes operators that torch.onnx does not translate",
)
SECOND_TRACE = Internal(
    "torch.onnx._internal.exporter._fx_passes",
    "decompose_with_registry",
    "traces a program a second time only where an operator is to be decomposed",
    SLOWER,
)
COMPOSITES = Internal(
    "torch._export.utils",
    "_materialize_cpp_cia_ops",
    "asks for the composite operators once a process",
    SLOWER,
)
ALIAS_KEYS = Internal(
    "torch.export.exported_program",
    "_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE",
    "decomposes operators on devices that a model may be on",
    SLOWER,
)
BACKEND_KEYS = Internal(
    "torch.export.exported_program",
    "_BACKEND_KEYS_TO_OVERRIDE",
    "decomposes operators on devices that a model may be on",
    SLOWER,
)
PROMOTION = Internal(
    "torch.onnx._internal.fx.passes.type_promotion",
    "_TypePromotionInterpreter.run_node",
    "takes the types of values from the program",
    SLOWER,
)
PROMOTING = tuple(
    replace(PROMOTION, name=name)
    for name in (
        "get_type_promotion_rule",
        "_TypePromotionInterpreter._set_current_node",
        "_TypePromotionInterpreter._maybe_promote_node",
    )
)
FAKE_CACHE = Internal(
    "torch._dynamo.config",
    "fake_tensor_cache_enabled",
    "traces without a cache that costs more than it saves",
    SLOWER,
)
CONTROL_FLOW = Internal(
    "torch._higher_order_ops.utils",
    "_hop_compile_and_call",
    "runs cond, while_loop and scan as they are",
    "torch compiles them first, which fails in torch 2.13.0 once a module was exported",
)
SCAN = Internal(
    "torch._higher_order_ops.associative_scan",
    "associative_scan",
    "traces scans of PyTorch as loops over tokens",
    "torch traces them as trees, for one length",
)
SOLVER = Internal(
    "torch.fx.experimental.symbolic_shapes",
    "DimConstraints.solve",
    "traces models with relations of sizes that sympy cannot solve",
    "such models cannot be traced",
)
FAKE_TENSOR = Internal(
    "torch._subclasses.fake_tensor", "FakeTensor", "computes the shapes of nodes it writes"
)
DISPATCHER = Internal(
    "torch._dispatch.python", "enable_python_dispatcher", "computes the shapes of nodes it writes"
)

log = logging.getLogger(__name__)

LOGS = {
    "sizes": "torch.fx.experimental.symbolic_shapes",
    "trace": "torch.export._trace",
    "values": "torch._subclasses.fake_tensor",
    "events": "torch.__trace",
}
"""Names of torch's own logs; a log of another name is not silenced, or not read."""

Decompositions = Mapping[TorchInternal, Callable[..., TorchInternal]]
"""Functions that compute what an operator does by other operators."""

DEVICES = ("CPU", "CUDA", "MPS", "Meta", "XPU")
"""Devices that a model may be on, as torch's dispatcher calls them."""

_exporting = threading.RLock()
_tables: dict[tuple[int, bool], TorchInternal] = {}


@contextmanager
def _replaced(internal: Internal, change: Callable[[TorchInternal], object]) -> Iterator[None]:
    """Put something else in the place of a name of torch; do nothing where it is gone."""
    place = internal.holder()
    if place is None:
        yield
        return
    owner, name = place
    with mock.patch.object(owner, name, change(getattr(owner, name))):
        yield


@contextmanager
def translations_read_once() -> Iterator[None]:
    """Give every export inside a copy of one table of ONNX translations."""
    with _exporting, _replaced(TRANSLATIONS, _once):
        yield


def _once(original: TorchCallable) -> staticmethod[[int], object]:
    def from_torchlib(opset_version: int) -> object:
        # torchvision's operators are in the table only once it has been imported.
        key = opset_version, "torchvision" in sys.modules
        if key not in _tables:
            _tables[key] = original(opset_version=opset_version)
        if not hasattr(_tables[key], "functions"):
            return original(opset_version=opset_version)
        # A copy, to which an export adds translations of its own.
        fresh = copy.copy(_tables[key])
        fresh.functions = {target: list(f) for target, f in _tables[key].functions.items()}
        return fresh

    return staticmethod(from_torchlib)


def decompositions(opset: int, translated: Collection[object]) -> TorchInternal:
    """Return the decompositions of what ``torch.onnx`` does not translate.

    Args:
        opset: of the translations.
        translated: operators that are translated besides its own.

    Raises:
        EnvironmentProblemError: this torch has no such table.
    """
    translations = TRANSLATIONS.need()(opset)
    return DECOMPOSITIONS.need()({*TRANSLATED.need()(translations), *translated})


@contextmanager
def work_left_out() -> Iterator[None]:
    """Leave work of ``torch.onnx.export`` out that nothing is made of."""
    with _exporting, ExitStack() as restore:
        for internal, change in CHANGES:
            restore.enter_context(_replaced(internal, change))
        yield


@contextmanager
def traced_once(
    prepared: Callable[
        [torch.export.ExportedProgram, Collection[TorchInternal], Decompositions],
        torch.export.ExportedProgram | None,
    ],
) -> Iterator[None]:
    """Leave the second trace of a program out of ``torch.onnx.export`` where another way is known.

    Args:
        prepared: gives the program to translate in place of one, of the operators that are
            translated and the decompositions of others; None for one that is to be traced again.
    """
    table, implemented = DECOMPOSITIONS.find(), TRANSLATED.find()

    def change(original: Callable[..., TorchInternal]) -> Callable[..., TorchInternal]:
        def decompose(program: TorchInternal, translations: TorchInternal) -> TorchInternal:
            translated = set(implemented(translations))
            found = prepared(program, translated, table(translated))
            return original(program, translations) if found is None else found

        return decompose if table and implemented else original

    with _exporting, _replaced(SECOND_TRACE, change):
        yield


def _of_devices(keys: list[TorchInternal]) -> list[object]:
    """Return the dispatch keys of ``DEVICES`` alone."""
    return [key for key in keys if key.name.removeprefix("Autograd") in DEVICES]


def _promoted(original: Callable[..., object]) -> Callable[[object, Node], object]:
    """Return ``run_node`` that adds the casts of a node, and takes its value from the program."""
    type_promotion = importlib.import_module(PROMOTION.module)
    if not all(part.find() for part in PROMOTING):
        return original

    def run_node(interpreter: TorchInternal, node: Node) -> object:
        if node.op != "call_function" or "val" not in node.meta:
            return original(interpreter, node)
        with interpreter._set_current_node(node):
            rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
            if rule:
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]  # a node with casts was run, and has the value of that

    return run_node


CHANGES: tuple[tuple[Internal, Callable[[TorchInternal], object]], ...] = (
    (COMPOSITES, cache),
    (ALIAS_KEYS, _of_devices),
    (BACKEND_KEYS, _of_devices),
    (PROMOTION, _promoted),
)


@contextmanager
def without_fake_cache() -> Iterator[None]:
    """Trace without the cache of results on fake tensors.

    Without it, eight small attention modules are traced in 17.9 s of CPU instead of 24.3, and a
    Qwen3.5 of four layers in 23.2 instead of 25.1.
    """
    found = FAKE_CACHE.find()
    with nullcontext() if found is None else _config().patch(fake_tensor_cache_enabled=False):
        yield


@contextmanager
def unsolved_left_open() -> Iterator[None]:
    """Leave relations of sizes open that torch asks sympy to solve, and sympy cannot.

    Such as that of every second token of every second, beside that of a convolution's. torch looks
    for sizes that it would have to fix; the comparison with the original shows whether it has.
    """

    def change(original: Callable[[object], None]) -> Callable[[object], None]:
        def solve(constraints: object) -> None:
            try:
                original(constraints)
            except NotImplementedError as error:
                log.info("a relation of sizes is not solved: %s", error)

        return solve

    with _replaced(SOLVER, change):
        yield


def _config() -> TorchInternal:
    return importlib.import_module(FAKE_CACHE.module)


@contextmanager
def control_flow_as_it_is() -> Iterator[None]:
    """Run ``torch.cond``, ``while_loop``, ``scan`` and compiled functions as they are written."""

    def call(
        fn: Callable[..., object], args: Sequence[TorchInternal], kwargs: Keywords | None = None
    ) -> TorchInternal:
        return fn(*args, **(kwargs or {}))

    with _replaced(CONTROL_FLOW, lambda _: call), functions_uncompiled():
        yield


def fake_mode(value: object) -> TorchInternal:
    """Return the context in which torch made a value for its shape alone; None of any other value.

    Raises:
        EnvironmentProblemError: this torch has no such values.
    """
    fake = isinstance(value, FAKE_TENSOR.need())
    return FAKE_TENSOR.of(value, "fake_mode") if fake else None


def dispatching() -> TorchCallable:
    """Return the context in which operators take values that have shapes alone.

    Raises:
        EnvironmentProblemError: this torch has no such context.
    """
    found: TorchCallable = DISPATCHER.need()
    return found
