"""artifact, original -> the first value, token and state that differ, and a folder that repeats it.

outputs differ?  ->  bisection over the graph  ->  the node alone, on the original's inputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch

from linexport import parity, targets, trace
from linexport.artifact.checked import checked_artifact
from linexport.artifact.signature import Trust
from linexport.conversion.context import Checks
from linexport.conversion.revalidate import reopen
from linexport.debugging.cut import cut
from linexport.debugging.differences import Differences, StateFinding, ValueFinding, Verdict
from linexport.debugging.first_state import first_split, first_state
from linexport.debugging.overlay import errors, write_overlay
from linexport.debugging.repro import write_repro
from linexport.errors import UsageError
from linexport.graph import dims, external_data
from linexport.manifest import MODEL, Manifest
from linexport.manifest.records import BUFFER
from linexport.parity.bisection import Found
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.compare import largest
from linexport.parity.diverge import BothValues, as_near
from linexport.parity.first_token import first_token, token_axis
from linexport.parity.language.prompts import NONE, PADDINGS, draw_prompt
from linexport.parity.language.rows_alone import as_batch, as_rows
from linexport.parity.reference.module import feeds
from linexport.parity.reference.values import original_values
from linexport.parity.routing.choices import choices_of
from linexport.plugins.ops.registry import known_shapes
from linexport.sources import LoadedModel
from linexport.system.progress import Progress, Silent, Stopwatch
from linexport.system.torch_internals.trees import pytree
from linexport.targets.base import OrtSession, uses_library
from linexport.timing.nodes import node_times

LENGTH = 37
"""Tokens of the inputs where no check failed before: a multiple of no chunk."""


@dataclass(frozen=True)
class _Inputs:
    """Inputs of one case.

    Attributes:
        case: its sizes and its seed.
        leaves: flattened inputs of the traced program.
        fed: inputs of the artifact, states among them.
        mask: 1 for a token and 0 for padding, (B, T); None where every token counts.
    """

    case: Case
    leaves: list[object]
    fed: Mapping[str, np.ndarray]
    mask: np.ndarray | None = None

    def kept(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return which elements of a value are of tokens and not padding, (B, T) as bool.

        None where all count: without padding, or where the value is not (B, T, ...).
        """
        if self.mask is None or shape[:2] != self.mask.shape:
            return None
        return self.mask.astype(bool)


def debug(
    artifact: str | Path,
    *,
    source: str | Path | LoadedModel | None = None,
    output: str | Path | None = None,
    overlay: str | Path | None = None,
    length: int | None = None,
    seed: int | None = None,
    tolerance: float | None = None,
    threads: int = 0,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    trust: Trust | None = None,
) -> Differences:
    """Find the first value, token and state of an artifact that differ from its original.

    The inputs are those of the smallest case that failed when parity was last checked, or of
    ``length`` tokens.

    Args:
        artifact: the folder; one that failed its parity check, too.
        source: the original, where it is not at the place the manifest names, or is a function.
        output: a new folder for what repeats the first wrong value; None: none is written.
        overlay: a new folder for the time and the error of every node, as node data of Model
            Explorer; None: none is written.
        length: tokens; None for those of the case that failed.
        seed: of the inputs; None for that of the case that failed.
        tolerance: relative error allowed of every value; None for that of the precision.
        threads: 0 for the runtime's choice.
        trust_remote_code: run Python code that the source brings along.
        progress: shown the stages.
        trust: whose artifacts are searched; None for anybody's.

    Raises:
        UsageError: not an artifact, or the source is missing or not the one it was made from.
        SignatureError: it is not as one who is trusted signed it.
    """
    folder, watch = Path(artifact), Stopwatch(progress or Silent())
    checked = checked_artifact(folder, trust)
    manifest = checked.manifest
    tested = reopen(checked, source, threads, trust_remote_code, watch)
    tested = Checks(relative=tolerance).applied(tested)
    if manifest.quantisation is not None:
        raise UsageError(
            f"{folder} has quantised weights, which differ from the original everywhere. Search "
            "in the float32 artifact; linexport validate compares this one."
        )
    with watch.stage("trace"):
        traced = trace.trace(tested.loaded)
    inputs = _inputs(tested, manifest, traced, length, seed)
    with watch.stage("search"):
        batch = tested.batch(inputs.case.sizes)
        choices = choices_of(tested.open_changed, inputs.fed, batch)
        deciding = as_near(choices, tested, inputs.mask)
        original = original_values(tested.loaded, traced, inputs.leaves, deciding)
        both = BothValues(
            folder / MODEL,
            original,
            inputs.fed,
            targets.find_target(manifest.target).open,
            tested.tolerance,
            inputs.kept,
            choices,
        )
        found = _search(folder, manifest, tested, both, inputs, output)
    if overlay is not None:
        with watch.stage("overlay"):
            native = uses_library(manifest)
            times = node_times(folder / MODEL, inputs.fed, threads, native)
            graph = external_data.read_graph(folder / MODEL).graph.name
            write_overlay(Path(overlay), graph, times, errors(both))
    checked.check_unchanged()
    return found


def _search(
    folder: Path,
    manifest: Manifest,
    tested: parity.ModelUnderTest,
    both: BothValues,
    inputs: _Inputs,
    output: str | Path | None,
) -> Differences:
    model = onnx.load_model(str(folder / MODEL))
    before = _before_conversion(tested, both, inputs)
    found = both.search(tested.output_names)
    state = _state(tested, both, inputs, model)
    case, limit = inputs.case, tested.tolerance.relative
    findings = Differences(str(folder), dict(case.sizes), case.seed, limit, before, state)
    if found is None:
        return findings
    value, part, files = _replayed(both, found, inputs, model)
    findings = replace(findings, value=before or value)
    if output is not None:
        findings = replace(findings, repro=str(output))
        write_repro(Path(output), findings, part, *files)
    return findings


def _inputs(
    tested: parity.ModelUnderTest,
    manifest: Manifest,
    traced: trace.Traced,
    length: int | None,
    seed: int | None,
) -> _Inputs:
    """Draw the inputs of the smallest case that failed, or of a case of its own."""
    case = _case(tested, manifest, length, seed)
    state = tested.initial_state(tested.batch(case.sizes))
    language = tested.loaded.language
    if language is None:
        drawn = draw_inputs(tested.loaded, tested.input_shapes, case)
        fed = {**feeds(drawn, tested.input_names), **state}
        return _Inputs(case, list(pytree.tree_leaves(drawn)), fed)
    padding = case.name if case.name in PADDINGS else NONE
    sizes = case.sizes
    prompt = draw_prompt(language.vocabulary, sizes["batch"], sizes["seq"], padding, case.seed)
    fed = {**tested.complete(prompt.part(0, sizes["seq"])), **state}
    names = [i.name for i in traced.graph.graph.input]
    return _Inputs(case, [torch.from_numpy(fed[name]) for name in names], fed, prompt.mask)


def _case(
    tested: parity.ModelUnderTest, manifest: Manifest, length: int | None, seed: int | None
) -> Case:
    failed = [c for c in (manifest.parity.cases if manifest.parity else ()) if not c.passed]
    sequence = dims.sequence(tested.dims)
    if failed and length is None:
        least = min(failed, key=lambda c: c.length * c.batch)
        chosen = least.seed if seed is None else seed
        return Case(least.name, least.sizes, chosen, least.magnitude)
    sizes = {n: limits.nearest(1 if limits.batch else LENGTH) for n, limits in tested.dims.items()}
    if length is not None:
        if sequence is None or not tested.dims[sequence].allows(length):
            allowed = "none is dynamic" if sequence is None else f"{tested.dims[sequence]}"
            raise UsageError(f"--length {length}: the model's lengths are not so ({allowed}).")
        sizes[sequence] = length
    return Case("random", sizes, manifest.seed if seed is None else seed)


def _before_conversion(
    tested: parity.ModelUnderTest, both: BothValues, inputs: _Inputs
) -> ValueFinding | None:
    """Return a finding where the traced program of a language model is not the model itself."""
    if tested.loaded.language is None:
        return None
    logits, fed = tested.output_names[0], inputs.fed
    [program] = both.original.get([logits]).values()
    assert inputs.mask is not None
    module = _alone(tested, [fed[name] for name in tested.input_names], inputs.mask)
    result = both.compare(logits, module, program)
    if result.passed:
        return None
    verdict: Verdict = "differs before conversion"
    error = result.max_relative_error
    return ValueFinding(logits, "", "", "", None, None, None, None, error, None, verdict, 0, 1)


def _alone(tested: parity.ModelUnderTest, given: list[np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Return the model's outputs for each row alone, see ``parity.language.rows_alone``."""
    by_input = [as_rows(values, mask) for values in given]
    with torch.no_grad():
        found = [
            tested.loaded.module(*(torch.from_numpy(values) for values in row)).numpy()
            for row in zip(*by_input, strict=True)
        ]
    return as_batch(found, mask)


def _replayed(
    both: BothValues, found: Found, inputs: _Inputs, model: onnx.ModelProto
) -> tuple[ValueFinding, onnx.ModelProto, tuple[dict[str, np.ndarray], ...]]:
    """Run the node alone, on the original's inputs; return what is known and the part's files."""
    value = found.value
    frontier = both.ancestry.nearest([value], both.comparable)
    inside = [name for name in frontier if name in both.comparable]
    expected = both.original.get([value, *inside])
    got = both.got([value, *inside])
    given = {name: x for name, x in both.fed.items() if name in frontier}
    right = {**given, **{name: expected[name] for name in inside if name in expected}}
    part = cut(model, [value], {**both.fed, **right})
    own = {i.name: {**both.fed, **right}[i.name] for i in part.graph.input}
    wrong = {name: got.get(name, x) for name, x in own.items()}
    session = OrtSession(part.SerializeToString())
    alone = both.compare(value, expected[value], session.run(own)[value])
    whole = both.compare(value, expected[value], got[value])
    node, origin = both.ancestry.producer[value], both.original.origin(value)
    axis = token_axis(got[value].shape, known_shapes(model).get(value, ()), dict(inputs.case.sizes))
    limit = both.tolerance.limit(largest(expected[value]))
    place = None if axis is None else first_token(expected[value], got[value], axis, limit)
    finding = ValueFinding(
        tensor=value,
        node=node.name,
        op=node.op_type,
        layer=origin.layer,
        module=origin.module,
        code=origin.code,
        row=place and place[0],
        token=place and place[1],
        max_relative_error=whole.max_relative_error,
        own_error=alone.max_relative_error,
        verdict="inherited error" if alone.passed else "own error",
        runs=found.runs,
        probed=found.probed,
    )
    return finding, part, (own, wrong, {value: expected[value]})


def _state(
    tested: parity.ModelUnderTest, both: BothValues, inputs: _Inputs, model: onnx.ModelProto
) -> StateFinding | None:
    """Return the first state that differs after the sequence, or else in single tokens."""
    if not tested.states:
        return None
    found = first_state(both, tested.states, model)
    if found is not None or any(state.op == BUFFER for state in tested.states):
        return found  # buffers after single tokens may be other ones
    sequence = dims.sequence(tested.dims)
    named = zip(tested.input_names, tested.input_shapes, strict=True)
    axes = {n: shape.index(sequence) for n, shape in named if sequence and sequence in shape}
    return first_split(tested.open(), tested.states, inputs.fed, axes, both.tolerance)
