"""Running an artifact: whole sequences, and streams that hold the recurrent state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from linexport import manifest as manifests
from linexport import targets
from linexport.artifact import text
from linexport.artifact.language_model import Prompt, language_model
from linexport.artifact.sampling import Sampling, continuation
from linexport.errors import EnvironmentProblemError, LinexportError, ParityError, UsageError
from linexport.graph.states import State
from linexport.manifest import Manifest
from linexport.manifest.records import InputRecord

Arrays = dict[str, np.ndarray]
Input = np.ndarray | Mapping[str, np.ndarray]

OWNER = "model_sha256"
"""Entry of a saved stream that says whose state it is."""


def load(
    path: str | Path,
    *,
    threads: int = 0,
    allow_failed: bool = False,
    verify: bool = True,
    engine: bool = True,
) -> Artifact:
    """Open an artifact folder.

    Args:
        path: the folder ``linexport convert`` wrote.
        threads: number of threads, 0 for the runtime's choice.
        allow_failed: open an artifact that failed its parity check.
        verify: compare the size of the model file with the manifest's.
        engine: run the engine for this machine's GPU, where the artifact has engines; False runs
            its ONNX model in ONNX Runtime.

    Raises:
        UsageError: not an artifact, or one that is damaged.
        ParityError: it failed its parity check.
        EnvironmentProblemError: the runtime cannot open it.
    """
    folder = Path(path)
    manifest = manifests.read(folder)
    if manifest.status != "ok" and not allow_failed:
        raise ParityError(
            f"{folder} failed its parity check: its outputs differ from the original's (see "
            f"{folder / manifests.REPORT}). Pass allow_failed=True to open it all the same."
        )
    model = folder / manifests.MODEL
    if verify:
        for name, file in manifest.files.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != file.bytes:
                raise UsageError(
                    f"{folder / name} is damaged: found {found} bytes, expected {file.bytes}. "
                    "Convert the model again."
                )
    target = targets.find(manifest.target)
    try:
        if engine and target.deploy:
            return Artifact(folder, manifest, target.deploy(folder, manifest))
        session = target.open(model, threads=threads)
    except LinexportError:
        raise
    except Exception as error:
        raise EnvironmentProblemError(f"Cannot open {model}: {error}") from error
    return Artifact(folder, manifest, session)


class Artifact:
    """A converted model, ready to run.

    Attributes:
        path: its folder.
        manifest: the content of ``manifest.json``.
    """

    def __init__(self, path: Path, manifest: Manifest, session: targets.Session) -> None:
        self.path = path
        self.manifest = manifest
        self._session = session
        held = [State.from_record(s) for s in manifest.states]
        self._pasts = {s.past: s for s in held}
        self._presents = {s.present: s.past for s in held}
        self._inputs = [i for i in manifest.inputs if i.name not in self._pasts]

    def run(self, *args: Input, **inputs: np.ndarray) -> Arrays:
        """Outputs by name for whole sequences, starting from the initial state.

        Inputs are arrays of the dtypes and shapes the manifest lists: in its order, by name, or
        as one mapping of names to arrays.

        Raises:
            UsageError: an input is missing, unknown, or of the wrong dtype or shape.
        """
        feeds, batch = self._bind(args, inputs)
        return self._call(feeds, self.initial_state(batch))[0]

    def stream(self) -> Stream:
        """A session that consumes sequences piece by piece.

        Raises:
            UsageError: the model has no recurrent state to hold.
        """
        if not self._pasts:
            raise UsageError(f"{self.path} does not stream: {self.manifest.why_stateless}")
        return Stream(self)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        stop: Collection[int] | None = None,
    ) -> Iterator[int]:
        """Token ids that continue a prompt of token ids, one at a time, from the state.

        It ends where the model's context is full, if its configuration names one.

        Args:
            prompt: at least one token id; of bytes, their values.
            max_tokens: None goes on for ever, or until the model ends the text.
            temperature: 0 takes the likeliest token; more draws from softmax(logits / temperature).
            top_k: draw from so many likeliest tokens; 0 from all.
            seed: of the draws.
            stop: tokens that end the text, and are not returned; None for the model's own.

        Raises:
            UsageError: not a language model, no states to continue from, a prompt longer than the
                model's context, or a bad argument.
        """
        model = language_model(self.manifest)
        ids, sampling = model.checked(prompt), Sampling(temperature, top_k, seed)
        ends = text.end_tokens(self.path) if stop is None else frozenset(stop)
        limit = text.context(self.path)
        if limit is not None:
            if ids.size > limit:
                raise UsageError(
                    f"The prompt has {ids.size} tokens; the model was made for {limit} at most. "
                    "Leave out the beginning."
                )
            left = limit - ids.size
            max_tokens = left if max_tokens is None else min(max_tokens, left)
        stream = self.stream()

        def step(tokens: np.ndarray) -> np.ndarray:
            logits: np.ndarray = stream.step({model.tokens: tokens})[model.logits][0, -1]
            return logits

        return continuation(step, ids, sampling, max_tokens, ends)

    def _bind(self, args: tuple[Input, ...], named: Mapping[str, np.ndarray]) -> tuple[Arrays, int]:
        names = [i.name for i in self._inputs]
        if len(args) == 1 and isinstance(args[0], Mapping):
            named, args = {**args[0], **named}, ()
        if len(args) > len(names):
            raise UsageError(f"Found {len(args)} inputs; expected {len(names)}: {names}.")
        feeds = {**dict(zip(names, args, strict=False)), **named}
        optional = {i.name for i in self._inputs if i.default is not None}
        if not set(names) - optional <= set(feeds) <= set(names):
            raise UsageError(f"Found the inputs {sorted(feeds)}; expected {names}.")
        sizes: dict[str, int] = {}
        bound = {
            i.name: self._check(i, np.asarray(feeds[i.name]), sizes)
            for i in self._inputs
            if i.name in feeds
        }
        for i in self._inputs:
            if i.name not in bound:
                shape = [d if isinstance(d, int) else sizes[str(d)] for d in i.shape]
                bound[i.name] = np.full(shape, i.default, i.dtype)
        first = next((s.shape[0] for s in self._pasts.values()), 1)
        return bound, first if isinstance(first, int) else sizes[str(first)]

    def _check(self, wanted: InputRecord, value: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        name, shape = wanted.name, wanted.shape
        if value.dtype != wanted.dtype:
            if not np.can_cast(value.dtype, wanted.dtype, "same_kind"):
                raise UsageError(f"{name} has dtype {value.dtype}; expected {wanted.dtype}.")
            value = value.astype(wanted.dtype)
        fits = value.ndim == len(shape) and all(
            found == expected if isinstance(expected, int) else True
            for found, expected in zip(value.shape, shape, strict=True)
        )
        if not fits:
            raise UsageError(f"{name} has shape {value.shape}; expected {tuple(shape)}.")
        for found, dim in zip(value.shape, shape, strict=True):
            limits = self.manifest.dims.get(dim) if isinstance(dim, str) else None
            if limits is None or not isinstance(dim, str):
                continue
            if sizes.setdefault(dim, found) != found:
                raise UsageError(f"{name} has {dim} {found}; another input has {sizes[dim]}.")
            if limits.max is not None and found > limits.max:
                raise UsageError(f"{name} has {dim} {found}; the model takes at most {limits.max}.")
        return value

    def initial_state(self, batch: int = 1) -> Arrays:
        """The states that begin sequences, by input name; those that grow have no length."""
        return {name: s.start(batch) for name, s in self._pasts.items()}

    def _call(self, feeds: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        """Outputs and next state."""
        outputs = self._session.run({**feeds, **state})
        after = {past: outputs.pop(present) for present, past in self._presents.items()}
        return outputs, after


class Stream:
    """A sequence in progress: ``step`` feeds the next piece, of one token or many.

    The batch size is that of the first step.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._state: Arrays | None = None

    def step(self, *args: Input, **inputs: np.ndarray) -> Arrays:
        """Outputs by name for the next piece of the sequence.

        Raises:
            UsageError: see ``Artifact.run``; or the batch differs from that of the state.
        """
        feeds, batch = self._artifact._bind(args, inputs)
        if self._state is None:
            self._state = self._artifact.initial_state(batch)
        held = next(iter(self._state.values())).shape[0]
        if held != batch:
            raise UsageError(f"This stream has batch {held}; the step has {batch}. Call reset().")
        outputs, self._state = self._artifact._call(feeds, self._state)
        return outputs

    def reset(self) -> None:
        """Begin a new sequence."""
        self._state = None

    def fork(self) -> Stream:
        """A second stream that goes on from here; neither affects the other."""
        other = Stream(self._artifact)
        other._state = copy.deepcopy(self._state)
        return other

    def save(self, path: str | Path) -> None:
        """Write the state to an ``.npz`` file."""
        with Path(path).open("wb") as file:
            owner = np.array(self._artifact.manifest.model_sha256)
            np.savez(file, allow_pickle=False, **(self._state or {}), **{OWNER: owner})

    def restore(self, path: str | Path) -> None:
        """Go on from a saved state.

        Raises:
            UsageError: not a saved state, or one of another model.
        """
        try:
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            with file:
                state = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise UsageError(f"{path} is not a saved stream: {error}.") from None
        owner = str(state.pop(OWNER, None))
        if owner != self._artifact.manifest.model_sha256:
            raise UsageError(f"{path} holds the state of another model, SHA-256 {owner}.")
        if state:
            self._check_state(Path(path), state)
        self._state = state or None

    def _check_state(self, path: Path, state: Arrays) -> None:
        expected = {s.past: State.from_record(s) for s in self._artifact.manifest.states}
        sizes: dict[str, int] = {}
        wrong = [
            name
            for name in sorted({*state, *expected})
            if name not in state
            or name not in expected
            or not expected[name].fits(state[name], sizes)
        ]
        if wrong:
            raise UsageError(
                f"{path} holds the state of another model: {wrong[0]} does not fit. Expected "
                f"{ {n: s.shape for n, s in expected.items()} }."
            )
