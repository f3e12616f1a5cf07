"""``Manifest``: the central value. What an artifact is, how it was made, what was found of it.

    convert fills it, ``manifest.json`` holds it, reports show it, ``load`` trusts what it says.

Records are frozen; a later stage makes a new one with ``dataclasses.replace``. Names of fields are
the keys of the JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from linexport.manifest.engines import EngineRecord
from linexport.manifest.matches import MatchRecord
from linexport.manifest.measured import (
    DecodeRecord,
    LatencyRow,
    MeasurementRecord,
    MemoryRow,
    ThroughputRow,
)
from linexport.manifest.options import ConvertOptions
from linexport.manifest.placement import PlacementRecord
from linexport.manifest.prepared import PreparedRecord
from linexport.manifest.proof import (
    LibraryRecord,
    ParityRecord,
    StreamingRecord,
    TokenFlowRecord,
)
from linexport.manifest.quantisation import QuantisationRecord
from linexport.manifest.rewriting import LoweringRecord, NodesRecord, PassRecord, RejectionRecord

FORMAT: Literal[3] = 3
"""Version of the JSON that is written."""

READ = (2, FORMAT)
"""Versions that are read: 3 has keys that 2 had not, each of which may be missing."""

RecordedShape = tuple[int | str | None, ...]
"""Sizes; dynamic ones by name, or None where they have none."""


def named(shape: RecordedShape) -> tuple[int | str, ...]:
    """The shape of an input, whose dynamic sizes have names."""
    return tuple("?" if size is None else size for size in shape)


@dataclass(frozen=True)
class SoftmaxOriginal:
    """The model with softmax attention that a linear form was made of, timed on that occasion.

    Attributes:
        description: one line for people.
        cpu: that it was timed on.
        lengths: in tokens, for one row.
        milliseconds: at each length, of its export or in PyTorch, whichever is faster.
    """

    description: str
    cpu: str
    lengths: tuple[int, ...]
    milliseconds: tuple[float, ...]


def _one_line(text: str) -> str:
    """Return a text whose characters that are not printed are escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True)
class SourceRecord:
    """The original.

    Attributes:
        kind: what was loaded.
        location: its path, or ``package.module:callable``, as the user gave it; the class of an
            object.
        sha256: of its files; None for a factory, which is code, and for an object.
        description: one line for people.
        weights_sha256: of the weights that a factory gave, or an object has; None for files.
        linearized: what it is a linear form of; None where it is none.
    """

    kind: Literal[
        "checkpoint", "exported_program", "onnx", "hugging_face", "diffusers", "factory", "object"
    ]
    location: str
    sha256: str | None
    description: str
    weights_sha256: str | None = None
    linearized: SoftmaxOriginal | None = None

    def __post_init__(self) -> None:
        # Of a folder of others it may have line breaks, which a terminal would show as lines.
        object.__setattr__(self, "description", _one_line(self.description))


@dataclass(frozen=True)
class TensorRecord:
    """A graph output: its NumPy dtype and its shape."""

    name: str
    dtype: str
    shape: RecordedShape


@dataclass(frozen=True)
class InputRecord(TensorRecord):
    """A graph input; ``default`` fills it where the caller leaves it out."""

    default: int | None = None


@dataclass(frozen=True)
class KernelRecord:
    """A kernel of a GPU library that the original calls, and what stood in for it.

    Attributes:
        name: the function, package.module.name.
        package: its package with its version; without one where linexport stands in for the whole
            package.
        stand_in: function of linexport that was called in its place.
        formula: what that computes.
        reference: function of the library in plain PyTorch that it was compared with; "" without.
        error: largest difference from that on the example, relative to the largest value; None
            where there was nothing to compare with.
    """

    name: str
    package: str
    stand_in: str
    formula: str
    reference: str = ""
    error: float | None = None


BUFFER = "Buffer"
"""Name in place of an op: of a buffer that the model's own code writes in each call."""

FIRST_CALL = "FirstCall"
"""Name in place of an op: of an input as it was in the first call of a sequence."""

POOLING_MASK = "pooling_mask"
"""Input of an embedding model that leaves out the prompt: 0 for tokens that are not pooled."""

KEY_VALUES = "KeyValueCache"
"""Name in place of an op: of keys, or values, of attention to earlier tokens."""

INDEXER = "IndexerKeys"
"""Name in place of an op: of keys by which an indexer chooses the tokens that are attended to."""

UNFOLLOWED = (BUFFER, INDEXER)
"""Names of states that a model's nodes are not followed to: its calls are compared alone."""


@dataclass(frozen=True)
class StateRecord:
    """A state: the output ``present`` of a call is the input ``past`` of the next.

    Attributes:
        past: name of the input.
        present: name of the output.
        dtype: of both.
        shape: of the input.
        op: that reads and writes it.
        grows: axis that each call makes longer by the tokens it is fed; None if the shape is fixed.
        initial: value of every element before the first token.
    """

    past: str
    present: str
    dtype: str
    shape: RecordedShape
    op: str
    grows: int | None = None
    initial: float = 0.0

    @property
    def shared(self) -> bool:
        """True of a buffer, or an input, that rows of a batch share: it has no axis of them."""
        return self.op in (BUFFER, FIRST_CALL) and not isinstance(self.shape[0], str)

    @property
    def rows(self) -> str:
        """Words for whether the rows of a batch share it."""
        return "one for all rows of a batch" if self.shared else "one for each row of a batch"


@dataclass(frozen=True)
class RangeRecord:
    """Sizes a dynamic dimension may take.

    Attributes:
        min: smallest size.
        opt: usual size; None if none was named.
        max: largest size; None if nothing bounds it.
        batch: independent samples are stacked along it.
        multiple: every size is a multiple of it.
    """

    min: int
    opt: int | None
    max: int | None
    batch: bool
    multiple: int = field(default=1, kw_only=True)


@dataclass(frozen=True)
class DimRecord(RangeRecord):
    """Sizes a dynamic dimension may take, and the size it had in the example.

    Attributes:
        traced: size in the example inputs.
    """

    traced: int


TOKENS = "tokens"
"""The axis of all tokens of a call, in a ``PackedRecord``."""


@dataclass(frozen=True)
class PackedRecord:
    """The interface of a graph whose calls take sequences of their own lengths, side by side.

    Attributes:
        ends: input with the end of each sequence, after a zero; int32.
        inputs: of the graph, in order. Those of tokens have a batch of 1, and the axis ``TOKENS``.
        outputs: of the graph, in order.
    """

    ends: str
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class StageRecord:
    """Seconds that a stage of the conversion took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of a file of the artifact.

    ``sha256`` is None in an artifact whose format did not record it.
    """

    bytes: int
    sha256: str | None


@dataclass(frozen=True)
class IsolationRecord:
    """How an isolated conversion was confined: what was applied, and what the system lacks."""

    applied: tuple[str, ...]
    unavailable: tuple[str, ...]


HeadName = Literal[
    "causal_lm", "token_classification", "sequence_classification", "hidden_states", "pooled"
]
"""Kinds of outputs of models of tokens."""


@dataclass(frozen=True)
class VisionRecord:
    """The vision tower of the model: one image of grid[0] x grid[1] patches a call.

    Attributes:
        file: ONNX model of the tower.
        image_token: id of the tokens whose embeddings it gives.
        merge: patches along each side of a token.
        grid_positions: tokens of an image have its row and column as positions.
        inputs: pixel values of the patches, and the grid.
        outputs: embeddings of the image's tokens.
    """

    file: str
    image_token: int
    merge: int
    grid_positions: bool
    inputs: tuple[InputRecord, ...]
    outputs: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class PredictorRecord:
    """The head for multi-token prediction, which proposes tokens to the model.

    Attributes:
        file: ONNX model of the head.
        hidden: output of the model that the head reads as its ``hidden_states``.
        inputs: inputs in order, states among them; a token goes with the hidden state of the token
            before it.
        outputs: outputs in order, states among them: logits, and what the head reads in the place
            of the hidden state of a token that it proposed itself.
        states: pairs of an input and the output that continues it.
        parity: comparison with the original's; None before it was made.
        streaming: comparison of split and unsplit sequences; None before it was made.
        hidden_passed: the model's hidden states times the original's output weights are the
            model's logits; None before that was computed.
        hidden_error: their largest difference, relative to the largest logit.
        placement: the execution provider that ran the head when it was compared last; None for the
            CPU.
        token_flow: what its nodes do along the tokens; None for one that was made before that was
            known.
    """

    file: str
    hidden: str
    inputs: tuple[InputRecord, ...]
    outputs: tuple[TensorRecord, ...]
    states: tuple[StateRecord, ...]
    parity: ParityRecord | None = None
    streaming: StreamingRecord | None = None
    hidden_passed: bool | None = None
    hidden_error: float | None = None
    placement: PlacementRecord | None = None
    token_flow: TokenFlowRecord | None = None

    @property
    def passed(self) -> bool:
        """Return whether it was compared with the original and equals it."""
        parity, streaming = self.parity, self.streaming
        equal = bool(parity and parity.passed and streaming and streaming.passed)
        return equal and bool(self.hidden_passed)


Environment = dict[str, str | int | None]
"""Versions of libraries and the machine, by name; None for what is not installed."""


FAILURES = {
    "ok": "",
    "parity_failed": "failed its parity check: its outputs differ from the original's",
    "quantisation_failed": "equals its original in float32, and is past the limit of what its "
    "quantised weights may lose",
}
"""Ends of sentences about an artifact, by its status."""


@dataclass(frozen=True, repr=False)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        format: version of this record.
        linexport: version that wrote it.
        created: date and time in UTC, ISO 8601.
        status: "ok"; "parity_failed" where the artifact does not equal its original; or
            "quantisation_failed" where it did in float32 and its weights in fewer bits lose more
            than is allowed.
        artifact: the folder, as it was named at conversion.
        target: where the artifact runs.
        precision: of weights and activations.
        options: those of ``convert``.
        source: the original.
        warnings: what the user should know.
        inputs: graph inputs in order, states among them.
        outputs: graph outputs in order, states among them.
        states: pairs of an input and the output that continues it.
        dims: dynamic dimensions by name.
        fused: number of linexport ops by their type.
        rejected: what was not fused, and why.
        lowerings: what each linexport op became.
        engines: TensorRT engines of the model.
        nodes: how many there are.
        files: every file but the manifest and the report, by name.
        model_sha256: digest of ``model.onnx``; identifies the model of a saved state.
        parity: comparison with the original; None before it was made.
        streaming: comparison of split and unsplit sequences; None before it was made.
        latency: a row per length, or per batch; None if not measured.
        decode: one token with states; None if not measured or without states.
        memory: a row per length; None if not measured.
        measurement: how times were taken; None if they were not.
        environment: where all this was done.
        seed: of the random inputs.
        stages: seconds of each stage of the conversion.
        passes: those that ran over the graph, in order.
        isolation: how the conversion was confined; None if it was not isolated.
        quantisation: how weights are stored in fewer bits; None where they are not. Parity is then
            that of the float32 graph.
        matches: what was recognised in the graph and fused, with its proof.
        throughput: prefill and decode at depths; None if not measured.
        library: comparison of the CPU library's results; None before it was made.
        head: what the output of a Hugging Face model is; None for other sources.
        vision: the tower whose output ``inputs_embeds`` takes; None without one.
        placement: the execution provider that ran what was compared last; None for the CPU.
        prepared: what builds engines on other machines; None where they are built already.
        mtp: the head that proposes tokens from the model's hidden states; None without one.
        packed: the graph's own interface where its calls take sequences side by side, and
            linexport's rows of one length; None where the two are one.
        token_flow: what its nodes do along the tokens; None for a model without states, and for
            artifacts that were made before that was known.
        kernels: those of GPU libraries that were stood in for while the original ran.
    """

    # For pydantic: no conversion of types, no unknown keys, no NaN.
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "strict": True,
        "extra": "forbid",
        "allow_inf_nan": False,
    }

    format: Literal[3]
    linexport: str
    created: str
    status: Literal["ok", "parity_failed", "quantisation_failed"]
    artifact: str
    target: str
    precision: str
    options: ConvertOptions
    source: SourceRecord
    warnings: tuple[str, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[TensorRecord, ...]
    states: tuple[StateRecord, ...]
    dims: dict[str, DimRecord]
    fused: dict[str, int]
    rejected: tuple[RejectionRecord, ...]
    lowerings: tuple[LoweringRecord, ...]
    engines: tuple[EngineRecord, ...]
    nodes: NodesRecord
    files: dict[str, FileRecord]
    model_sha256: str
    parity: ParityRecord | None
    streaming: StreamingRecord | None
    latency: tuple[LatencyRow, ...] | None
    decode: DecodeRecord | None
    memory: tuple[MemoryRow, ...] | None
    measurement: MeasurementRecord | None
    environment: Environment
    seed: int
    stages: tuple[StageRecord, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    isolation: IsolationRecord | None = None
    quantisation: QuantisationRecord | None = None
    matches: tuple[MatchRecord, ...] = ()
    throughput: tuple[ThroughputRow, ...] | None = None
    library: LibraryRecord | None = None
    head: HeadName | None = None
    vision: VisionRecord | None = None
    placement: PlacementRecord | None = None
    prepared: PreparedRecord | None = None
    mtp: PredictorRecord | None = None
    packed: PackedRecord | None = None
    token_flow: TokenFlowRecord | None = None
    kernels: tuple[KernelRecord, ...] = ()

    def __repr__(self) -> str:
        return f"<Manifest of {self.artifact!r}: {self.status}, {self.summary}>"

    @property
    def summary(self) -> str:
        """The model, where it runs and whether it streams, in a few words."""
        streams = "streams" if self.streaming and self.streaming.passed else "does not stream"
        return f"{self.source.description}, target {self.target}, {streams}"

    @property
    def failure(self) -> str:
        """The check that failed, in words that follow the artifact's name; "" where none did."""
        return FAILURES[self.status]

    @property
    def hidden(self) -> str | None:
        """Return the output that is there for the head for multi-token prediction alone."""
        return None if self.mtp is None else self.mtp.hidden

    def predictor(self) -> Manifest:
        """Return the manifest of the head for multi-token prediction, as a model of its own."""
        assert self.mtp is not None
        own = self.mtp
        return replace(
            self,
            inputs=own.inputs,
            outputs=own.outputs,
            states=own.states,
            parity=own.parity,
            vision=None,
            mtp=None,
            packed=None,
            token_flow=own.token_flow,
        )

    @property
    def not_built(self) -> str | None:
        """Return in words which engines are still to be built; None where it is complete."""
        built = {engine.sm for engine in self.engines}
        if self.prepared is None or built >= {gpu.sm for gpu in self.prepared.gpus}:
            return None
        return self.prepared.described(built)

    @property
    def trusts_library(self) -> bool:
        """Return whether the CPU library was not found to differ."""
        return self.library is None or self.library.passed is not False

    @property
    def kept_attention(self) -> tuple[RejectionRecord, ...]:
        """Return the softmax attentions that have their keys and values as states.

        None, unless there are such states for each and sequences in pieces equal those fed whole:
        then nothing that an attention reads of earlier pieces is missing.
        """
        softmax = tuple(one for one in self.rejected if one.is_softmax)
        states = sum(state.op == KEY_VALUES for state in self.states)
        streams = self.streaming is not None and self.streaming.passed is True
        return softmax if streams and states >= 2 * len(softmax) else ()

    @property
    def refused(self) -> tuple[RejectionRecord, ...]:
        """Return what was not fused, without the attention that is kept."""
        kept = self.kept_attention
        return tuple(one for one in self.rejected if one not in kept)

    @property
    def why_stateless(self) -> str:
        """The reason why the model does not stream."""
        return (self.streaming and self.streaming.reason) or "the manifest gives no reason"
