"""A language model compared in two parts: its hidden states whole, its head at some of them.

    h = decoder(tokens)        every token of every case, in every precision: (tokens, W)
    y = head(h)                one product of h with W_head (V, W), then scales, biases and caps of
                               each number alone: (positions, V)

With f the original's head, f' the artifact's, and h, h' their hidden states at a token,

    |f(h) - f'(h')|  <=  |f(h') - f'(h')|  +  L max_i |w_i| |h - h'|

where w_i are the rows of W_head and L is what the operators behind the product stretch differences
by. The first term depends on the head alone: it is compared at positions that are drawn over all
cases, where f(h) itself is computed beside f'(h'). The second is computed at every position. Where
it is more than logits may be off by, those of that position are computed and compared as well. So
every logit is within the tolerance of logits, and 4 V bytes a token are read for some hundreds of
tokens instead of all. That the head works on each token alone is read from the graph.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from linexport.manifest.proof import HeadRecord
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import largest
from linexport.parity.reference.extra_outputs import Change, OpenChanged
from linexport.parity.reference.module import Reference
from linexport.system import memory
from linexport.targets import InferenceSession
from linexport.targets.lowering.split_head import HIDDEN, find_stretch, keep_decoder, keep_head
from linexport.targets.runtime.providers import CPU_ONLY

log = logging.getLogger(__name__)

MIN_VOCABULARY = 2**14
"""Words from which on a model is compared so: below, logits of every token cost little."""

POSITIONS = 512
"""Positions at which logits are computed, drawn over all cases."""

ROWS = 4096
"""Rows of the head whose norms are computed at once."""

AT_ONCE = 2**26
"""Logits that are computed at once."""


class SplitOriginal(nn.Module):
    """The original that gives what its head is given, or what its head makes of that.

    Args:
        inner: the original, (input_ids, attention_mask) -> logits.
        head: path of the module in it that is the product of the head.
    """

    def __init__(self, inner: nn.Module, head: str) -> None:
        super().__init__()
        self.inner, self.head = inner, head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (B, T, W); with ``hidden`` (1, n, W) its logits (1, n, V).

        The head is run by the original's own code, on no token in the first case, and on ``hidden``
        in place of what one token gives in the second.
        """
        taken: list[Tensor] = []

        def replaced(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            taken.append(given[0])
            return (given[0][:, :0] if hidden is None else hidden.to(given[0].dtype),)

        handle = self.inner.get_submodule(self.head).register_forward_pre_hook(replaced)
        try:
            output: Tensor = self.inner(input_ids, attention_mask)
        finally:
            handle.remove()
        [given] = taken  # else the head is not what this module takes it for
        return given if hidden is None else output


@dataclass
class SplitModel:
    """A language model and its two parts.

    Attributes:
        whole: the model.
        decoder: the same with hidden states as its output.
        head: the product of the original's head.
        stretch: what operators behind it multiply differences by.
        kept: hidden states (tokens, W) of both, case by case.
    """

    whole: ModelUnderTest
    decoder: ModelUnderTest
    head: nn.Linear
    stretch: float
    kept: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def keep(self, expected: np.ndarray, got: np.ndarray) -> None:
        """Keep hidden states of a case for the comparison of the head."""
        if expected.shape == got.shape:
            [mapped] = memory.memory_mapped([got])
            self.kept.append((expected, mapped))

    def logits(self, original: Reference, hidden: np.ndarray) -> np.ndarray:
        """Return logits (n, V) that the original's head gives for hidden states (n, W)."""
        token = torch.zeros((1, 1), dtype=torch.int64)
        given = token, torch.ones_like(token), torch.from_numpy(np.ascontiguousarray(hidden[None]))
        [logits] = original((given, {}))
        return logits[0]

    def check(self, original: Reference, seed: int) -> HeadRecord:
        """Compare the heads at drawn positions, and where hidden states differ by too much.

        Args:
            original: its parts in float32.
            seed: of the positions.
        """
        assert self.whole.open_changed is not None
        output, tolerance = self.whole.output_names[0], self.whole.tolerance
        session = self.whole.open_changed(partial(keep_head, output=output))
        expected, got = (np.concatenate(own) for own in zip(*self.kept, strict=True))
        drawn = _drawn([len(own) for own, _ in self.kept], seed)
        first = self._compared(original, session, expected, got, drawn)
        size = max(one.size for one in first)
        bounds = self.bounds(expected, got)
        total = bounds + max(one.error for one in first)
        more = np.setdiff1d(np.flatnonzero(~(total <= tolerance.limit(size))), drawn)
        found = [*first, *self._compared(original, session, expected, got, more)]
        error = max(one.error for one in found)
        unread = np.delete(bounds, np.union1d(drawn, more)).max(initial=0.0)
        return HeadRecord(
            passed=all(one.passed for one in found),
            positions=len(drawn) + len(more),
            tokens=len(expected),
            bound=float(unread) / (size or 1.0),
            max_relative_error=error / (size or 1.0),
            max_absolute_error=error,
        )

    def bounds(self, expected: np.ndarray, got: np.ndarray) -> np.ndarray:
        """Return what differences of hidden states can move a logit by, at each position."""
        apart = np.linalg.norm(got.astype(np.float64) - expected, axis=-1)
        return np.asarray(self.stretch * _longest_row(self.head.weight) * apart)

    def _compared(
        self,
        original: Reference,
        session: InferenceSession,
        expected: np.ndarray,
        got: np.ndarray,
        places: np.ndarray,
    ) -> list[_Compared]:
        """Compare logits of these positions, as many at once as fit in memory."""
        output, found = self.whole.output_names[0], []
        size = max(1, AT_ONCE // self.head.out_features)
        for start in range(0, len(places), size):
            part = places[start : start + size]
            wanted = self.logits(original, expected[part])
            logits = session.run({HIDDEN: got[part][None]})[output][0]
            size_of_part = largest(wanted)
            error = _largest_difference(wanted, logits)
            passed = error <= self.whole.tolerance.limit(size_of_part)
            found.append(_Compared(passed, error, size_of_part))
            memory.trim_memory()
        return found


def _largest_difference(expected: np.ndarray, got: np.ndarray) -> float:
    """Return the largest difference; infinite where one side alone is finite, or has a shape."""
    if expected.shape != got.shape:
        return math.inf
    worst = 0.0
    for wanted, found in zip(expected, got, strict=True):
        with np.errstate(invalid="ignore"):
            apart = np.abs(found - wanted)
        if not np.isfinite(apart).all():
            same = (wanted == found) | (np.isnan(wanted) & np.isnan(found))
            apart = np.where(same, 0.0, np.nan_to_num(apart, nan=np.inf))
        worst = max(worst, float(apart.max(initial=0.0)))
    return worst


@dataclass(frozen=True)
class _Compared:
    """Logits of some positions: within tolerance, their largest difference and magnitude."""

    passed: bool
    error: float
    size: float


class _ReadError(Exception):
    """The graph was read; nothing is to be opened."""


def split_model(tested: ModelUnderTest) -> SplitModel | None:
    """Return a model's two parts; None where it is compared as a whole.

    That is one of few words, one in half precision, and one whose head is not found in both.
    """
    language = tested.loaded.language
    if language is None or language.head != "causal_lm" or language.vocabulary < MIN_VOCABULARY:
        return None
    changed = tested.open_changed
    elsewhere = tested.packed or tested.execution != CPU_ONLY or tested.tolerance.is_half
    if changed is None or elsewhere or len(tested.output_names) != 1:
        return None
    [output], module = tested.output_names, tested.loaded.module
    found = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and part.out_features == language.vocabulary
    ]
    stretch = _stretch(changed, output)
    if len(found) != 1 or stretch is None:
        log.info("logits are compared at every token: the head is not one product")
        return None
    [(path, head)] = found
    cut = partial(keep_decoder, output=output)

    def opened(change: Change) -> InferenceSession:
        def both(model: onnx.ModelProto) -> None:
            cut(model)
            change(model)

        return changed(both)

    decoder = replace(
        tested,
        loaded=replace(tested.loaded, module=SplitOriginal(module, path).eval()),
        open=partial(changed, cut),
        open_changed=opened,
        output_names=(HIDDEN,),
        output_shapes=((*tested.output_shapes[0][:-1], head.in_features),),
    )
    return SplitModel(tested, decoder, head, stretch)


def _stretch(open_changed: OpenChanged, output: str) -> float | None:
    found: list[float | None] = []

    def read(model: onnx.ModelProto) -> None:
        found.append(find_stretch(model, output))
        raise _ReadError

    with suppress(_ReadError):
        open_changed(read)
    return found[0]


def _drawn(lengths: Sequence[int], seed: int) -> np.ndarray:
    """Return places in cases of these lengths one after another, as many of each where it has."""
    random, start = np.random.default_rng(seed), 0
    places = []
    for length in lengths:
        count = min(length, -(-POSITIONS // len(lengths)))
        places.append(start + random.permutation(length)[:count])
        start += length
    return np.sort(np.concatenate(places))


def _longest_row(weight: Tensor) -> float:
    """Return the largest norm of the rows of a matrix."""
    parts = weight.detach().split(ROWS)
    norms = [torch.linalg.vector_norm(part.double(), dim=1).max() for part in parts]
    return float(torch.stack(norms).max())
