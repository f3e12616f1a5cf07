"""Binding functions of a library by what their parameters mean, and what is said of the rest."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linexport import patches
from linexport.errors import EnvironmentProblemError, UnsupportedModelError
from linexport.patches import library
from linexport.patches.parameters import NAMES, bind, is_same, match, signature


class Cache:
    """Stands for the class of transformers."""


def needs(hidden_states: Any, attention_mask: Any, cache: Any = None, size: int = 4) -> Any:
    """Return what it is called with, in the order of its parameters."""
    return hidden_states, attention_mask, cache, size


def made(text: str) -> Callable[..., Any]:
    """Return a function of a library with these parameters."""
    space: dict[str, Any] = {"Cache": Cache}
    exec(f"def f({text}):\n    raise AssertionError", space)
    function: Callable[..., Any] = space["f"]
    return function


def test_older_names_of_a_parameter_are_those_of_the_newest_release() -> None:
    for name, newest in NAMES.items():
        called = bind("f", made(f"hidden_states, attention_mask, {name}=None"), needs)
        assert called(1, 2, **{name: 3}) == (1, 2, 3, 4)
        assert called(1, 2, 3) == called(1, 2, **{newest: 3}) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "parameters",
    [
        "hidden_states, attention_mask, kept: Cache | None = None",
        "hidden_states, attention_mask, kept: 'Cache | None' = None, size=4",
        "hidden_states, seen, kept: Cache = None",
        "states, seen, cache=None",
        "hidden_states, kept: Cache, *, padding_mask",
        "hidden_states, kept: Cache, other=0, padding_mask=None",
    ],
)
def test_renamed_parameters_are_bound_by_annotation_place_and_word(parameters: str) -> None:
    function = made(parameters)
    named = match(signature(function), signature(needs))
    given = {named["hidden_states"]: 1, named["attention_mask"]: 2, named["cache"]: 3}
    assert bind("f", function, needs)(**given) == (1, 2, 3, 4)


def test_the_defaults_are_those_of_the_library() -> None:
    called = bind("f", made("hidden_states, attention_mask=7, size=9"), needs)
    assert called(1) == (1, 7, None, 9)


def test_a_new_parameter_with_a_default_is_left_out_and_noted_where_it_is_given_a_value() -> None:
    notes: set[str] = set()
    called = bind(
        "layer.f", made("hidden_states, attention_mask, softcap=None"), needs, notes=notes
    )
    assert called(1, 2, softcap=None) == (1, 2, None, 4)
    assert not notes
    assert called(1, 2, softcap=50.0) == (1, 2, None, 4)
    assert notes == {"softcap of layer.f"}


def test_a_new_parameter_that_must_be_given_is_refused_by_its_name() -> None:
    called = bind("layer.f", made("hidden_states, attention_mask, cache, softcap"), needs)
    with pytest.raises(UnsupportedModelError, match=r"layer\.f has .*'softcap'.*5\.18\.0 to 5\.2"):
        called(1, 2, 3, 50.0)


def test_what_a_replacement_needs_and_a_function_has_not_is_refused_by_its_name() -> None:
    called = bind("layer.f", made("hidden_states, size=3"), needs)
    with pytest.raises(UnsupportedModelError, match=r"does not have .*'attention_mask'"):
        called(1)


def test_nothing_is_refused_before_it_is_called() -> None:
    """A modeling file has functions that a model does not use."""
    bind("layer.f", made("hidden_states, softcap"), needs)


@given(st.permutations(["hidden_states", "attention_mask", "cache", "size"]), st.data())
def test_any_order_of_known_parameters_is_bound_by_name(names: list[str], data: Any) -> None:
    values = data.draw(st.lists(st.integers(), min_size=4, max_size=4))
    called = bind("f", made(", ".join(names)), needs)
    expected = dict(zip(names, values, strict=True))
    assert called(*values) == tuple(expected[n] for n in inspect.signature(needs).parameters)


def test_a_function_is_the_same_by_all_of_its_parameters() -> None:
    wanted = signature(needs)
    assert is_same(signature(made("hidden_states, attention_mask, past_key_values=None")), wanted)
    assert not is_same(signature(made("hidden_states, attention_mask, softcap=None")), wanted)
    assert not is_same(signature(made("hidden_states, size")), wanted)


def scan(query: Any, key: Any, value: Any, g: Any, beta: Any, chunk_size: int = 64) -> Any:
    """Stand for a function of a library that has another name there."""
    raise AssertionError


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """A modeling file of a package, and another module of it that the file has by a name."""
    file, other = ModuleType("transformers.sample"), ModuleType("transformers.sample_ops")
    vars(file)["ops"] = other
    monkeypatch.setitem(sys.modules, file.__name__, file)
    return file, other


def test_functions_are_found_where_a_modeling_file_calls_them(
    moved: tuple[ModuleType, ModuleType],
) -> None:
    file, other = moved
    kept = type("Layer", (), {"mamba2_chunk_scan": staticmethod(scan)})
    kept.__module__ = file.__name__
    vars(file)["Layer"], vars(other)["torch_chunk_gated_delta_rule"] = kept, scan
    with patches.applied([file]):
        assert vars(other)["torch_chunk_gated_delta_rule"] is not scan
        assert kept.mamba2_chunk_scan is not scan
        assert isinstance(vars(kept)["mamba2_chunk_scan"], staticmethod)
    assert vars(other)["torch_chunk_gated_delta_rule"] is kept.mamba2_chunk_scan is scan


def test_a_function_of_another_name_is_found_by_its_parameters(
    moved: tuple[ModuleType, ModuleType],
) -> None:
    file, _ = moved
    vars(file)["delta_by_chunks"] = scan
    with patches.applied([file]):
        assert vars(file)["delta_by_chunks"] is not scan
    assert vars(file)["delta_by_chunks"] is scan


def test_parameters_of_several_replacements_name_none(moved: tuple[ModuleType, ModuleType]) -> None:
    """Masks of all kinds have the same parameters, and are not the same masks."""
    file, _ = moved
    chunked = made("config, inputs_embeds, attention_mask, cache, position_ids=None")
    vars(file)["create_chunked_causal_mask"] = chunked
    with patches.applied([file]):
        assert vars(file)["create_chunked_causal_mask"] is chunked


def test_a_private_name_is_found_in_the_module_that_has_it_now(
    moved: tuple[ModuleType, ModuleType],
) -> None:
    vars(moved[0])["A_TABLE_THAT_MOVED"] = {"kind": 1}
    assert library.find("gone", "A_TABLE_THAT_MOVED") == {"kind": 1}
    with pytest.raises(
        EnvironmentProblemError, match=r"transformers\.gone\.NOWHERE.*transformers \d.*installed"
    ):
        library.find("gone", "NOWHERE")
