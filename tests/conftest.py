"""Small seeded models in a module of the user's own, artifacts made of them once, and the program.

Helpers reach the tests through fixtures, because pytest's importlib mode gives test modules no
package to import from.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Triton reads it when it is imported, and any test module may be the first to import it.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

MODULE = "lxfactories"

FACTORIES = '''"""Factories as a user writes them: each returns (module, args[, dynamic_shapes])."""

import torch
from linexport import models
from linexport.models.functional import linear_attention
from torch import nn
from torch.export import Dim


def attend(x, *past, **attributes):
    settings = {"q_num_heads": 2, "kv_num_heads": 2, "normalize": True, "eps": 1e-6, **attributes}
    return linear_attention(x.relu(), x.relu(), x, *past, **settings)


class Attend(nn.Module):
    def forward(self, x):
        return attend(x)[0]


def small():
    return Attend(), (torch.randn(2, 16, 8),)


def example():
    return models.build("language_model", LM), (torch.randint(256, (2, 16)),)


LM = {"dim": 32, "num_heads": 4, "layers": 2}


def language_model():
    model = models.build("language_model", LM)
    return model, model.example_inputs(2, 16, 0), model.dynamic_shapes()


def another_language_model():
    torch.manual_seed(99)
    return language_model()


def layer():
    model = models.build("linear_attention_layer", {"num_heads": 2, "head_dim": 20})
    return model, model.example_inputs(2, 16, 0), model.dynamic_shapes()


def masked():
    return Masked(), (torch.randn(2, 16, 8), torch.rand(2, 16) < 0.8)


class Masked(nn.Module):
    def forward(self, x, keep):
        return linear_attention(
            x.relu(), x.relu(), x, key_mask=keep, q_num_heads=2, kv_num_heads=2
        )[0]


def named():
    return Attend(), (torch.randn(3, 16, 8),), ({0: Dim("items"), 1: Dim("steps", max=512)},)


def fixed_batch():
    return Attend(), (torch.randn(3, 16, 8),), ({1: Dim.DYNAMIC},)


def all_fixed():
    return Attend(), (torch.randn(3, 16, 8),), (None,)


class ReturnsState(nn.Module):
    def forward(self, x):
        output, state, _ = attend(x)
        return output, state * 2, state


def returns_state():
    return ReturnsState(), (torch.randn(2, 16, 8),)


class OwnState(nn.Module):
    def forward(self, x, past_state_0):
        output, state, _ = attend(x, past_state_0, normalize=False)
        return attend(output)[0], state


def own_state():
    return OwnState(), (torch.randn(2, 16, 8), torch.randn(2, 2, 4, 4))


class Position(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.table = nn.Embedding(size, 8)

    def forward(self, x):
        return attend(x + self.table(torch.arange(x.shape[1])))[0]


def position():
    return Position(5000), (torch.randn(2, 16, 8),)


def short_position():
    return Position(160), (torch.randn(2, 16, 8),)


class Averaging(nn.Module):
    def forward(self, x):
        return attend(x - x.mean(1, keepdim=True))[0]


def averaging():
    return Averaging(), (torch.randn(2, 16, 8),)


class Streaming(nn.Module):
    """Every way to compute positions, and every causal convolution, that streams."""

    def __init__(self):
        super().__init__()
        self.learned = nn.Embedding(5000, 8)
        self.register_buffer("sinusoids", torch.randn(1, 5000, 8))
        self.register_buffer("numbers", torch.arange(5000)[None])
        self.register_buffer("frequencies", 0.01 ** torch.linspace(0, 1, 4))
        self.padded = nn.Conv1d(8, 8, 4, groups=8, padding=3)
        self.plain = nn.Conv1d(8, 8, 3, groups=8, bias=False)

    def forward(self, x):
        length = x.shape[1]
        x = x + self.learned(torch.arange(length)) + self.sinusoids[:, :length]
        x = x + self.learned(self.numbers[:, :length])
        angles = torch.outer(torch.arange(length).float(), self.frequencies)
        x = x * torch.cat([angles.cos(), angles.sin()], -1)
        x = self.padded(x.transpose(1, 2))[..., :length]
        x = self.plain(nn.functional.pad(x, (2, 0))).transpose(1, 2)
        return attend(x)[0]


def streaming():
    return Streaming(), (torch.randn(2, 16, 8),)


class Loop(nn.Module):
    def forward(self, x):
        state, outputs = torch.zeros(x.shape[0], x.shape[2]), []
        for t in range(x.shape[1]):
            state = state + x[:, t]
            outputs.append(state)
        return torch.stack(outputs, 1)


def loop():
    return Loop(), (torch.randn(2, 16, 8),)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        doubled = x * 2
        return doubled + self.table


def table():
    return Table(), (torch.randn(2, 16, 8),)


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def branch():
    return Branch(), (torch.randn(2, 16, 8),)


class Epsilon(nn.Module):
    def forward(self, x):
        return x / (x.relu().sum(-1, keepdim=True) + 1e-15)


def epsilon():
    return Epsilon(), (torch.randn(2, 16, 8),)


class NotANumber(nn.Module):
    def forward(self, x):
        return torch.where(x > 1, x / 0 * 0, torch.where(x < -1, -1 / (x * 0).abs(), x))


def not_a_number():
    return NotANumber(), (torch.randn(2, 16, 8),)


class Printing(nn.Module):
    def forward(self, x):
        print("{chatter of the model}")
        return x + 1


def printing():
    print("{chatter of the factory}")
    return Printing(), (torch.randn(2, 16, 8),)


def heavy():
    return nn.Linear(256, 256), (torch.randn(2, 4, 256),)


def parts():
    return Parts(), (torch.randn(2, 16, 6),)


class Parts(nn.Module):
    def forward(self, x):
        a, b, c = x.chunk(3, -1)
        d, e = x.split([4, 2], -1)
        return a * c + b, d.sum(-1) - e.sum(-1)
'''


@dataclass(frozen=True)
class Result:
    """What a command ended with and said."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands, the longest test, begin while the others run."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(scope="session")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The user's module, importable here; ``folder`` and ``path`` say where it lies."""
    folder = tmp_path_factory.mktemp("users_own")
    path = folder / f"{MODULE}.py"
    path.write_text(FACTORIES)
    sys.path.insert(0, str(folder))
    yield SimpleNamespace(folder=folder, path=path, source=lambda name: f"{MODULE}:{name}")
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def converted(
    factories: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """``converted(factory, **options)``: an artifact made once and shared; change copies only."""
    import linexport

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


@pytest.fixture
def artifact(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy, of the smallest artifact there is, that a test may spoil."""
    place = tmp_path / "artifact"
    shutil.copytree(converted("small"), place)
    return place


@pytest.fixture
def manifest_of() -> Callable[[Path], dict[str, Any]]:
    def read(folder: Path) -> dict[str, Any]:
        return json.loads((folder / "manifest.json").read_text())

    return read


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
def start(factories: SimpleNamespace) -> Callable[..., subprocess.Popen[str]]:
    """``start(*arguments, cwd=...)``: the program begun as a process of its own."""

    def begin(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(factories.folder), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "linexport", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cwd,
        )

    return begin


@pytest.fixture(scope="session")
def program(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., Result]:
    """``program(*arguments, cwd=...)``: the program run as a process of its own."""

    def run(*arguments: object, cwd: Path | None = None) -> Result:
        process = start(*arguments, cwd=cwd)
        out, err = process.communicate(timeout=300)
        return Result(process.returncode, out, err)

    return run


@pytest.fixture
def miscompile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``miscompile(target, change)``: that target lowers every LinearAttention node as
    ``change(node)``, a node that means something else."""
    from linexport import targets

    def spoil(name: str, change: Callable[[Any], Any]) -> None:
        right = targets.find(name)

        def candidates(op: Any, node: Any) -> Any:
            found = right.candidates(op, node)
            if op.name != "LinearAttention":
                return found
            return [replace(c, write=lambda n, w=c.write: w(change(n))) for c in found]

        monkeypatch.setitem(targets.targets(), name, replace(right, candidates=candidates))

    return spoil


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """Tensors of most tests are tiny, and threads that wait for each other slow a machine down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        yield
