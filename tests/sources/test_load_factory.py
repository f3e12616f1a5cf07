"""package.module:callable: finding, calling and judging a user's function."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from linexport.errors import UnsupportedModelError, UsageError
from linexport.sources import load_model

COUNTER = itertools.count()


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write source as a module in the current directory; returns the module's name."""
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> str:
        name = f"user_model_{next(COUNTER)}"
        Path(f"{name}.py").write_text("import torch\n" + textwrap.dedent(source))
        return name

    return write


def returning(expression: str) -> str:
    return f"""
        def make():
            return {expression}
    """


def test_a_factory_is_loaded(factory: Callable[[str], str]) -> None:
    name = factory(returning("torch.nn.Linear(4, 3).train(), (torch.randn(2, 5, 4),)"))
    path = list(sys.path)
    loaded = load_model(f"{name}:make")
    assert sys.path == path
    assert not loaded.module.training
    assert loaded.source.kind == "factory"
    assert loaded.source.location == f"{name}:make"
    assert loaded.source.sha256 is None
    assert loaded.source.description == "Linear, 15 parameters"
    assert loaded.dynamic_shapes == (dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC),)
    assert loaded.module(*loaded.args).shape == (2, 5, 3)


def test_given_dims_are_kept(factory: Callable[[str], str]) -> None:
    name = factory(returning("torch.nn.Linear(4, 3), (torch.ones(1, 4),), ({1: None},)"))
    loaded = load_model(f"{name}:make")
    assert loaded.dynamic_shapes == ({1: None},)
    assert loaded.args[0].shape == (1, 4)


def test_none_as_dims_means_all_constant(factory: Callable[[str], str]) -> None:
    name = factory(returning("torch.nn.Linear(4, 3), (torch.ones(1, 4),), None"))
    assert load_model(f"{name}:make").dynamic_shapes is None


def test_repeated_examples_are_reported(factory: Callable[[str], str]) -> None:
    name = factory(returning("torch.nn.Linear(4, 3), (torch.ones(1, 4),)"))
    loaded = load_model(f"{name}:make")
    assert loaded.args[0].shape == (2, 4)
    assert any("repeated" in warning for warning in loaded.warnings)


def test_the_seed_decides_and_the_generator_is_left_alone(factory: Callable[[str], str]) -> None:
    name = factory(returning("torch.nn.Linear(4, 3), (torch.randn(2, 4),)"))
    before = torch.random.get_rng_state()
    first, again, other = (load_model(f"{name}:make", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.args[0], again.args[0])
    assert torch.equal(first.module.weight, again.module.weight)
    assert not torch.equal(first.args[0], other.args[0])


def test_prints_go_to_stderr(
    factory: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = factory("""
        print("hello")

        def make():
            return torch.nn.ReLU(), (torch.ones(2, 4),)
    """)
    load_model(f"{name}:make")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_nan_weights_are_refused(factory: Callable[[str], str]) -> None:
    name = factory("""
        class Model(torch.nn.Linear):
            @classmethod
            def make(cls):
                module = cls(4, 3)
                torch.nn.init.constant_(module.bias, float("nan"))
                return module, (torch.ones(2, 4),)
    """)
    with pytest.raises(UnsupportedModelError, match=f"{name}.*bias has 3 NaN of 3 values"):
        load_model(f"{name}:Model.make")


def test_features_that_can_be_redrawn_are_frozen_with_a_message(
    factory: Callable[[str], str],
) -> None:
    name = factory("""
        class Features(torch.nn.Linear):
            def redraw(self):
                torch.nn.init.normal_(self.weight)

        def make():
            return Features(4, 3), (torch.ones(2, 4),)
    """)
    (warning,) = load_model(f"{name}:make").warnings
    assert warning.startswith("Features can draw its random features anew")
    assert "frozen into the artifact" in warning


@pytest.mark.parametrize(
    "source", ["my-module:make", "a:b:c", ":make", "a:", "a.:b", "a b:c", "1a:b", "x.pt:y z"]
)
def test_bad_spelling(source: str) -> None:
    with pytest.raises(UsageError, match=r"neither a file nor package\.module:callable"):
        load_model(source)


def test_missing_modules() -> None:
    with pytest.raises(UsageError, match=r"no module named absent_package on Python's path or in"):
        load_model("absent_package.inner:make")
    with pytest.raises(UsageError, match=r"no module named json\.absent"):
        load_model("json.absent:make")


def test_a_missing_dependency_is_told_from_a_missing_module(factory: Callable[[str], str]) -> None:
    name = factory("import absent_dependency")
    with pytest.raises(UsageError, match="needs absent_dependency, which is not installed"):
        load_model(f"{name}:make")


def test_import_errors_are_short(factory: Callable[[str], str]) -> None:
    for source, match in (
        ("from torch import nothing", "cannot import name 'nothing'"),
        ("def", "SyntaxError"),
        ("1 / 0", r"at .*user_model_\d+\.py:2: ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            load_model(f"{factory(source)}:make")
        assert "\n" not in str(caught.value)


def test_missing_attributes_list_the_functions(factory: Callable[[str], str]) -> None:
    name = factory(returning("1"))
    with pytest.raises(UsageError, match=r"there is no 'mk' in .*Defined there: make\."):
        load_model(f"{name}:mk")
    with pytest.raises(UsageError, match="there is no 'inner'"):
        load_model(f"{name}:make.inner")


def test_values_are_not_called(factory: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="is a int, not a function"):
        load_model(f"{factory('make = 3')}:make")


def test_a_failing_factory_shows_type_message_and_line(factory: Callable[[str], str]) -> None:
    name = factory("""
        def inner(size):
            return torch.zeros(2, 3).reshape(size)

        def make():
            return inner(7)
    """)
    with pytest.raises(
        UsageError, match=rf"{name}:make failed at .*{name}\.py:4: RuntimeError: shape '\[7\]'"
    ) as caught:
        load_model(f"{name}:make")
    assert "\n" not in str(caught.value)


MODULE = "torch.nn.Linear(4, 3)"


@pytest.mark.parametrize(
    ("expression", "match"),
    [
        ("None", "returned a NoneType"),
        (MODULE, "nothing says what its forward takes"),
        (f"({MODULE},)", "returned a tuple of 1"),
        (f"({MODULE}, 1, 2, 3, 4)", "returned a tuple of 5"),
        (f"{MODULE}, (torch.ones(2, 4),), [1], None", "a list as kwargs"),
        (f"{MODULE}, (), {{'input': torch.ones(2, 4)}}, 7", "a int as dynamic_shapes"),
        (f"{MODULE}, (torch.ones(2, 4),), {{'flag': True}}", r"by name without a tensor go into"),
        ("torch.relu, (torch.ones(1),)", "a builtin_function_or_method as module"),
        (f"{MODULE}, torch.ones(2, 4)", r"a Tensor as args.*\(x,\)"),
        (f"{MODULE}, [torch.ones(2, 4)]", "a list as args"),
        (f"{MODULE}, ()", "args without a tensor"),
        (f"{MODULE}, (1, 'x')", "args without a tensor"),
        (f"{MODULE}, (torch.ones(2, 4),), 7", "a int as dynamic_shapes"),
        (f"{MODULE}, (torch.ones(2, 4),), ({{}}, {{}})", "2 entries of dynamic_shapes for 1"),
    ],
)
def test_wrong_results(factory: Callable[[str], str], expression: str, match: str) -> None:
    name = factory(returning(expression))
    with pytest.raises(UsageError, match=match):
        load_model(f"{name}:make")
