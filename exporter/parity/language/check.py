"""Parity of a causal model of tokens: outputs with padding, chunked prefill, greedy decoding.

A language model's outputs are logits, and it alone decodes; other heads have hidden states, or
logits of labels. Where there is one output for a whole sequence, nothing is fed in pieces.

Everything is compared with the original run once over the whole sequence, without a cache; rows of
a padded batch with the original of each row alone, see ``parity.language.rows_alone``. What the
original gives for padded rows itself is recorded, see ``parity.noise.padding``.

So is greedy decoding: that the argmax of the original's logits after each prefix of what the
artifact wrote is the token the artifact wrote next means, by induction, that it would have written
the same.

Where the artifact is off by more than the tolerance, the original is run in a second precision,
too: in float64, or in the artifact's own half precision. What the original itself loses to rounding
there is allowed for, see ``linexport.parity.tolerances``. Before that it is run with choices that
the artifact makes, as a router's, where rounding decides them: see ``parity.routing.near_ties``.

Outputs of padded tokens have no meaning and are left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from linexport.manifest.proof import CaseRecord, GreedyRecord
from linexport.manifest.records import POOLING_MASK
from linexport.parity.cases import SIDE_BY_SIDE, Case
from linexport.parity.check import (
    NOT_FINITE,
    ModelUnderTest,
    Parity,
    case_record,
    require_compared,
)
from linexport.parity.compare import (
    Comparison,
    compare_arrays,
    compare_rows,
    largest,
    rows_off,
)
from linexport.parity.language.images import check_images
from linexport.parity.language.pooled import check_pooling
from linexport.parity.language.prompts import (
    BATCH,
    LEFT,
    SEQUENCE,
    Prompt,
    Trial,
    draw_prompt,
    plan_prompts,
)
from linexport.parity.language.rows_alone import choices_by_row, run_alone, run_batch
from linexport.parity.language.split import SplitModel, split_model
from linexport.parity.noise import random_rounding
from linexport.parity.noise.float32_error import apart, apart_by_row
from linexport.parity.noise.padding import padded_error
from linexport.parity.noise.random_rounding import rounding_of_rows
from linexport.parity.reference.module import Reference
from linexport.parity.routing.choices import recording
from linexport.parity.routing.near_ties import Decided, Deciding, NearTies, decide, notes, run_alike
from linexport.parity.streams.side_by_side import run_side_by_side
from linexport.parity.tolerances import MAX_EXCUSED_SHARE, Tolerance
from linexport.sources.first_run import said_where
from linexport.sources.loaded_model import LanguageFacts, LoadedModel
from linexport.system import memory
from linexport.targets import InferenceSession

log = logging.getLogger(__name__)

PROMPT, GREEDY_STEPS = 16, 128

FEW_STEPS = 32
"""Steps of a model in two parts: each reads all of its weights, and its states are compared over
hundreds of steps in pieces and streams."""

LOGITS = 2**30
"""Bytes of logits of one prompt; a longer one is compared in pieces alone, see ``streaming``."""

AS_ALWAYS: Deciding = nullcontext()


@dataclass(frozen=True)
class _Suspect:
    """A case that is off by more than the tolerance.

    Attributes:
        place: of its record among the cases.
        trial: what was run.
        prompt: of it.
        expected, got: logits (tokens, vocabulary), the original's in float32 and the artifact's.
        found: how they compare.
        choices: what the artifact chose; empty where it makes no choices.
    """

    place: int
    trial: Trial
    prompt: Prompt
    expected: np.ndarray
    got: np.ndarray
    found: Comparison
    choices: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class _Written:
    """A text that the artifact wrote greedily.

    Attributes:
        prompt: the prompts and what follows.
        length: of the prompts.
        choices: see ``_Suspect``.
    """

    prompt: Prompt
    length: int
    choices: tuple[np.ndarray, ...] = ()

    @property
    def before(self) -> Prompt:
        """All but the last token: what the artifact has read."""
        return Prompt(self.prompt.tokens[:, :-1], self.prompt.mask[:, :-1])


@memory.low_memory()
def check_language(tested: ModelUnderTest, seed: int = 0) -> Parity:
    """Run every case on the original, a language model, in float32, and then on the artifact.

    One of many words is compared in two parts, see ``split``; where that fails, as a whole.

    Raises:
        NothingComparedError: the original's outputs are not finite anywhere.
    """
    parts = split_model(tested)
    if parts is None:
        return check_parts(tested, None, seed)
    try:
        found = check_parts(tested, parts, seed)
    except Exception as error:  # whatever the module raises; the whole says what is wrong
        log.info("hidden states are not compared: %r", error)
        found = None
    if found is not None and found.passed:
        return found
    del parts
    memory.trim_memory()
    return check_parts(tested, None, seed)


def check_parts(whole: ModelUnderTest, parts: SplitModel | None, seed: int) -> Parity:
    """Compare a model, or its two parts."""
    tested = whole if parts is None else parts.decoder
    original = _Original(tested.loaded, torch.float32)
    checked, writer = _on_all_trials(whole, parts, original, seed)
    parity, suspects, output = checked.parity, checked.suspects, tested.output_names[0]
    trials = checked.trials
    causal = original.language.head == "causal_lm"
    steps = GREEDY_STEPS if parts is None else min(GREEDY_STEPS, FEW_STEPS)
    written = writer.write(seed, steps) if causal else None
    del checked, writer  # and with them the session
    memory.trim_memory()
    greedy = partial(_greedy, parts, parity=parity)
    parity.greedy = None if written is None else greedy([original], written)
    if suspects or _unequal(parity):
        suspects, written = _with_choices(tested, suspects, written)
        suspects = _compared_as_decided(suspects, original, parity, output)
        if written and written.choices:
            parity.greedy = greedy([original], written)
    if whole.loaded.vision is not None:
        check_images(whole, parity, seed)
    if original.language.head == "pooled" and POOLING_MASK in whole.input_names:
        check_pooling(whole, parity, seed)
    if suspects or _unequal(parity):
        try:
            second = _Original(tested.loaded, getattr(torch, tested.tolerance.second))
            _recheck(suspects, (original, second), parity, output)
            if written and _unequal(parity):
                parity.greedy = greedy([original, second], written)
        except Exception as error:
            parity.notes.append(f"No {tested.tolerance.second} reference: {said_where(error)}")
    parity.notes.extend(notes(parity.ties))
    outcomes = zip(trials, parity.cases, strict=False)
    failed = (t.case for t, c in outcomes if not c.passed and len(t.pieces) == 1)
    parity.failed = next(failed, None)
    return parity


def _on_all_trials(
    whole: ModelUnderTest, parts: SplitModel | None, original: _Original, seed: int
) -> tuple[_Check, _Artifact]:
    """Run the original and then the artifact on every case.

    Returns:
        What was compared, and the whole artifact, opened.
    """
    tested, language = whole if parts is None else parts.decoder, original.language
    behind, continued = tested.behind_at_once, bool(tested.states)
    width = language.vocabulary if parts is None else parts.head.in_features
    behind = behind if 4 * behind * width <= LOGITS else 0
    sides = parts is None  # large models take long: padding on both sides has both of them
    planned = partial(plan_prompts, behind=behind, packed=tested.packed, sides=sides)
    trials = planned(tested.dims, language.context, seed, tested.chosen, continued)
    prompts = [trial.prompt(language.vocabulary) for trial in trials]
    expected = [original.run_reference(prompt) for prompt in prompts]
    double = cache(lambda: Reference(tested.loaded, torch.float64))
    padded = padded_error(trials, prompts, expected, original.reference, double)
    del double
    finite = any(np.isfinite(outputs).any() for outputs in expected)
    require_compared(tested.output_names, tested.output_names if finite else (), [NOT_FINITE])
    artifact = _Artifact(tested, tested.open())
    checked = _Check(artifact, Parity(tested.tolerance), trials, parts)
    checked.parity.add_padded(padded)
    for trial, outputs in zip(trials, expected, strict=True):
        checked.compare(trial, outputs)
        memory.trim_memory()
    if parts is None:
        return checked, artifact
    checked.artifact = None  # its session is not needed any more
    del artifact
    memory.trim_memory()
    checked.parity.head = parts.check(original.reference, seed)
    return checked, _Artifact(whole, whole.open())


def _unequal(parity: Parity) -> bool:
    return parity.greedy is not None and not parity.greedy.passed


def _with_choices(
    tested: ModelUnderTest, suspects: list[_Suspect], written: _Written | None
) -> tuple[list[_Suspect], _Written | None]:
    """Run what may be off on the artifact again, and add what it chooses, if it makes choices."""
    session = None if tested.tolerance.is_half else recording(tested.open_changed)
    if session is None:
        return suspects, written
    artifact, recorded = _Artifact(tested, session), session

    def choices(prompt: Prompt, pieces: Sequence[int]) -> tuple[np.ndarray, ...]:
        artifact.in_pieces(prompt, pieces)
        return tuple(recorded.choices(len(prompt.tokens)).values())

    if written is not None:
        pieces = (written.length, *[1] * (written.before.tokens.shape[1] - written.length))
        written = replace(written, choices=choices(written.before, pieces))
    return [replace(s, choices=choices(s.prompt, s.trial.pieces)) for s in suspects], written


def _compared_as_decided(
    suspects: list[_Suspect], original: _Original, parity: Parity, output: str
) -> list[_Suspect]:
    """Compare with the artifact's choices; return what may yet be rounding of the original."""
    left = []
    for suspect in suspects:
        decided = _decided([original.run_reference], suspect.prompt, suspect.choices, parity)
        found = suspect.found
        if decided is not None:
            found = compare_arrays(decided.outputs[0], suspect.got, parity.tolerance)
        if decided is not None and found.passed:
            parity.counts += np.asarray(found.counts) - np.asarray(suspect.found.counts)
            parity.cases[suspect.place] = _record(suspect.trial, "float32", found, output)
            parity.ties.append((suspect.trial.case, decided.ties))
        else:
            left.append(suspect)
    return left


def _decided(
    runs: Sequence[Callable[..., np.ndarray]],
    prompt: Prompt,
    choices: Sequence[np.ndarray],
    parity: Parity,
) -> Decided[np.ndarray] | None:
    """Run originals on a prompt with choices of the artifact; None without."""
    if not choices:
        return None
    own = choices_by_row(choices, prompt)
    return decide([partial(run, prompt) for run in runs], own, parity.tolerance)


def _recheck(
    suspects: list[_Suspect], originals: tuple[_Original, _Original], parity: Parity, output: str
) -> None:
    """Compare suspects again, allowing for what rounding does to the original, token by token.

    Random roundings are drawn for tokens that are off by more than the original's own loss
    explains, until a case fails: what fails behind it is only counted.
    """
    tolerance = parity.tolerance
    found = list(_in_both(suspects, originals, parity))
    losses = [apart_by_row(one.suspect.expected, one.reference) for one in found]
    sizes = [largest(one.exact(tolerance)) or 1.0 for one in found]
    shares = [loss.max(initial=0.0) / size for loss, size in zip(losses, sizes, strict=True)]
    lost = float(max(shares, default=0.0))
    wide = cache(originals[1].in_float64)
    drawn: list[tuple[Case, np.ndarray]] = []
    known: dict[tuple[bytes, ...], np.ndarray] = {}
    for place, (one, loss, size) in enumerate(zip(found, losses, sizes, strict=True)):
        case, moved, worst = one.suspect.trial.case, loss, lost * size
        if len(drawn) == place:
            draw, off = partial(one.draw, wide, tolerance), partial(one.off, tolerance, worst)
            if one.ties is None:  # what moves these rows with other padding moves them here
                moved = np.maximum(loss, known.get(one.suspect.prompt.key, 0.0))
            moved = rounding_of_rows(moved, one.exact(tolerance), draw, off)
            known[one.suspect.prompt.key] = moved
        results = one.compare(tolerance, worst, moved)
        own = worst if tolerance.is_half else float(loss.max(initial=0.0))
        parity.counts -= np.asarray(one.suspect.found.counts)
        for reference, result in results.items():
            parity.counts += np.asarray(result.counts)
            parity.cases.append(_record(one.suspect.trial, reference, result, output, own))
        parity.cases[one.suspect.place] = parity.cases.pop(-2)
        if all(result.passed for result in results.values()):
            drawn.append((case, moved[moved > loss] / size))
            if one.ties is not None and one.ties.differing:
                parity.ties.append((case, one.ties))
        memory.trim_memory()
    _without_digits(suspects, originals[1], parity, output)
    if drawn:
        case = found[shares.index(lost)].suspect.trial.case
        parity.notes.append(_lost(lost, case, tolerance))
        parity.notes.extend(random_rounding.notes(drawn, tolerance))


def _without_digits(
    suspects: list[_Suspect], second: _Original, parity: Parity, output: str
) -> None:
    """Say of the worst case that no rounding excuses whether the original itself has digits there.

    It has failed, and stays so.
    """
    left = [s for s in suspects if parity.cases[s.place].rounding is None]
    left = [s for s in left if s.found.max_relative_error < math.inf]
    worst = max(left, key=lambda s: s.found.max_relative_error, default=None)
    if worst is None:
        return
    rounding = apart(worst.expected, second.run_reference(worst.prompt))
    result = compare_arrays(worst.expected, worst.got, parity.tolerance, rounding)
    parity.cases[worst.place] = _record(worst.trial, "float32", result, output, rounding)


def _lost(share: float, case: Case, tolerance: Tolerance) -> str:
    """Return the note on what the original itself loses."""
    cap = ""
    if not tolerance.is_half:
        most = tolerance.factor * tolerance.spread
        share_of_all = f"{MAX_EXCUSED_SHARE:.0%}"
        cap = f", by {most:g} times what it loses at that token and by {share_of_all} at most"
    return (
        f"The original itself loses {share:.0e} to the rounding of {tolerance.dtype}, on the "
        f"{case.name} inputs at {case.at}: the artifact may be off by "
        f"{tolerance.factor:g} times that wherever it is off by more than "
        f"{tolerance.relative:.0e}{cap}."
    )


@dataclass(frozen=True)
class _Again:
    """A suspect beside the original in both precisions, with the same choices.

    Attributes:
        suspect: with the original's logits in float32.
        reference: those in the second precision.
        ties: what the artifact's choices differ in, where they were taken.
    """

    suspect: _Suspect
    reference: np.ndarray
    ties: NearTies | None = None

    def exact(self, tolerance: Tolerance) -> np.ndarray:
        """Return the original's logits without the rounding that is judged."""
        return self.suspect.expected if tolerance.is_half else self.reference

    def compare(
        self, tolerance: Tolerance, worst: float, moved: np.ndarray
    ) -> dict[str, Comparison]:
        """Compare the artifact with both; by the name of the precision.

        Args:
            tolerance: of the artifact.
            worst: the most that the original loses at any token.
            moved: how far rounding is known to move each token.
        """
        got, rounding = self.suspect.got, tolerance.beside(moved, worst)
        between = tolerance.between(rounding)
        return {
            "float32": compare_rows(self.suspect.expected, got, tolerance, rounding),
            tolerance.second: compare_rows(self.reference, got, tolerance, between),
        }

    def off(self, tolerance: Tolerance, worst: float, moved: np.ndarray) -> np.ndarray:
        """Return which tokens are off by more than that allows; arguments as of ``compare``."""
        got, rounding = self.suspect.got, tolerance.beside(moved, worst)
        between = tolerance.between(rounding)
        return rows_off(self.suspect.expected, got, tolerance, rounding) | rows_off(
            self.reference, got, tolerance, between
        )

    def draw(
        self, wide: Callable[[], _Original], tolerance: Tolerance, seed: int
    ) -> np.ndarray | None:
        """Run the original with random roundings, see ``random_rounding``."""
        prompt, choices = self.suspect.prompt, None
        if self.ties is not None:
            choices = choices_by_row(self.suspect.choices, prompt)
        run = partial(wide().run_reference, prompt)
        return random_rounding.draw(run, tolerance.dtype, seed, choices)


def _in_both(
    suspects: list[_Suspect], originals: tuple[_Original, _Original], parity: Parity
) -> Iterator[_Again]:
    """Yield what may be rounding of the original, run in both precisions."""
    tolerance = parity.tolerance
    runs = [original.run_reference for original in originals]
    for suspect in suspects:
        decided = _decided(runs, suspect.prompt, suspect.choices, parity)
        if decided is not None and len(decided.outputs) == len(runs):
            expected, reference = decided.outputs
            yield _Again(replace(suspect, expected=expected), reference, decided.ties)
        elif suspect.found.max_relative_error <= tolerance.most:
            narrow, wide = (partial(run, suspect.prompt) for run in runs)
            alike = run_alike(narrow, wide, tolerance).double if suspect.choices else None
            yield _Again(suspect, runs[1](suspect.prompt) if alike is None else alike)


def _record(
    trial: Trial,
    reference: str,
    result: Comparison,
    output: str,
    rounding: float | None = None,
) -> CaseRecord:
    """The record of a trial; ``rounding`` of the original is None where it was not needed."""
    sizes = trial.case.sizes
    batch, length = sizes[BATCH], sizes[SEQUENCE]
    return case_record(trial.case, result, batch, length, reference, output, rounding)


class _Original:
    """The original language model in one precision."""

    def __init__(self, loaded: LoadedModel, dtype: torch.dtype) -> None:
        self.loaded, self.reference = loaded, Reference(loaded, dtype)
        self._known: dict[tuple[bytes, ...], np.ndarray] = {}

    @property
    def language(self) -> LanguageFacts:
        """Facts of the model."""
        assert self.loaded.language is not None
        return self.loaded.language

    def run_logits(
        self, parts: SplitModel | None, prompt: Prompt, deciding: Deciding = AS_ALWAYS
    ) -> np.ndarray:
        """Return logits (tokens, vocabulary), as ``run_reference`` does of an original as a whole.

        Args:
            parts: the two parts of the original; None where it gives logits.
            prompt: what is run.
            deciding: a context in which choices are made.
        """
        outputs = self.run_reference(prompt, deciding)
        return outputs if parts is None else parts.logits(self.reference, outputs)

    def in_float64(self) -> _Original:
        """Return one whose values of this precision are float64."""
        if self.reference.dtype == torch.float64:
            return self
        made = _Original(self.loaded, torch.float64)
        made.reference.widened = False
        return made

    def run_reference(self, prompt: Prompt, deciding: Deciding = AS_ALWAYS) -> np.ndarray:
        """Return logits (tokens, vocabulary) of each row alone, without what is padding.

        They are computed in a context in which choices are made. The same rows are run once.
        """
        run = partial(run_batch, self.reference)
        if deciding is not AS_ALWAYS:
            with deciding:
                return run_alone(run, prompt)
        known = self._known
        if prompt.key not in known:
            known[prompt.key] = run_alone(
                lambda row: known[row.key] if row.key in known else run(row), prompt
            )
        return known[prompt.key]


def _greedy(
    parts: SplitModel | None, originals: Sequence[_Original], written: _Written, parity: Parity
) -> GreedyRecord:
    """Compare what the artifact wrote with the argmax of the original.

    A second original, in another precision, tells what its rounding is, which is allowed for.
    Originals in two parts give hidden states, of which their heads make logits here.
    """
    runs, before = [partial(one.run_logits, parts) for one in originals], written.before
    decided = _decided(runs, before, written.choices, parity)
    if decided is None or len(decided.outputs) < len(runs):
        decided = Decided([run(before) for run in runs], NearTies())
    tokens = written.prompt.tokens[:, written.length :]
    expected = _last(decided.outputs[0], before, tokens.shape)
    rounding = 0.0
    if len(decided.outputs) > 1:
        rounding = apart(expected, _last(decided.outputs[-1], before, tokens.shape))
    best = expected.max(-1)
    taken = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    near = best - taken <= 2 * parity.tolerance.limit(float(np.abs(best).max()), rounding)
    different = expected.argmax(-1) != tokens
    rows, steps = tokens.shape
    wrong, ties = int(different.sum()), int((different & near).sum())
    if wrong == ties and decided.ties.differing:
        sizes = {BATCH: rows, SEQUENCE: before.tokens.shape[1]}
        parity.ties.append((Case("greedily written", sizes, 0), decided.ties))
    return GreedyRecord(steps, rows, wrong, ties, passed=wrong == ties)


def _last(logits: np.ndarray, prompt: Prompt, shape: tuple[int, ...]) -> np.ndarray:
    """Return logits (B, steps, vocabulary) of the last tokens of each row, of (tokens, ...)."""
    rows, steps = shape
    ends = np.cumsum(prompt.mask.sum(-1))
    return np.stack([logits[end - steps : end] for end in ends[:rows]])


class _Artifact:
    """An opened artifact, fed with prompts."""

    def __init__(self, tested: ModelUnderTest, session: InferenceSession) -> None:
        self.tested, self.session = tested, session

    def write(self, seed: int, steps: int) -> _Written:
        """Decode greedily, the argmax of each step, from prompts of which one is padded."""
        language = self.tested.loaded.language
        assert language is not None
        limit = language.context or PROMPT + steps
        length = min(PROMPT, max(1, limit // 2))
        steps = min(steps, limit - length)
        prompt = draw_prompt(language.vocabulary, 2, length, LEFT, seed)
        state = self.tested.initial_state(2)
        read = 0
        for end in range(length, length + steps):
            logits, state = self._call(prompt.part(read, end), state)
            chosen = logits[:, -1:].argmax(-1)
            tokens = np.concatenate([prompt.tokens, chosen], 1)
            prompt = Prompt(tokens, np.concatenate([prompt.mask, np.ones_like(chosen)], 1))
            # Without states every call begins with the first token.
            read = end if self.tested.states else 0
        return _Written(prompt, length)

    def run(self, prompt: Prompt, trial: Trial) -> np.ndarray:
        """Return logits (tokens, vocabulary) of what is not padding, fed as the trial says."""
        if trial.padding == SIDE_BY_SIDE:
            return self._side_by_side(prompt)
        return prompt.real(self.in_pieces(prompt, trial.pieces))

    def _side_by_side(self, prompt: Prompt) -> np.ndarray:
        """Return logits of rows that have lengths of their own in a call."""
        session: Any = self.session
        given = [self.tested.complete(row.part(0, row.tokens.shape[1])) for row in prompt.rows()]
        unit, name = self.tested.dims[SEQUENCE].multiple, self.tested.output_names[0]
        found = run_side_by_side(session, self.tested.states, given, unit)
        return np.concatenate([outputs[name][0] for outputs in found])

    def in_pieces(self, prompt: Prompt, pieces: Sequence[int]) -> np.ndarray:
        """Return logits (B, T, vocabulary) of a prompt that is fed in pieces of these lengths."""
        state = self.tested.initial_state(prompt.tokens.shape[0])
        parts, start = [], 0
        for size in pieces:
            logits, state = self._call(prompt.part(start, start + size), state)
            parts.append(logits)
            start += size
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)

    def _call(
        self, feeds: dict[str, np.ndarray], state: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        outputs = self.session.run({**self.tested.complete(feeds), **state})
        after = {s.past: outputs[s.present] for s in self.tested.states}
        return outputs[self.tested.output_names[0]], after


class _Check:
    """One run of the artifact over all trials; what needs a second look is kept aside."""

    def __init__(
        self,
        artifact: _Artifact,
        parity: Parity,
        trials: Sequence[Trial],
        parts: SplitModel | None,
    ) -> None:
        self.artifact: _Artifact | None = artifact
        self.parity, self.trials, self.parts = parity, trials, parts
        self.suspects: list[_Suspect] = []

    def compare(self, trial: Trial, expected: np.ndarray) -> None:
        """Compare the artifact's logits of tokens that are not padding with those expected."""
        artifact = self.artifact
        assert artifact is not None and artifact.tested.loaded.language is not None
        prompt = trial.prompt(artifact.tested.loaded.language.vocabulary)
        reason = None
        try:
            got = artifact.run(prompt, trial)
        except Exception as error:
            got = np.zeros((0,), np.float32)
            reason = f"the artifact fails at this size: {str(error).splitlines()[0]}"
        if self.parts is not None:
            self.parts.keep(expected, got)
        result = compare_arrays(expected, got, self.parity.tolerance)
        self.parity.counts += np.asarray(result.counts)
        if not result.passed and reason is None:
            place = len(self.parity.cases)
            [kept] = memory.memory_mapped([got])
            self.suspects.append(_Suspect(place, trial, prompt, expected, kept, result))
        record = _record(trial, "float32", result, artifact.tested.output_names[0])
        if reason is not None:
            record = replace(record, reason=reason)
        self.parity.cases.append(record)
