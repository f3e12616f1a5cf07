"""The token and the layer at which a converted language model first differs from its original.

The original is run with its layers observed, and the graph with the value that each layer returns
as an extra output: values of the graph keep the names of the traced program's, whose nodes know the
submodule they come from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch

from linexport.graph import external_data
from linexport.manifest.proof import DivergenceRecord
from linexport.parity.cases import Case
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import compare_arrays
from linexport.parity.language.prompts import Prompt, draw_prompt
from linexport.parity.language.rows_alone import as_batch, as_rows, choices_by_row
from linexport.parity.reference import extra_outputs
from linexport.parity.reference.extra_outputs import OpenChanged
from linexport.parity.reference.module import Widened, passing
from linexport.parity.reference.plain_export import run_plain_export
from linexport.parity.routing.choices import recording
from linexport.parity.routing.near_ties import ForcedChoices
from linexport.parity.tolerances import Tolerance
from linexport.system import memory
from linexport.targets import InferenceSession
from linexport.trace import Traced

log = logging.getLogger(__name__)

AFTER = "after the last layer"


@memory.low_memory()
def first_layer(
    tested: ModelUnderTest,
    traced: Traced,
    path: Path,
    open_session: Callable[..., InferenceSession],
    case: Case,
) -> DivergenceRecord | None:
    """Layer, token, tensor and error of the first layer out of tolerance; None if it fails."""
    language, sizes = tested.loaded.language, case.sizes
    assert language is not None and traced.translated is not None
    prompt = draw_prompt(language.vocabulary, sizes["batch"], sizes["seq"], case.name, case.seed)
    names = returned_by(traced.translated, language.layers)
    try:
        feeds = tested.complete(prompt.part(0, sizes["seq"]))
        given = tuple(torch.from_numpy(values) for values in feeds.values())
        fed = {**feeds, **tested.initial_state(sizes["batch"])}
        opened = partial(open_session, low_memory=True)
        changed = partial(extra_outputs.open_changed, path, open_session=opened)
        got, choices = _run(changed, [*names.values()], fed, len(prompt.tokens))
        # With choices behind the first error, which are not near, the original goes on by its own.
        taken = ForcedChoices(choices_by_row(choices, prompt), near=tested.tolerance)
        with taken if choices else nullcontext():
            expected = observe(tested.loaded.module, prompt, list(names))
        nodes = external_data.read_graph(path).graph.node
    except Exception as error:  # the failure itself is reported already; this only adds to it
        log.info("where the artifact first differs was not found: %s", error)
        return None
    logits = tested.output_names[0]
    for layer, name in [*names.items(), (AFTER, logits)]:
        if name not in got or layer not in expected:
            continue
        both = prompt.real(expected[layer]), prompt.real(got[name])
        result = compare_arrays(*both, tested.tolerance)
        if not result.passed:
            node = next((n for n in nodes if name in n.output), onnx.NodeProto())
            plain = run_plain_export(tested, traced, (given, {}), prompt.real)
            row, position = first_token(expected[layer], got[name], prompt, tested.tolerance)
            return DivergenceRecord(
                tensor=name,
                node=node.name,
                op=node.op_type,
                max_relative_error=result.max_relative_error,
                worst=result.worst,
                layer=layer,
                row=row,
                position=position,
                plain_relative_error=plain.relative_error,
                plain_failure=plain.failure,
            )
    return None


def _run(
    changed: OpenChanged, values: Sequence[str], fed: Mapping[str, np.ndarray], batch: int
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Run the artifact once; returns its outputs with these values, and what it chose then."""
    session = recording(changed, values)
    if session is not None:
        return session.run(fed), [*session.choices(batch).values()]

    def expose(model: onnx.ModelProto) -> None:
        model.graph.output.extend(extra_outputs.outputs_of(model, values))

    return changed(expose).run(fed), []


def first_token(
    expected: np.ndarray, got: np.ndarray, prompt: Prompt, tolerance: Tolerance
) -> tuple[int, int | None]:
    """Row and position of the first token, by position, whose values are out of tolerance.

    Values of whole sequences, (B, width), have no position.
    """
    error = np.abs(np.float64(got) - expected).max(-1)
    if error.ndim == 1:
        limit = tolerance.absolute + tolerance.relative * np.abs(expected).max()
        return int((~(error <= limit)).argmax()), None
    limit = tolerance.absolute + tolerance.relative * np.abs(expected[prompt.mask == 1]).max()
    wrong = ~(error <= limit) & (prompt.mask == 1)
    position = int(wrong.any(0).argmax())
    return int(wrong[:, position].argmax()), position


def returned_by(program: torch.export.ExportedProgram, layers: Sequence[str]) -> dict[str, str]:
    """Return the last value that each layer computes, by the layer's name."""
    last: dict[str, str] = {}
    for node in program.graph.nodes:
        inside = {path for path, _ in (node.meta.get("nn_module_stack") or {}).values()}
        for layer in inside.intersection(layers):
            last[layer] = node.name
    return {layer: last[layer] for layer in layers if layer in last}


def observe(
    module: torch.nn.Module,
    prompt: Prompt,
    layers: list[str],
    given: Mapping[str, np.ndarray] | None = None,
    inside: tuple[str, AbstractContextManager[object]] | None = None,
    alone: bool = False,
) -> dict[str, np.ndarray]:
    """Return the outputs of the original's layers (B, T, width), and its logits.

    Each row of a padded prompt is run alone, see ``alone.as_batch`` for what padding has then.

    Args:
        module: the original, in any precision.
        prompt: what it is run on.
        layers: names of submodules.
        given: what every layer is to hand on, by name, in place of what it computes: each is then
            run on these inputs.
        inside: a layer, and a context that it is computed in.
        alone: run that layer only: those before it hand on what is given, and what comes after it
            is left out. That is the same where layers share nothing but what they hand on.
    """
    rows, own = prompt.rows(), {n: as_rows(x, prompt.mask) for n, x in (given or {}).items()}
    found = []
    for number, row in enumerate(rows):
        begins = None if given is None else {name: x[number] for name, x in own.items()}
        found.append(_observe(module, row, layers, begins, inside, alone))
    batches = [as_batch([x[name] for x in found], prompt.mask) for name in found[0]]
    return dict(zip(found[0], memory.memory_mapped(batches), strict=True))


def _observe(
    module: torch.nn.Module,
    prompt: Prompt,
    layers: list[str],
    given: Mapping[str, np.ndarray] | None,
    inside: tuple[str, AbstractContextManager[object]] | None,
    alone: bool,
) -> dict[str, np.ndarray]:
    """Observe the original once; arguments as of ``observe``."""
    seen: dict[str, np.ndarray] = {}
    last = inside[0] if inside is not None and alone else None

    def keep(layer: str) -> Callable[..., Any]:
        def hook(_module: Any, _args: Any, output: Any) -> object:
            first = output[0] if isinstance(output, tuple) else output
            seen[layer] = memory.memory_mapped([first.numpy()])[0]
            if layer == last:
                raise _ReachedError
            if given is None:
                return None
            other = torch.from_numpy(given[layer]).to(first.dtype)
            return (other, *output[1:]) if isinstance(output, tuple) else other

        return hook

    dtype = module_dtype(module)
    handles = [module.get_submodule(name).register_forward_hook(keep(name)) for name in layers]
    if inside is not None:
        handles += _within(module.get_submodule(inside[0]), inside[1])
    before = layers[: layers.index(last)] if last is not None and given is not None else []
    wide = Widened() if dtype == torch.float64 else nullcontext()
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        for name in before:
            assert given is not None
            handed_on = torch.from_numpy(given[name]).to(dtype)
            stack.enter_context(_handing_on(module.get_submodule(name), handed_on))
        stack.enter_context(suppress(_ReachedError))
        with torch.no_grad(), passing(), wide:
            logits = module(torch.from_numpy(prompt.tokens), torch.from_numpy(prompt.mask))
        seen[AFTER] = memory.memory_mapped([logits.numpy()])[0]
    return seen


class _ReachedError(Exception):
    """The layer that is observed alone was run."""


@contextmanager
def _handing_on(layer: torch.nn.Module, value: torch.Tensor) -> Iterator[None]:
    """Have a layer return a value in place of what it computes."""
    with mock.patch.object(layer, "forward", lambda *_, **__: value):
        yield


def _within(
    layer: torch.nn.Module, context: AbstractContextManager[object]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Have a module computed in a context; returns what is to be removed."""

    def begin(*_: object) -> None:
        context.__enter__()

    def end(*_: object) -> None:
        context.__exit__(None, None, None)

    return [
        layer.register_forward_pre_hook(begin),
        layer.register_forward_hook(end, prepend=True, always_call=True),
    ]


def module_dtype(module: torch.nn.Module) -> torch.dtype:
    """Return the dtype of a module's first floating-point parameter."""
    return next(p.dtype for p in module.parameters() if p.is_floating_point())
