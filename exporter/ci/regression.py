"""Latency, memory and error of an artifact beside an earlier measurement, noise allowed for.

Another program on the machine slows everything down alike. So calls of the artifact take turns
with calls of a yardstick, one matrix product, and the median of the ratios is compared:

    change    r_now / r_then - 1
    noise     3 sqrt(s_now^2 + s_then^2),   s = 1.858 MAD / (r sqrt(n)), of the median of n ratios
    regressed change - noise > limit

1.858 is sqrt(pi / 2) * 1.4826, which makes the median absolute deviation (MAD) the standard error
of a median of normally distributed values. What exceeds the limit by less than the noise is
measured again with more calls, and called unclear if it then still does.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import TensorProto, helper
from pydantic import TypeAdapter, ValidationError

from linexport import targets
from linexport.artifact import write
from linexport.errors import UsageError
from linexport.graph import dims
from linexport.manifest import MODEL, Manifest
from linexport.parity import ModelUnderTest
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.reference import feeds
from linexport.system import environment
from linexport.targets.base import OrtSession
from linexport.timing.peak_memory import peak_megabytes

FORMAT = 1
PREFILL, MEMORY_LENGTH = 512, 1024
CALLS, MORE = 40, 160
"""Calls of one figure, and where that leaves the question open."""

MEMORY_RUNS = 3
MEMORY_NOISE = 2.0
"""Megabytes that the peak of equal runs differs by."""

ERROR_NOISE = 0.02
"""Part of the tolerance that errors differ by where sums are taken in another order."""

Verdict = Literal["same", "better", "regressed", "unclear", "not compared"]


@dataclass(frozen=True)
class Timing:
    """Calls of one kind: median milliseconds, the median ratio to the yardstick, its error."""

    milliseconds: float
    ratio: float
    standard_error: float
    calls: int


@dataclass(frozen=True)
class Figures:
    """Content of a baseline file.

    Attributes:
        format: version of the file.
        linexport: version that measured.
        created: when, in UTC.
        cpu: model of the processor; latencies of two processors are not compared.
        threads: 0 for the runtime's choice.
        target: of the artifact.
        error: largest relative error of all parity cases; None if one is not finite.
        tolerance: relative error allowed.
        latency: by name, such as "prefill 512".
        memory: peak megabytes of one run; None where the system does not say.
    """

    format: int
    linexport: str
    created: str
    cpu: str
    threads: int
    target: str
    error: float | None
    tolerance: float
    latency: dict[str, Timing]
    memory: float | None


@dataclass(frozen=True)
class Change:
    """One figure beside the baseline's; ``change`` and ``noise`` are parts of the latter."""

    name: str
    before: float | None
    after: float | None
    unit: str
    change: float | None
    noise: float
    verdict: Verdict

    def described(self) -> str:
        """Return both figures and the change, for people."""
        if self.before is None or self.after is None:
            return "there is no figure to compare"
        text = f"{self.before:.4g} -> {self.after:.4g}{self.unit and ' ' + self.unit}"
        if self.change is None:
            return text
        return f"{text} ({self.change:+.0%}, noise {self.noise:.0%})"


class Meter:
    """Measures the figures of one artifact.

    Args:
        folder: of the artifact.
        manifest: of it, with parity.
        tested: the artifact, whose inputs are drawn.
        threads: 0 for the runtime's choice.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, tested: ModelUnderTest, threads: int
    ) -> None:
        self._model, self._manifest, self._tested = folder / MODEL, manifest, tested
        self._threads = threads
        self._session = targets.find_target(manifest.target).open(
            self._model, threads=threads, taking_turns=True
        )
        self._yardstick = _yardstick(threads)

    def figures(self, created: str) -> Figures:
        """Measure everything."""
        parity = self._manifest.parity
        assert parity is not None
        return Figures(
            format=FORMAT,
            linexport=self._manifest.linexport,
            created=created,
            cpu=str(environment.describe().get("cpu") or "unknown"),
            threads=self._threads,
            target=self._manifest.target,
            error=parity.max_relative_error,
            tolerance=parity.tolerance.relative,
            latency={name: self.timing(name, CALLS) for name in self._calls()},
            memory=self._memory(),
        )

    def timing(self, name: str, calls: int) -> Timing:
        """Time one kind of call, in turns with the yardstick."""
        call = self._calls()[name]
        for _ in range(3):
            call()
            self._yardstick()
        seconds = [(_seconds(call), _seconds(self._yardstick)) for _ in range(calls)]
        ratios = [own / other for own, other in seconds]
        ratio = statistics.median(ratios)
        spread = statistics.median(abs(r - ratio) for r in ratios)
        error = math.sqrt(math.pi / 2) * 1.4826 * spread / (ratio * math.sqrt(calls))
        return Timing(1e3 * statistics.median(s for s, _ in seconds), ratio, error, calls)

    def _calls(self) -> dict[str, Callable[[], object]]:
        sequence = dims.sequence(self._tested.dims)
        if sequence is None:
            return {"call": self._call({})}
        length = self._tested.dims[sequence].nearest(PREFILL)
        found = {f"prefill {length}": self._call({sequence: length})}
        if self._tested.states and self._tested.dims[sequence].allows(1):
            found["decode"] = self._call({sequence: 1})
        return found

    def _call(self, sizes: Mapping[str, int]) -> Callable[[], object]:
        fed = self._fed(sizes)
        return lambda: self._session.run(fed)

    def _fed(self, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        tested = self._tested
        every = {
            name: limits.nearest(1 if limits.batch else tested.traced[name])
            for name, limits in tested.dims.items()
        }
        case = Case("timing", {**every, **sizes}, 0)
        inputs = feeds(draw_inputs(tested.loaded, tested.input_shapes, case), tested.input_names)
        return {**inputs, **tested.initial_state(tested.batch(case.sizes))}

    def _memory(self) -> float | None:
        sequence = dims.sequence(self._tested.dims)
        sizes = {sequence: self._tested.dims[sequence].nearest(MEMORY_LENGTH)} if sequence else {}
        small = {sequence: min(8, sizes[sequence])} if sequence else {}
        with tempfile.TemporaryDirectory() as work:
            first, second = Path(work) / "inputs.npz", Path(work) / "small.npz"
            for path, chosen in ((first, sizes), (second, small)):
                np.savez(path, allow_pickle=False, **self._fed(chosen))
            model, target = str(self._model), self._manifest.target
            peaks = [
                peak_megabytes("onnx", model, first, second, target)[0] for _ in range(MEMORY_RUNS)
            ]
        found = [peak for peak in peaks if peak is not None]
        return statistics.median(found) if found else None


def compare_figures(before: Figures, after: Figures, meter: Meter, limit: float) -> list[Change]:
    """Return every figure beside the baseline's.

    Args:
        before: the baseline.
        after: as measured now.
        meter: measures again what is unclear.
        limit: part of the baseline by which a figure may be worse.
    """
    latency = [
        _latency(name, before, after, meter, limit) for name in {**before.latency, **after.latency}
    ]
    return [*latency, _memory(before, after, limit), _error(before, after, limit)]


def _latency(name: str, before: Figures, after: Figures, meter: Meter, limit: float) -> Change:
    then, now = before.latency.get(name), after.latency.get(name)
    label = f"latency of {name}"
    if then is None or now is None or before.cpu != after.cpu or before.threads != after.threads:
        one, other = (None if t is None else t.milliseconds for t in (then, now))
        return Change(label, one, other, "ms", None, 0.0, "not compared")
    change, noise = _difference(then, now)
    if change > limit >= change - noise:
        now = meter.timing(name, MORE)
        change, noise = _difference(then, now)
    verdict = _verdict(change, noise, limit)
    return Change(label, then.milliseconds, now.milliseconds, "ms", change, noise, verdict)


def _difference(then: Timing, now: Timing) -> tuple[float, float]:
    noise = 3 * math.hypot(then.standard_error, now.standard_error)
    return now.ratio / then.ratio - 1, noise


def _verdict(change: float, noise: float, limit: float) -> Verdict:
    if change - noise > limit:
        return "regressed"
    if change > limit:
        return "unclear"
    return "better" if change + noise < -limit else "same"


def _memory(before: Figures, after: Figures, limit: float) -> Change:
    then, now = before.memory, after.memory
    if then is None or now is None:
        return Change("peak memory", then, now, "MB", None, 0.0, "not compared")
    noise = MEMORY_NOISE / max(then, MEMORY_NOISE)
    change = now / max(then, 1e-9) - 1
    if abs(now - then) <= MEMORY_NOISE:
        return Change("peak memory", then, now, "MB", change, noise, "same")
    return Change("peak memory", then, now, "MB", change, noise, _verdict(change, noise, limit))


def _error(before: Figures, after: Figures, limit: float) -> Change:
    then, now = before.error, after.error
    if then is None or now is None:
        worse = then is not None
        return Change("error", then, now, "", None, 0.0, "regressed" if worse else "not compared")
    allowed = ERROR_NOISE * after.tolerance
    change, noise = now / max(then, 1e-12) - 1, allowed / max(then, allowed)
    if abs(now - then) <= allowed:
        return Change("error", then, now, "", change, noise, "same")
    return Change("error", then, now, "", change, noise, _verdict(change, noise, limit))


def save_figures(figures: Figures, path: Path) -> None:
    """Write a baseline file in one step.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write.replace_text(path, json.dumps(asdict(figures), indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror}. Name another file.") from None


def read_figures(path: Path) -> Figures:
    """Read a baseline file.

    Raises:
        UsageError: there is none, or it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"Cannot read the baseline {path}: {error.strerror}. Make one from a state of the "
            "project that is good: linexport validate ARTIFACT --write-baseline FILE."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not a baseline: {error}.") from None
    return _checked(path, found)


def _checked(path: Path, found: Any) -> Figures:
    if isinstance(found, dict) and found.get("format") != FORMAT:
        raise UsageError(
            f"{path} is a baseline of format {found.get('format')}; this version reads {FORMAT}. "
            "Write it again with --write-baseline."
        )
    try:
        return TypeAdapter(Figures).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UsageError(f"{path} is not a baseline: {place}: {first['msg']}.") from None


def parse_percent(text: str) -> float:
    """Return 0.1 for "10%" or "10".

    Raises:
        UsageError: something else.
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise UsageError(f"--fail-on-regression {text!r}: expected a percentage, such as 10%.")
    return value / 100


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _yardstick(threads: int, size: int = 384) -> Callable[[], object]:
    """Return a call of one matrix product in ONNX Runtime, with as many threads."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (size, size)) for n in "abc"]
    product = helper.make_node("MatMul", ["a", "b"], ["c"])
    graph = helper.make_graph([product], "yardstick", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = OrtSession(model.SerializeToString(), threads=threads, taking_turns=True)
    ones = np.ones((size, size), np.float32)
    return lambda: session.run({"a": ones, "b": ones})
