"""Small seeded models as a user's module, artifacts made from them once, and the program."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Triton reads it when it is imported, and any test module may be the first to import it.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import settings

import linexport
from linexport.artifact import Artifact
from linexport.manifest import Manifest, from_json, read
from linexport.system import memory
from tests.support import FACTORIES, command_line
from tests.support.command_line import Result

MODULE = "small_models"

# Examples have no deadline, as those of the profile "ci" have none: a busy machine is not a fault.
if settings.get_current_profile_name() == "default":
    settings.register_profile("local", deadline=None)
    settings.load_profile("local")


LONGEST = {
    *("test_pages.py", "test_keep.py", "test_gpu_check.py", "test_ray.py", "test_images.py"),
    *("test_runtimes.py", "test_vision.py", "test_formulations.py", "test_softmax_attention.py"),
}
"""Files that take about a minute or more."""

SHORT = ("loops/", "match/", "passes/", "patches/", "sources/test_carried_buffers.py")
"""Rooms and files whose conversions are compared at fewer tokens."""
SHORT_LENGTH, SHORT_STREAM = 517, 261
"""Tokens of whole sequences and of streams there: several chunks of any size, the last not full."""

memory.collect_rarely()
# What all tests before left is looked through each time, and hundreds of models were traced.
gc.set_threshold(*gc.get_threshold()[:2], 400)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell: programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files that take longest while there are others to run beside them."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="module", autouse=True)
def short_comparisons(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what the tests of ``SHORT`` convert at up to 517 tokens in place of 4,097.

    Their tests are about what is found and rewritten, and compare at lengths of their own. The
    original's loops over tokens, which Python runs, would take most of their time. All other rooms
    compare as users do: parity, conversion, targets, models of libraries, and documented commands.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(Path(__file__).parent).as_posix().startswith(SHORT):
            patch.setattr("linexport.parity.cases.LONG_SEQUENCE", SHORT_LENGTH)
            patch.setattr("linexport.parity.cases.AREA", 64 * SHORT_LENGTH)
            patch.setattr("linexport.parity.streams.check.LONG_STREAM", SHORT_STREAM)
        yield


@pytest.fixture(scope="session")
def factories() -> SimpleNamespace:
    """The small models of tests/support; ``source(name)`` is what the program is given."""
    path = FACTORIES / f"{MODULE}.py"
    return SimpleNamespace(folder=FACTORIES, path=path, source=lambda name: f"{MODULE}:{name}")


@pytest.fixture(scope="session")
def converted(
    factories: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``converted(factory, **options)``: an artifact made once and shared; change copies only."""
    folder = tmp_path_factory.mktemp("artifacts")
    made: dict[str, Path] = {}

    def convert(name: str, **options: Any) -> Path:
        key = repr((name, sorted(options.items())))
        if key not in made:
            place = folder / str(len(made))
            settings = {"bench": False, "threads": 1, **options}
            linexport.convert(factories.source(name), place, **settings)
            made[key] = place
        return made[key]

    return convert


@pytest.fixture(scope="session")
def model(converted: Callable[..., Path]) -> Artifact:
    """A byte-level language model."""
    return linexport.load(converted("language_model"), threads=1)


@pytest.fixture
def host_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """The execution provider ``host``: the CPU's, with states held as on a GPU, in host memory."""
    from linexport.manifest.placement import ORT_CPU
    from linexport.targets.runtime import providers

    stand_in = providers.Provider(ORT_CPU, "onnxruntime", keeps_logits=True)
    monkeypatch.setattr(providers, "NAMES", (*providers.NAMES, "host"))
    monkeypatch.setitem(providers.PROVIDERS, "host", stand_in)


@pytest.fixture(scope="session")
def another(converted: Callable[..., Path]) -> Artifact:
    """A language model of the sizes of ``model`` with other weights."""
    return linexport.load(converted("another_language_model"), threads=1)


@pytest.fixture(scope="session")
def small(converted: Callable[..., Path]) -> Artifact:
    """Takes x (batch, seq, 8) in float32; x^2 is in its state."""
    return linexport.load(converted("small"), threads=1)


@pytest.fixture(scope="session")
def counting(converted: Callable[..., Path]) -> Artifact:
    """Has convolutions, and positions counted for all rows of a call together."""
    return linexport.load(converted("streaming"), threads=1)


@pytest.fixture
def artifact(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy, of the smallest artifact there is, that a test may spoil."""
    place = tmp_path / "artifact"
    shutil.copytree(converted("small"), place)
    return place


@pytest.fixture
def manifest_of() -> Callable[[Path], Manifest]:
    return read


@pytest.fixture
def sample_manifest() -> Manifest:
    """The manifest of a small language model."""
    return from_json(
        json.loads(
            Path(__file__).with_name("report").joinpath("test_report_sample.json").read_text()
        )
    )


@pytest.fixture
def cli(
    factories: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """The program run in this process, which saves the seconds that importing torch takes."""
    from linexport.cli import main

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["linexport", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capfd.readouterr()
        return Result(int(end.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def start() -> Callable[..., subprocess.Popen[str]]:
    """``start(*arguments, cwd=...)``: the program begun as a process of its own."""
    return command_line.start


@pytest.fixture(scope="session")
def program() -> Callable[..., Result]:
    """``program(*arguments, cwd=...)``: the program run as a process of its own."""
    return command_line.run


@pytest.fixture
def miscompile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return ``miscompile(target, change)``, which makes a target wrong.

    It lowers every LinearAttention node as ``change(node)``, a node that means something else. What
    is said of the failure leaves the plain export out, which takes longer than all else.
    """
    from linexport import targets
    from linexport.parity.reference.plain_export import PlainExport

    for module in ("diverge", "language.layers"):
        monkeypatch.setattr(f"linexport.parity.{module}.run_plain_export", lambda *_: PlainExport())

    def spoil(name: str, change: Callable[[Any], Any]) -> None:
        right = targets.find_target(name)

        def candidates(op: Any, node: Any) -> Any:
            found = right.candidates(op, node)
            if op.name != "LinearAttention":
                return found
            return [replace(c, write=lambda n, w=c.write: w(change(n))) for c in found]

        monkeypatch.setitem(targets.loaded, name, replace(right, candidates=candidates))

    return spoil


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Tensors of most tests are tiny, and threads that wait for each other slow a machine down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        yield
