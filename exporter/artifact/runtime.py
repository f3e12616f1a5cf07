"""Running an artifact: whole sequences, text, and streams that keep the recurrent state."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import linexport
from linexport import manifest as manifests
from linexport import targets
from linexport.artifact import opening, signature
from linexport.artifact.call_inputs import Arrays, Input, Range
from linexport.artifact.folder_files import FolderFiles
from linexport.artifact.model import Model
from linexport.artifact.signature import Trust
from linexport.artifact.stream import Stream
from linexport.artifact.text.images import image_inputs, images_of, vision_of
from linexport.artifact.text.language_interface import logits_of
from linexport.artifact.text.model import TextModel
from linexport.errors import EnvironmentProblemError, LinexportError, ParityError, UsageError
from linexport.graph.external_data import ModelFile
from linexport.graph.interface import check_interface, check_tower
from linexport.manifest import Manifest
from linexport.manifest.placement import PlacementRecord
from linexport.manifest.records import FileRecord, VisionRecord
from linexport.sources.onnx_file.index_ranges import index_range
from linexport.targets.base import DeviceSession, uses_library
from linexport.targets.cpu_fusion.version import native_version
from linexport.targets.runtime import providers
from linexport.targets.runtime.providers import Execution

log = logging.getLogger(__name__)


def load(
    path: str | Path,
    *,
    threads: int = 0,
    allow_failed: bool = False,
    verify: bool = True,
    engine: bool = True,
    key: str | Path | None = None,
    newer_than: str | None = None,
    provider: str = providers.CPU,
    strict: bool = False,
    device: int = 0,
) -> Artifact:
    """Open an artifact folder.

    An artifact that is replaced meanwhile is opened as it was before, or as it is after. Where the
    CPU library is built, it runs the linexport ops that it has, unless the environment variable
    LINEXPORT_CPU_LIBRARY is 0.

    The bytes that are compared with digests are those that run: models are read once, into memory.
    Data files of weights are mapped for as long as the artifact is open: nobody may write to them.

    Args:
        path: the folder ``linexport convert`` wrote.
        threads: number of threads, 0 for the runtime's choice.
        allow_failed: open an artifact that failed a check.
        verify: compare the files with the sizes and the digest in the manifest.
        engine: run the engine for this machine's GPU, where the artifact has engines; False runs
            its ONNX model in ONNX Runtime.
        key: file of an ed25519 public key, or a folder of such files (``.pub``); the artifact must
            be as the owner of one of them signed it.
        newer_than: with ``key``: a time, ISO 8601, after which it must have been signed.
        provider: ONNX Runtime's execution provider that runs it, one of
            ``linexport.targets.runtime.providers.PROVIDERS``. What it does not take runs on the
            CPU, and ``Artifact.placement`` says what that is.
        strict: with another provider than the CPU: linexport ops and states must not run on the
            CPU.
        device: index of the GPU that runs the engine.

    Raises:
        UsageError: not an artifact, one that is damaged, or one whose graph is not opened; an
            unknown provider, or one that does not open artifacts of this target.
        SignatureError: it is not as it was signed.
        ParityError: it failed a check of parity or of quantised weights.
        EnvironmentProblemError: the runtime cannot open it; the provider is not installed, does not
            start or takes no node; or, with ``strict``, leaves an op or a state to the CPU.
    """
    execution = Execution(provider, strict)
    # A link may point elsewhere later: text and tokenizer are then still those of this artifact.
    folder = Path(os.path.realpath(path) if os.path.islink(path) else path)  # noqa: PTH114
    options = {
        "threads": threads,
        "allow_failed": allow_failed,
        "verify": verify,
        "engine": engine,
        "key": None if key is None else Path(key).absolute(),
        "newer_than": newer_than,
        "provider": execution.provider,
        "strict": execution.strict,
        "device": device,
    }
    return opening.steadily(folder, lambda: _load(folder, execution, **options))


def _load(folder: Path, execution: Execution, **options: Any) -> Artifact:
    files = FolderFiles(folder)
    if options["key"] is not None:
        signature.check(files, Trust(options["key"], options["newer_than"]))
    manifest = opening.read_manifest(files)
    if manifest.status != "ok" and not options["allow_failed"]:
        raise ParityError(
            f"{folder} {manifest.failure} (see {folder / manifests.REPORT}). Pass "
            "allow_failed=True to open it all the same."
        )
    if options["verify"]:
        opening.check_files(files, manifest)
    target, model = targets.find_target(manifest.target), folder / manifests.MODEL
    execution.check_target(target.name, target.deploy is not None)
    content, graph = _read(files, manifest, manifests.MODEL)
    check_interface(manifest, graph, str(folder / manifests.MANIFEST))
    ranges = {i.name: index_range(graph, i.name) for i in manifest.inputs}
    deploy = target.deploy if options["engine"] else None
    if options["device"] and deploy is None:
        raise UsageError(
            f"device is {options['device']}, and {folder} is run by ONNX Runtime. Devices are of "
            "artifacts with an engine: leave it out."
        )
    with _opening(model):
        if deploy is not None:
            session = deploy(folder, manifest, options["device"])
        else:
            native = uses_library(manifest)
            session = target.open(
                content,
                threads=options["threads"],
                native=native,
                execution=execution,
                logits=logits_of(manifest),
            )
            if execution.provider == providers.CPU and getattr(session, "native", False):
                _say_what_is_proven(folder, manifest)
            placement = getattr(session, "placement", None)
            if placement is not None:
                _say_where_it_runs(model, placement)
                _say_what_is_compared(folder, manifest, placement)
    found = {name: values for name, values in ranges.items() if values}
    tower = None
    if manifest.vision is not None:
        tower = _tower(files, manifest, manifest.vision, options["threads"], execution)
    head = None
    if manifest.mtp is not None:
        head = _predictor(files, manifest, options["threads"], execution)
    files.check_unchanged(but=files.kept())
    given: dict[str, Any] = {"ranges": found, "options": options}
    return Artifact(folder, manifest, session, **given, tower=tower, predictor=head)


def _read(files: FolderFiles, manifest: Manifest, name: str) -> tuple[ModelFile, onnx.ModelProto]:
    """Return the content of a model, and the graph in it."""
    graph = opening.read_graph(files, name)
    opening.check_listed(files.folder / name, graph, manifest)
    content = ModelFile(files.content(name, opening.LARGEST_MODEL), files.folder)
    return content, graph


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Turn what a runtime raises for a model, which may be anything, into an error that names it.

    Raises:
        EnvironmentProblemError: it raised something else than linexport does.
    """
    try:
        yield
    except LinexportError:
        raise
    except Exception as error:
        raise EnvironmentProblemError(f"Cannot open {path}: {error}") from error


def _predictor(files: FolderFiles, manifest: Manifest, threads: int, execution: Execution) -> Model:
    """Open the head for multi-token prediction of an artifact."""
    assert manifest.mtp is not None
    own = manifest.predictor()
    content, graph = _read(files, manifest, manifest.mtp.file)
    check_interface(own, graph, str(files.folder / manifests.MANIFEST))
    ranges = {i.name: index_range(graph, i.name) for i in own.inputs}
    with _opening(files.folder / manifest.mtp.file):
        session = targets.find_target(manifest.target).open(
            content, threads=threads, native=uses_library(manifest), execution=execution
        )
    return Model(own, session, {name: values for name, values in ranges.items() if values})


def _tower(
    files: FolderFiles,
    manifest: Manifest,
    vision: VisionRecord,
    threads: int,
    execution: Execution,
) -> targets.InferenceSession:
    """Open the vision tower of an artifact."""
    path = files.folder / vision.file
    content, graph = _read(files, manifest, vision.file)
    check_tower(vision, graph, str(files.folder / manifests.MANIFEST))
    with _opening(path):
        session = targets.base.OrtSession(content, threads, execution=execution)
    if session.placement is not None:
        _say_where_it_runs(path, session.placement)
    return session


def _say_where_it_runs(model: Path, found: PlacementRecord) -> None:
    """Log what an execution provider runs of a model: a warning where ops are left to the CPU."""
    level = logging.WARNING if found.on_cpu else logging.INFO
    log.log(level, "%s: %s.", model, found.described())


def _say_what_is_compared(folder: Path, manifest: Manifest, found: PlacementRecord) -> None:
    """Log that the model was not compared with the original where it runs."""
    if manifest.placement != found:
        log.warning(
            "%s was not compared with the original on this execution provider: linexport validate "
            "%s --provider %s --record does so.",
            *(folder, folder, found.provider),
        )


def _say_what_is_proven(folder: Path, manifest: Manifest) -> None:
    """Log that the library which runs the artifact is not the one that was compared."""
    known = manifest.library
    if known and known.passed and known.version == native_version():
        return
    what = "no CPU library" if known is None or not known.passed else "another version of it"
    log.warning(
        "%s runs by the CPU library, and %s was compared with the original: linexport validate %s "
        "--record does so; LINEXPORT_CPU_LIBRARY=0 leaves it aside.",
        *(folder, what, folder),
    )


class Artifact(TextModel):
    """A converted model, ready to run; several threads may do so.

    Pickled, it is its folder and the digest of its model: it is opened again where it arrives.

    Attributes:
        path: its folder.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        session: targets.InferenceSession,
        *,
        ranges: Mapping[str, Range] | None = None,
        options: Mapping[str, Any] | None = None,
        tower: targets.InferenceSession | None = None,
        predictor: Model | None = None,
    ) -> None:
        super().__init__(manifest, session, ranges or {}, tower, predictor)
        self._path = path
        self._options = options or {}

    def __repr__(self) -> str:
        return f"<Artifact {str(self.path)!r}: {self.manifest.summary}>"

    @property
    def path(self) -> Path:
        return self._path

    @property
    def placement(self) -> PlacementRecord | None:
        """The nodes that run on the execution provider and on the CPU; None for the CPU alone."""
        return getattr(self._session, "placement", None)

    @property
    def verified(self) -> Mapping[str, FileRecord]:
        """Files whose digests held when this was opened, by name; none with ``verify=False``."""
        compared = self._options.get("verify") or self._options.get("key")
        return self.manifest.files if compared else {}

    def run(self, *args: Input, logits_to_keep: int = 0, **inputs: np.ndarray) -> Arrays:
        """Return outputs by name for whole sequences, starting from the initial state.

        Args:
            args: arrays of the dtypes and shapes that the manifest lists, in its order, or one
                mapping of names to arrays.
            logits_to_keep: of a language model: return the logits of so many last tokens, which
                saves the time and memory of the others; 0 returns those of all.
            inputs: the same by name.

        Raises:
            UsageError: an input is missing, unknown, of the wrong dtype or shape, without elements,
                or a token id that is not in the vocabulary.
        """
        self.check_kept(logits_to_keep)
        feeds, batch = self.inputs.bind(args, inputs)
        state = self.hold(self.initial_state(batch))
        outputs, _ = self.call(feeds, state, logits_to_keep=logits_to_keep)
        return self.kept(outputs, logits_to_keep)

    def image_inputs(self, ids: np.ndarray, images: Mapping[str, object]) -> Arrays:
        """Return the inputs for images among token ids, for ``run`` and ``Stream.step``.

        Args:
            ids: (batch, seq), or (seq,) of one row, with the image token where images are.
            images: as the model's image processor gives them: ``pixel_values`` and grids. Images
                are in the order of the tokens, row after row.

        Raises:
            UsageError: the model has no vision tower, or these are not the images of the tokens.
        """
        vision = vision_of(self.manifest, self.path)
        assert self.tower is not None
        return image_inputs(vision, self.tower.run, np.atleast_2d(ids), images_of(images))

    def feeds(self, *args: Input, **inputs: np.ndarray) -> Arrays:
        """Return all inputs of the graph for whole sequences, initial states among them.

        Arguments and errors are those of ``run``.
        """
        feeds, batch = self.inputs.bind(args, inputs)
        return {**feeds, **self.initial_state(batch)}

    def stream(self, *, finite: bool = True, history: int = 0) -> Stream:
        """Return a session that consumes sequences piece by piece.

        Args:
            finite: find NaN and infinity in inputs and states; see ``Stream``.
            history: number of tokens that ``rewind`` can go back, at the cost of a state a step.

        Raises:
            UsageError: the model has no recurrent state to hold.
        """
        if not self.states:
            raise UsageError(f"{self.path} does not stream: {self.manifest.why_stateless}")
        return Stream(self, finite=finite, history=history)

    def pool(self, **options: Any) -> linexport.Pool:
        """Return a pool of sessions that share calls of the model.

        Options and errors are those of ``linexport.Pool``.
        """
        return linexport.Pool(self, **options)

    def prefix_cache(self, **options: Any) -> linexport.PrefixCache:
        """Return a cache of states after known prefixes, for ``pool(cache=...)``.

        Options and errors are those of ``linexport.PrefixCache``. Pools of several models may
        share one.
        """
        return linexport.PrefixCache(**options)

    def close(self) -> None:
        """Free what an engine holds on its GPU, arrays that calls returned there among it.

        Nothing can be run afterwards. Of an artifact without an engine, nothing is done.
        """
        if isinstance(self._session, DeviceSession):
            self._session.close()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the folder, the digest and the options it was opened with."""
        if not self._options:
            raise TypeError("only an artifact that linexport.load opened can be pickled")
        return _reopen, (self.path.absolute(), dict(self._options), self.model_sha256)


def _reopen(path: Path, options: dict[str, Any], digest: str) -> Artifact:
    artifact = load(path, **options)
    if artifact.model_sha256 != digest:
        raise UsageError(
            f"{path} is not the artifact that was pickled: the SHA-256 of its model is "
            f"{artifact.model_sha256}, expected {digest}."
        )
    return artifact
