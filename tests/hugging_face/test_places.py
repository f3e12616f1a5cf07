"""Functions of a library are found by what they work with, and named where they are gone."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import linexport
from linexport import patches
from linexport.errors import EnvironmentProblemError
from linexport.patches import library
from linexport.patches.places import by_attributes
from linexport.sources.hugging_face import _is_of_linexport
from linexport.sources.hugging_face.folder import missing_package
from linexport.system import versions

MIXERS = '''
class Cell:
    """Has what both replacements read."""
    def __init__(self):
        self.gate, self.value, self.state = 1, 2, 3
    def forward(self, hidden, cache=None):
        return hidden

class Plain:
    def __init__(self):
        self.gate, self.value = 1, 2
    def forward(self, hidden):
        return hidden

class Demanding:
    def __init__(self):
        self.gate, self.value, self.state = 1, 2, 3
    def forward(self, hidden, temperature):
        return hidden

def forward(self, hidden):
    return self.gate, self.value, self.state
'''


def library_file(name: str, text: str) -> ModuleType:
    """Return a modeling file of transformers with some text, which is not imported as one."""
    module = ModuleType(f"transformers.models.{name}.modeling_{name}")
    exec(text, vars(module))
    return module


def of_cell(self: Any, hidden: Any, cache: Any = None) -> Any:
    """Read what one class has."""
    return self.gate * self.state + self.value * hidden


def of_plain(self: Any, hidden: Any) -> Any:
    """Read what two classes have."""
    return self.gate + self.value * hidden


def of_none(self: Any, hidden: Any) -> Any:
    """Read what no class has."""
    return self.gate + self.bias


def test_a_class_of_another_name_is_found_by_the_attributes_that_a_replacement_reads() -> None:
    module = library_file("some", MIXERS)
    found = by_attributes(
        module, {"Old.forward": of_plain, "Older.forward": of_cell, "Oldest.forward": of_none}
    )
    assert {name: str(place) for name, place in found.items()} == {
        "Older.forward": f"{module.__name__}.Cell.forward",
        "Old.forward": f"{module.__name__}.Plain.forward",
    }


def test_a_class_that_is_one_of_several_is_not_guessed() -> None:
    assert not by_attributes(library_file("some", MIXERS), {"Old.forward": of_plain})


def families() -> list[tuple[patches.Patch, str]]:
    return [(patch, family) for patch in patches.patches() for family in patch.families]


def test_this_transformers_has_what_is_replaced_in_each_family() -> None:
    for family in dict.fromkeys(family for _, family in families()):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert patches.missing([module]) == ""


@pytest.mark.parametrize(("patch", "family"), families(), ids=lambda x: getattr(x, "swaps", x))
def test_what_a_release_has_no_more_is_named_with_the_releases_that_have_it(
    patch: patches.Patch, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: "5.30.0")
    said = patches.missing([library_file(family, "def of_a_new_form(x): ...")])
    assert all(f"{swap.name}" in said for swap in patch.swaps)
    assert f"modeling_{family} has no " in said
    assert said.count("transformers 5.30.0 is installed; linexport is tested with ") == 1
    assert f"pip install 'transformers=={versions.TRANSFORMERS.newest}'" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("No module named 'scipy'", name="scipy.optimize"),
            "pip install scipy",
        ),
        (ModuleNotFoundError("No module", name="transformers.gone"), "transformers 5.30.0 is inst"),
        (ImportError("cannot import name 'Cache'"), "cannot import name 'Cache'"),
    ],
)
def test_a_package_that_a_type_needs_is_named(
    error: ImportError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: "5.30.0")
    assert said in str(missing_package("inkling", error))


def test_an_attribute_of_a_class_that_is_gone_is_named() -> None:
    assert library.attribute(Cell, "gate") == 1
    with pytest.raises(
        EnvironmentProblemError, match=r"Cell\._mapping, which linexport needs .* not exist"
    ):
        library.attribute(Cell, "_mapping")


class Cell:
    gate = 1


def test_functions_of_a_modeling_file_are_found_in_the_modules_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = ModuleType("transformers.models.some.kernels")
    exec("def rotate(x): return x", vars(kernels))
    file = library_file("some", "class Layer: ...")
    monkeypatch.setitem(sys.modules, file.__name__, file)
    file.Layer.__module__ = file.__name__
    with pytest.raises(EnvironmentProblemError, match=r"modeling_some\.rotate, which"):
        library.of_file(file.Layer(), "rotate")
    file.kernels = kernels  # type: ignore[attr-defined]
    assert library.of_file(file.Layer(), "rotate") is kernels.rotate


@pytest.mark.parametrize(("folder", "own"), [(linexport.__path__[0], True), ("/library", False)])
def test_what_linexport_reads_and_the_library_lacks_is_not_blamed_on_the_model(
    folder: str, own: bool
) -> None:
    space: dict[str, Any] = {}
    exec(compile("def read(x): return x.gone", f"{folder}/file.py", "exec"), space)
    for holder in (object(), torch.nn.Linear(1, 1)):
        with pytest.raises(AttributeError) as raised:
            space["read"](holder)
        assert _is_of_linexport(raised.value) == own
