"""Records of what was proven: parity over cases, streaming in pieces, the user's own score.

Numbers that are not finite are None: JSON has no way to write them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ToleranceRecord:
    """Limits that applied: max|a - r| <= absolute + relative * max|r|, and why these.

    ``whole`` is false where only values inside of the model have that dtype, and its outputs none.
    """

    dtype: str
    relative: float
    absolute: float
    why: str
    whole: bool = True


@dataclass(frozen=True)
class MetricRecord:
    """The user's own score; ``drop`` is by how much it got worse."""

    name: str
    before: float
    after: float
    drop: float
    lower_is_better: bool


@dataclass(frozen=True)
class ElementRecord:
    """One element of an output: its index, the original's value and the artifact's."""

    index: tuple[int, ...]
    expected: float | None
    got: float | None


@dataclass(frozen=True)
class CountRecord:
    """The number of NaN or infinite elements in the original's output and in the artifact's."""

    expected: int
    got: int


@dataclass(frozen=True)
class CaseRecord:
    """One output of one case compared with one reference.

    Attributes:
        name: kind of inputs, for people.
        batch: first batch size of the case.
        length: first sequence length of the case.
        sizes: sizes of all dynamic dimensions.
        seed: seed of the inputs.
        magnitude: factor on floating inputs of unit variance.
        reference: dtype the original was run in.
        output: name of the output.
        rounding: distance of the original's float32 output from its float64 output, where known.
        denominator: smallest |denominator| of normalised linear attention, where there is one.
        max_relative_error: largest difference over the largest finite magnitude of the reference.
        max_absolute_error: largest difference.
        worst: the element with the largest difference; None where the shapes differ.
        nan: NaN elements on both sides.
        inf: infinite elements on both sides.
        passed: the differences are within tolerance.
        reason: cause of a failure that the numbers do not show.
    """

    name: str
    batch: int
    length: int
    sizes: dict[str, int]
    seed: int
    magnitude: float
    reference: str
    output: str
    rounding: float | None
    denominator: float | None
    max_relative_error: float | None
    max_absolute_error: float | None
    worst: ElementRecord | None
    nan: CountRecord
    inf: CountRecord
    passed: bool
    reason: str | None = None


@dataclass(frozen=True)
class DenominatorRecord:
    """The smallest |denominator| over all cases, with the case's name and length."""

    denominator: float | None
    name: str
    length: int


@dataclass(frozen=True)
class GreedyRecord:
    """Greedy decoding of a language model, compared with the original's.

    Attributes:
        steps: tokens written in each row.
        rows: sequences.
        different: tokens that the original would not have written.
        ties: those of them at which the original's two largest logits are within tolerance.
        passed: every different token is a tie.
    """

    steps: int
    rows: int
    different: int
    ties: int
    passed: bool


@dataclass(frozen=True)
class DivergenceRecord:
    """The first value of the graph that is out of tolerance.

    Attributes:
        tensor: name of the value.
        node: name of the node that computes it.
        op: type of that node.
        max_relative_error: its largest error.
        worst: its worst element.
        layer: for a language model, the first layer whose output is out of tolerance.
        row: sequence of the batch in which that is seen first.
        position: token at which that is seen first.
        line: source line of the model's author that computes the value, where it is known.
        plain_relative_error: largest error of PyTorch's own ONNX export on the same inputs; None
            where there is none.
        plain_failure: why that export cannot be made or does not run; None where it does.
    """

    tensor: str
    node: str
    op: str
    max_relative_error: float | None
    worst: ElementRecord | None
    layer: str | None = None
    row: int | None = None
    position: int | None = None
    line: str | None = None
    plain_relative_error: float | None = None
    plain_failure: str | None = None


@dataclass(frozen=True)
class HistogramRecord:
    """Counts of elements by log10 of their relative error; one more edge than counts."""

    log10_edges: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.log10_edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.counts)} counts need {len(self.counts) + 1} edges")


@dataclass(frozen=True)
class LayerRecord:
    """A layer compared with the original's, both run on outputs of the original's earlier layers.

    Attributes:
        name: of the submodule of the original; what follows the last one has a name of its own.
        value: name of the value that it gives in the float32 graph; None after the last layer.
        max_relative_error: largest of all cases; None if one is not finite.
        passed: every case is within tolerance.
    """

    name: str
    value: str | None
    max_relative_error: float | None
    passed: bool


@dataclass(frozen=True)
class HeadRecord:
    """A language model's head beside the original's, where cases compare its hidden states.

    Attributes:
        passed: logits are within tolerance at every position at which they were computed.
        positions: those, drawn over all cases, and where hidden states differ by more than the
            bound allows.
        tokens: tokens of all cases, at each of which hidden states were compared.
        bound: what hidden states can move logits by at any other position, relative to the largest
            logit.
        max_relative_error: largest difference of logits over the largest of the original.
        max_absolute_error: largest difference.
    """

    passed: bool
    positions: int
    tokens: int
    bound: float | None
    max_relative_error: float | None
    max_absolute_error: float | None


@dataclass(frozen=True)
class ParityRecord:
    """The artifact's outputs compared with the original's over all cases.

    Attributes:
        passed: every case passed and there was one; so did greedy decoding.
        max_relative_error: largest of all cases; None if one is not finite or there is none.
        max_absolute_error: likewise.
        lengths: sequence lengths that were tried, in order.
        tolerance: limits that applied.
        smallest_denominator: of normalised linear attention; None where there is none.
        cases: every comparison; of a proof by layers the worst layer's of each.
        greedy: greedy decoding, for a language model.
        first_divergence: first wrong value of the graph, for a failure.
        histogram: errors of all elements.
        layers: of a proof by layers, in which the whole was not run; else empty.
        padded_original: largest error of the original's own padded rows against each row alone, for
            a language model; None where they were not run. The artifact follows the row alone.
        head: of a language model of many words, whose cases compare hidden states; else None.
    """

    passed: bool
    max_relative_error: float | None
    max_absolute_error: float | None
    lengths: tuple[int, ...]
    tolerance: ToleranceRecord
    smallest_denominator: DenominatorRecord | None
    cases: tuple[CaseRecord, ...] = field(repr=False)
    greedy: GreedyRecord | None
    first_divergence: DivergenceRecord | None
    histogram: HistogramRecord = field(repr=False)
    layers: tuple[LayerRecord, ...] = ()
    padded_original: float | None = None
    head: HeadRecord | None = None


@dataclass(frozen=True)
class TokenNodeRecord:
    """A node that looks back by a number of tokens, or mixes tokens.

    Attributes:
        node: its name.
        op: its operator; "Gather in Scan" in the body of another.
        kind: "window" looks back no further than there are rows of past tokens; "stateful" does so
            by a state of an op; "mixing" gives other values than in the whole sequence, or cannot
            be read.
        reach: how many tokens behind its own it looks; None where that is not known.
        rows: rows of past tokens that there are for it; None for all.
        line: source line of the model's author, where it is known.
        reason: why it mixes tokens; None where it does not.
        advice: what would make it stream, where that is known.
    """

    node: str
    op: str
    kind: Literal["stateful", "window", "mixing"]
    reach: int | None
    rows: int | None
    line: str | None
    reason: str | None = None
    advice: str | None = None


@dataclass(frozen=True)
class TokenFlowRecord:
    """The nodes on ways from tokens to outputs, counted by what they do along the tokens.

    Attributes:
        tokenwise: nodes that work on each token alone.
        stateful: nodes that carry a state.
        offset: nodes that count positions from the tokens of earlier calls.
        window: nodes that look back no further than there are rows of past tokens.
        mixing: nodes that mix tokens otherwise; states are exported only if there are none.
        nodes: those that look back by a number of tokens, and those that mix tokens.
        reaches: how far nodes look back, and other numbers used along the tokens: streaming is
            tried past twice each.
    """

    tokenwise: int
    stateful: int
    offset: int
    window: int
    mixing: int
    nodes: tuple[TokenNodeRecord, ...]
    reaches: tuple[int, ...]


@dataclass(frozen=True)
class StreamingRecord:
    """A sequence fed in pieces, compared with the same sequence fed whole.

    Attributes:
        passed: they agree; None where there is nothing to stream.
        reason: cause of a failure, or of there being nothing to stream.
        max_relative_error: largest error over all splits.
        splits: lengths of the pieces, for each split tried.
        skipped: longer sequence that was not tried, and why; None without one.
    """

    passed: bool | None
    reason: str | None
    max_relative_error: float | None = None
    splits: tuple[tuple[int, ...], ...] = ()
    skipped: str | None = None


@dataclass(frozen=True)
class LibraryRecord:
    """The CPU library's results, compared with those of the functions or of the original.

    Parity and streaming of a conversion are of the functions that nodes carry, which run anywhere.

    Attributes:
        against: "functions", at conversion, or "original", by ``validate``, whose parity is then
            the library's.
        passed: they agree at every case; None where the library does not run the model.
        reason: cause of a failure, or of its not being run.
        version: digest of the library's sources and of what writes graphs for it; None where
            there is none.
        instruction_set: vector instructions it used.
        cases: sizes that were tried, and splits of a sequence.
        max_relative_error: largest of them.
    """

    against: Literal["functions", "original"]
    passed: bool | None
    reason: str | None = None
    version: str | None = None
    instruction_set: str | None = None
    cases: int = 0
    max_relative_error: float | None = None
