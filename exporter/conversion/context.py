"""Values that the stages of a conversion share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from linexport import targets, trace
from linexport.graph.dims import DimRange
from linexport.manifest import MODEL, ConvertOptions
from linexport.manifest.file_names import MTP, VISION
from linexport.manifest.records import PredictorRecord, VisionRecord
from linexport.parity import ModelUnderTest
from linexport.parity.cases import DEFAULT_SIZES, ChosenSizes
from linexport.parity.reference.extra_outputs import Change, open_changed
from linexport.passes import GraphDump
from linexport.sources import LoadedModel, load_model
from linexport.sources.first_run import run_once
from linexport.sources.memory_map import memory_map_weights
from linexport.sources.onnx_file.module import AS_SPECIFIED
from linexport.sources.weights import check_finite, named_tensors
from linexport.system.progress import Stopwatch


@dataclass(frozen=True)
class Checks:
    """Sizes and tolerance that a conversion is checked on, where they are not the usual.

    Attributes:
        chosen: lengths and batches; empty for the usual ones.
        relative: error allowed, relative to the largest output; None for that of the precision.
        by_layers: each layer of a language model is compared by itself, not the whole.
        builds: engines are built, or prepared, of a target that has them.
    """

    chosen: ChosenSizes = DEFAULT_SIZES
    relative: float | None = None
    by_layers: bool = False
    builds: bool = True

    def applied(self, tested: ModelUnderTest) -> ModelUnderTest:
        """Return what is compared, with these sizes and this tolerance."""
        tolerance = tested.tolerance
        if self.relative is not None:
            why = "As the test asks."
            tolerance = replace(tolerance, relative=self.relative, why=why)
        return replace(tested, chosen=self.chosen, tolerance=tolerance)


@dataclass(frozen=True)
class Job:
    """One run of ``convert``.

    Attributes:
        source: path or ``package.module:callable``, or a model that is loaded.
        options: as the user gave them.
        target: with its options.
        ranges: the user's ranges of dimensions.
        folder: where everything is written.
        watch: shown the stages.
        dump: receives the graph around every pass; None: not requested.
        checks: what it is checked on.
        portable: nodes of the rewritten graph that are lowered to standard operators whatever the
            target prefers, with the reason.
    """

    source: str | Path | LoadedModel
    options: ConvertOptions
    target: targets.Target
    ranges: Mapping[str, DimRange]
    folder: Path
    watch: Stopwatch
    dump: GraphDump | None = None
    checks: Checks = Checks()
    portable: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """The model file."""
        return self.folder / MODEL

    def open(self, native: bool = False) -> targets.InferenceSession:
        """The model as checks open it: with little memory, and threads that sleep in between."""
        return self._opened(self.model, native)

    def open_changed(self, change: Change, native: bool = False) -> targets.InferenceSession:
        """The model with its graph changed, opened as by ``open``."""
        return open_changed(self.model, change, partial(self._opened, native=native))

    def _opened(self, model: Path, native: bool) -> targets.InferenceSession:
        return self.target.open(
            model,
            threads=self.options.threads,
            taking_turns=True,
            low_memory=True,
            native=native,
            settings=AS_SPECIFIED,
        )

    def open_tower(self) -> targets.InferenceSession:
        """Open the artifact's vision tower."""
        return self.target.open(
            self.folder / VISION, threads=self.options.threads, taking_turns=True
        )

    def open_predictor(self, native: bool) -> targets.InferenceSession:
        """Open the artifact's head for multi-token prediction."""
        return self._opened(self.folder / MTP, native)

    def open_changed_predictor(self, change: Change, native: bool) -> targets.InferenceSession:
        """That head with its graph changed."""
        return open_changed(self.folder / MTP, change, partial(self._opened, native=native))


@dataclass(frozen=True)
class TracedOriginal:
    """A loaded and traced model, with the ranges its dimensions may take in the artifact.

    ``vision`` is the tower written with it, and ``mtp`` the head for multi-token prediction.
    """

    loaded: LoadedModel
    traced: trace.Traced
    dims: Mapping[str, DimRange]
    vision: VisionRecord | None = None
    mtp: PredictorRecord | None = None

    @property
    def owns_states(self) -> bool:
        """True where the model's own code says what is carried, so that nothing else is."""
        return self.loaded.decode_module is not None or bool(self.traced.states)


def load_original(
    source: str | Path | LoadedModel,
    config: ConvertOptions,
    vision: bool = True,
    mtp: bool = True,
) -> LoadedModel:
    """Return the model as the options load it, its large weights in a memory-mapped file.

    ``vision`` is False where a vision tower cannot be taken, ``mtp`` where a head for multi-token
    prediction cannot.
    """
    loaded = load_model(
        source,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        **config.loading,
        vision=vision and config.vision,
        mtp=mtp and config.mtp,
    )
    if loaded.program is not None:  # what a file holds is not run before it is to be converted
        run_once(loaded.module, loaded.args, loaded.kwargs, loaded.source.location)
    if isinstance(source, LoadedModel):  # weights may have been changed since it was loaded
        check_finite(named_tensors(loaded.module), loaded.source.location)
    memory_map_weights(loaded)
    if loaded.predictor is not None:
        memory_map_weights(loaded.predictor)
    return loaded
