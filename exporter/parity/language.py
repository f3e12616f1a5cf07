"""Parity of a causal model of tokens: outputs with padding, chunked prefill, greedy decoding.

A language model's outputs are logits, and it alone decodes; other heads have hidden states, or
logits of labels. Where there is one output for a whole sequence, nothing is fed in pieces.

Everything is compared with the original run once over the whole sequence, without a cache. So is
greedy decoding: that the argmax of the original's logits after each prefix of what the artifact
wrote is the token the artifact wrote next means, by induction, that it would have written the same.

Where the artifact is off by more than the tolerance, the original is run in a second precision,
too: in float64, or in the artifact's own half precision. What the original itself loses to rounding
there is allowed for, see ``linexport.parity.tolerances``. So is a choice that rounding decides, see
``linexport.parity.near_ties``.

Outputs of padded tokens have no meaning and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from linexport.loaders.loaded_model import LanguageFacts, LoadedModel
from linexport.manifest.proof import CaseRecord, GreedyRecord
from linexport.parity.check import ModelUnderTest, Parity, case_record
from linexport.parity.compare import Comparison, compare_arrays, largest
from linexport.parity.images import check_images
from linexport.parity.near_ties import note, settled
from linexport.parity.prompts import BATCH, LEFT, SEQUENCE, Prompt, Trial, draw_prompt, plan_prompts
from linexport.parity.reference import Reference
from linexport.parity.rounding import apart
from linexport.parity.tolerances import MOST, Tolerance
from linexport.system import memory
from linexport.targets import InferenceSession

PROMPT, GREEDY_STEPS = 16, 128


@dataclass(frozen=True)
class _Suspect:
    """A case that is off by more than the tolerance.

    Attributes:
        place: of its record among the cases.
        trial: what was run.
        expected, got: logits (tokens, vocabulary), the original's in float32 and the artifact's.
        found: how they compare.
    """

    place: int
    trial: Trial
    expected: np.ndarray
    got: np.ndarray
    found: Comparison


@memory.low_memory()
def check_language(tested: ModelUnderTest, seed: int = 0) -> Parity:
    """Run every case on the original, a language model, in float32, and then on the artifact."""
    language = tested.loaded.language
    assert language is not None
    continued = bool(tested.states)
    trials = plan_prompts(tested.dims, language.context, seed, tested.chosen, continued)
    original = _Original(tested.loaded, torch.float32)
    expected = [original.run_reference(trial.prompt(language.vocabulary)) for trial in trials]
    checked = _Check(tested, language, Parity(tested.tolerance), tested.open())
    for trial, logits in zip(trials, expected, strict=True):
        checked.compare(trial, logits)
        memory.trim_memory()
    parity, suspects = checked.parity, checked.suspects
    written = checked.write(seed) if language.head == "causal_lm" else None
    del checked  # and with it the session
    memory.trim_memory()
    parity.greedy = written and _greedy(original, *written, parity.tolerance)
    suspects = _unsettled(suspects, original, language.vocabulary, parity, tested.output_names[0])
    unequal = parity.greedy is not None and not parity.greedy.passed
    if tested.loaded.vision is not None:
        check_images(tested, parity, seed)
    if suspects or unequal:
        try:
            second = _Original(tested.loaded, getattr(torch, tested.tolerance.second))
            _recheck(suspects, second, language.vocabulary, parity, tested.output_names[0])
            if written and unequal:
                parity.greedy = _greedy(original, *written, parity.tolerance, second)
        except Exception as error:
            parity.notes.append(f"No {tested.tolerance.second} reference: {error}")
    outcomes = zip(trials, parity.cases, strict=False)
    failed = (t.case for t, c in outcomes if not c.passed and len(t.pieces) == 1)
    parity.failed = next(failed, None)
    return parity


def _unsettled(
    suspects: list[_Suspect], original: _Original, vocabulary: int, parity: Parity, output: str
) -> list[_Suspect]:
    """Settle near ties as the artifact decided them; return what rounding may explain yet."""
    left = []
    for suspect in suspects:
        trial, expected, got = suspect.trial, suspect.expected, suspect.got
        prompt = trial.prompt(vocabulary)
        run = partial(original.run_reference, prompt)
        chosen = settled(expected, got, parity.tolerance, 0.0, run)
        if chosen is expected:
            if suspect.found.max_relative_error <= parity.tolerance.most:
                left.append(suspect)
            continue
        result = compare_arrays(chosen, got, parity.tolerance)
        parity.counts += np.asarray(result.counts) - np.asarray(suspect.found.counts)
        parity.cases[suspect.place] = _record(trial, "float32", result, output)
        parity.notes.append(note(trial.case))
    return left


def _recheck(
    suspects: list[_Suspect], second: _Original, vocabulary: int, parity: Parity, output: str
) -> None:
    """Compare suspects again, allowing for what the second precision shows; stop at a failure.

    The allowance is the original's largest loss in any of the cases: where a norm divides by a
    value near zero, one token has most of the loss, and one case may have no such token.
    """
    tolerance = parity.tolerance
    others = [second.run_reference(suspect.trial.prompt(vocabulary)) for suspect in suspects]
    losses = [
        apart(suspect.expected, reference)
        / (largest(suspect.expected if tolerance.is_half else reference) or 1.0)
        for suspect, reference in zip(suspects, others, strict=True)
    ]
    lost = max(losses, default=0.0)
    for suspect, reference in zip(suspects, others, strict=True):
        rounding = lost * largest(suspect.expected if tolerance.is_half else reference)
        result = compare_arrays(suspect.expected, suspect.got, tolerance, rounding)
        parity.cases[suspect.place] = _record(suspect.trial, "float32", result, output, rounding)
        if not result.passed:
            return
        result = compare_arrays(reference, suspect.got, tolerance, tolerance.between(rounding))
        parity.counts += np.asarray(result.counts)
        record = _record(suspect.trial, tolerance.second, result, output, rounding)
        parity.cases.append(record)
        memory.trim_memory()
    if suspects:
        case = suspects[losses.index(lost)].trial.case
        cap = "" if tolerance.is_half else f", and by {MOST:.0%} at most"
        parity.notes.append(
            f"The original itself loses {lost:.0e} to the rounding of {tolerance.dtype}, on the "
            f"{case.name} inputs of {dict(case.sizes)}: the artifact may be off by "
            f"{tolerance.factor:g} times that wherever it is off by more than "
            f"{tolerance.relative:.0e}{cap}."
        )


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
        self.reference = Reference(loaded, dtype)

    def logits(self, prompt: Prompt) -> np.ndarray:
        """Return logits (B, T, vocabulary)."""
        given = (torch.from_numpy(prompt.tokens), torch.from_numpy(prompt.mask))
        [logits] = self.reference((given, {}))
        return logits

    def run_reference(self, prompt: Prompt) -> np.ndarray:
        """Return logits (tokens, vocabulary) of the tokens that are not padding."""
        kept = prompt.real(self.logits(prompt))
        if not memory.is_memory_mapped(kept.ctypes.data):
            [kept] = memory.memory_mapped([kept])
        memory.trim_memory()
        return kept


def _greedy(
    original: _Original,
    written: Prompt,
    length: int,
    tolerance: Tolerance,
    second: _Original | None = None,
) -> GreedyRecord:
    """Compare what the artifact wrote after prompts of that length with the original's argmax.

    ``second`` is the original in another precision, where its rounding is to be allowed for.
    """
    before = Prompt(written.tokens[:, :-1], written.mask[:, :-1])
    expected = original.logits(before)[:, length - 1 :]
    rounding = apart(expected, second.logits(before)[:, length - 1 :]) if second else 0.0
    tokens = written.tokens[:, length:]
    best = expected.max(-1)
    taken = np.take_along_axis(expected, tokens[..., None], -1)[..., 0]
    near = best - taken <= 2 * tolerance.limit(float(np.abs(best).max()), rounding)
    different = expected.argmax(-1) != tokens
    rows, steps = tokens.shape
    wrong, ties = int(different.sum()), int((different & near).sum())
    return GreedyRecord(steps, rows, wrong, ties, passed=wrong == ties)


class _Check:
    """One run of the artifact over all trials; what needs a second precision is kept aside."""

    def __init__(
        self,
        tested: ModelUnderTest,
        language: LanguageFacts,
        parity: Parity,
        session: InferenceSession,
    ) -> None:
        self.tested, self.language = tested, language
        self.parity, self.session = parity, session
        self.suspects: list[_Suspect] = []

    def write(self, seed: int) -> tuple[Prompt, int]:
        """Decode greedily, the argmax of each step, from prompts of which one is padded.

        Returns:
            The prompts followed by what was written, and the length of the prompts.
        """
        limit = self.language.context or PROMPT + GREEDY_STEPS
        length = min(PROMPT, max(1, limit // 2))
        steps = min(GREEDY_STEPS, limit - length)
        prompt = draw_prompt(self.language.vocabulary, 2, length, LEFT, seed)
        state = self.tested.initial_state(2)
        tokens, mask = prompt.tokens, prompt.mask
        feeds = prompt.part(0, length)
        for _ in range(steps):
            logits, state = self._call(feeds, state)
            chosen = logits[:, -1:].argmax(-1)
            feeds = Prompt(chosen, np.ones_like(chosen)).part(0, 1)
            tokens = np.concatenate([tokens, chosen], 1)
            mask = np.concatenate([mask, np.ones_like(chosen)], 1)
        return Prompt(tokens, mask), length

    def compare(self, trial: Trial, expected: np.ndarray) -> None:
        """Compare the artifact's logits of tokens that are not padding with those expected."""
        prompt = trial.prompt(self.language.vocabulary)
        reason = None
        try:
            got = prompt.real(self._in_pieces(prompt, trial.pieces))
        except Exception as error:
            got = np.zeros((0,), np.float32)
            reason = f"the artifact fails at this size: {str(error).splitlines()[0]}"
        result = compare_arrays(expected, got, self.parity.tolerance)
        self.parity.counts += np.asarray(result.counts)
        if not result.passed and reason is None:
            place = len(self.parity.cases)
            [kept] = memory.memory_mapped([got])
            self.suspects.append(_Suspect(place, trial, expected, kept, result))
        record = _record(trial, "float32", result, self.tested.output_names[0])
        if reason is not None:
            record = replace(record, reason=reason)
        self.parity.cases.append(record)

    def _in_pieces(self, prompt: Prompt, pieces: Sequence[int]) -> np.ndarray:
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
