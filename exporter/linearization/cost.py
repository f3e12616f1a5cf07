"""Costs of original and linear form: numbers stored, multiply-adds, time and memory by length.

Both are exported alike and run in ONNX Runtime, and in eager PyTorch, whose softmax attention is
the fastest there is on this machine at some lengths. The linear form wins at a length if its export
is faster than the original in either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from linexport import targets, trace
from linexport.errors import LinexportError
from linexport.graph import dims as dimensions
from linexport.graph.dims import DimRange
from linexport.graph.interface import input_records
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention, MemoryAttention
from linexport.linearization.window_forms import WindowForm
from linexport.manifest.linearization_records import (
    FormCosts,
    FormMemory,
    FormTimes,
    MultiplyAdds,
    ParameterCounts,
)
from linexport.manifest.records import InputRecord, named
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.reference.module import feeds
from linexport.sources.loaded_model import LoadedModel
from linexport.system.npz import save_npz
from linexport.targets import InferenceSession
from linexport.timing.export import TARGET, export
from linexport.timing.latency import Call, Settings, interleaved
from linexport.timing.peak_memory import peak_megabytes

TIMED_LENGTHS = (64, 256, 1024, 4096)
MEMORY_FROM = 1024
SHORT = 8
LEAD_IN = 2
"""Uncounted calls at every turn: a model that is in use has its threads awake, its weights near."""


def parameters(original: nn.Module, linear: LoadedModel) -> tuple[ParameterCounts, LoadedModel]:
    """Numbers stored; and the linear form, with its program where it had to be exported.

    Only pseudo-keys leave numbers behind that nothing computes with: keys and values of before.

    Raises:
        LinexportError: torch cannot export it; see ``export_program``.
    """
    ids = {id(x) for x in (*original.parameters(), *original.buffers())}
    stored = [*linear.module.parameters(), *linear.module.buffers()]
    exported = None
    if any(isinstance(module, MemoryAttention) for module in linear.module.modules()):
        program = trace.export_program(linear)
        linear, exported = replace(linear, program=program), _numbers_used(program)
    counts = ParameterCounts(
        original=sum(x.numel() for x in (*original.parameters(), *original.buffers())),
        linear=sum(x.numel() for x in stored),
        not_shared=sum(x.numel() for x in stored if id(x) not in ids),
        exported=exported,
    )
    return counts, linear


def _numbers_used(program: torch.export.ExportedProgram) -> int:
    """Numbers in parameters, buffers and constants on which an output depends."""
    nodes = list(program.graph.nodes)
    used = {node for node in nodes if node.op == "output"}
    for node in reversed(nodes):
        if node in used:
            used |= set(node.all_input_nodes)
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = {**program.state_dict, **program.constants}
    found = {names[node.name] for node in used if node.name in names}
    return sum(tensors[name].numel() for name in found)


def softmax_multiply_adds(site: Site, length: int) -> int:
    """Multiply-adds of q k^T and the weighted sum, for one row: quadratic in the length."""
    keys = site.keys if site.cross else length
    return site.heads * length * keys * (site.head_dim + site.value_dim)


def form_multiply_adds(site: Site, form: nn.Module, length: int) -> int:
    """Multiply-adds of a linear form for one row: 2 M (d_v + 1) a token and head, and both maps.

    A window adds w (d + d_v) for w keys.
    """
    if isinstance(form, MemoryAttention):
        rows = form.memory.keys.shape[1]
        return site.heads * length * rows * (site.head_dim + site.value_dim)
    assert isinstance(form, KernelAttention)
    m, keys = form.feature_map.features, site.keys if site.cross else length
    matrices = sum(x.numel() for x in form.feature_map.frozen() if x.dim() == 2)
    one_map = max(m, matrices)
    per_query = m * (site.value_dim + 1) + one_map
    near = 0
    if isinstance(form, WindowForm):
        rows = min(form.window.window + form.window.sinks, length)
        near = site.heads * length * rows * (site.head_dim + site.value_dim)
    return near + site.heads * length * per_query + site.kv_heads * keys * per_query


def multiply_adds(site: Site, form: nn.Module | None, length: int) -> MultiplyAdds:
    """Return the counts before and after at one length; without a form both are equal."""
    before = softmax_multiply_adds(site, length)
    after = before if form is None else form_multiply_adds(site, form, length)
    return MultiplyAdds(length, before, after)


class Curves:
    """Measures both forms at several lengths, batch 1.

    Raises:
        LinexportError: one of them does not export; nothing can be measured then.
    """

    def __init__(
        self, original: LoadedModel, linear: LoadedModel, folder: Path, threads: int, seed: int
    ) -> None:
        self.original, self.seed, self.folder = original, seed, folder
        self.modules = {"original_pytorch": original.module, "linear_pytorch": linear.module}
        self.settings = Settings(warmup=2, repeats=9, seconds=1.5, threads=threads, lead_in=LEAD_IN)
        traced = trace.trace(original)
        self.paths = {
            "original": export(traced, folder / "original"),
            "linear": export(trace.trace(linear), folder / "linear"),
        }
        target = targets.find_target(TARGET)
        self.sessions = {
            name: target.open(path, threads=threads, taking_turns=True, native=True)
            for name, path in self.paths.items()
        }
        self.inputs = input_records(traced.graph.graph.input)
        self.dims, self.traced = traced.dims, traced.example_sizes
        rows = _rows(self.inputs, self.dims)
        self.sequence = dimensions.sequence(self.dims) or rows
        self.over: Literal["tokens", "rows"] = (
            "rows" if rows is not None and self.sequence == rows else "tokens"
        )

    def lengths(self, requested: Sequence[int] | None) -> tuple[list[int], str | None]:
        """Lengths that the model takes; its only one, where that is fixed.

        Returns:
            The lengths, and why some requested ones are not among them.
        """
        if self.sequence is None:
            shapes = [named(i.shape) for i in self.inputs]
            only = next((s[1] for s in shapes if len(s) > 1 and isinstance(s[1], int)), 1)
            left = [n for n in requested or () if n != only]
            taken = f"this model's inputs are of one size, {only:,}, at which it was measured"
            return [only], _left_out(left, taken)
        limits = self.dims[self.sequence]
        found = [n for n in requested or TIMED_LENGTHS if limits.allows(n)]
        found = found or [limits.nearest(self.traced[self.sequence])]
        left = [n for n in requested or () if n not in found]
        most = "" if limits.max is None else f" to {limits.max:,}"
        multiple = "" if limits.multiple == 1 else f", multiples of {limits.multiple:,}"
        taken = f"this model takes lengths from {limits.min:,}{most}{multiple}"
        return found, _left_out(left, taken)

    def time(self, length: int) -> FormTimes:
        """Median milliseconds of each, in turns."""
        (args, kwargs), fed = self._feeds(length)

        def exported(session: InferenceSession) -> Call:
            return lambda: session.run(fed)

        @torch.no_grad()
        def eager(module: nn.Module) -> object:
            return module(*args, **kwargs)

        calls = {name: exported(session) for name, session in self.sessions.items()}
        calls |= {name: partial(eager, module) for name, module in self.modules.items()}
        took = interleaved(calls, self.settings)
        row = {f"{n}_ms": round(float(np.median(found)), 4) for n, found in took.items()}
        return FormTimes(length, **row)

    def memory(self, length: int) -> FormMemory:
        """Peak megabytes of one run of each in ONNX Runtime, in processes of their own."""
        files = (self.folder / f"full-{length}.npz", self.folder / f"short-{length}.npz")
        for path, size in zip(files, (length, min(SHORT, length)), strict=True):
            save_npz(path, self._feeds(size)[1])
        found = {
            name: peak_megabytes("onnx", str(path), *files, TARGET)
            for name, path in self.paths.items()
        }
        reason = next((why for _, why in found.values() if why), None)
        return FormMemory(length, found["original"][0], found["linear"][0], reason)

    def _feeds(self, length: int) -> tuple[tuple[Any, ...], dict[str, np.ndarray]]:
        sizes = {
            name: limits.nearest(1 if limits.batch else self.traced[name])
            for name, limits in self.dims.items()
        }
        if self.sequence is not None:
            sizes[self.sequence] = length
        case = Case("timing", sizes, self.seed)
        inputs = draw_inputs(self.original, [named(i.shape) for i in self.inputs], case)
        return inputs, feeds(inputs, [i.name for i in self.inputs])


def curves(
    original: LoadedModel,
    linear: LoadedModel,
    lengths: Sequence[int] | None,
    threads: int,
    seed: int,
) -> FormCosts:
    """Measure both forms; or say for what ``reason`` that is not possible."""
    with tempfile.TemporaryDirectory() as place:
        try:
            found = Curves(original, linear, Path(place), threads, seed)
        except LinexportError as error:
            return FormCosts(reason=str(error))
        sizes, left_out = found.lengths(lengths)
        latency = [found.time(n) for n in sizes]
        memory = [found.memory(n) for n in sizes if n >= MEMORY_FROM] or [found.memory(sizes[-1])]
    return FormCosts(
        latency=tuple(latency),
        memory=tuple(memory),
        crossover=crossover(latency),
        lengths_left_out=left_out,
        over=found.over,
    )


def _rows(inputs: Sequence[InputRecord], dims: Mapping[str, DimRange]) -> str | None:
    """The batch of a model of (batch, features) alone: its rows are what others' tokens are."""
    shapes = [named(one.shape) for one in inputs]
    first = {str(shape[0]) for shape in shapes if len(shape) == 2}
    (name,) = first if len(first) == 1 and all(len(s) == 2 for s in shapes) else ("",)
    return name if name in dims else None


def _left_out(lengths: Sequence[int], taken: str) -> str | None:
    if not lengths:
        return None
    named = ", ".join(f"{n:,}" for n in lengths)
    return f"{'Length' if len(lengths) == 1 else 'Lengths'} {named} not measured: {taken}."


def crossover(rows: Sequence[FormTimes]) -> int | None:
    """The measured length from which the linear form is the faster one, there and beyond."""
    wins = [r.linear_ms < r.best_original_ms for r in rows]
    best = None
    for row, won in reversed(list(zip(rows, wins, strict=True))):
        if not won:
            break
        best = row.length
    return best
