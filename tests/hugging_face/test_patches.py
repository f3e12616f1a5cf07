"""Swapping functions of a library: only while tracing, only the ones that are known."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from linexport import patches
from linexport.errors import UnsupportedModelError
from linexport.loaders import load_model
from linexport.patches.carried import Carried, active, carrying

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def library() -> ModuleType:
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def test_functions_are_restored_whatever_happens(library: ModuleType) -> None:
    before = dict(vars(library))
    with pytest.raises(RuntimeError, match="on the way"), patches.applied([library]):
        assert library.causal_conv1d_fn is not before["causal_conv1d_fn"]
        raise RuntimeError("on the way")
    assert vars(library) == before


def test_a_changed_signature_stops_the_conversion(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path]
) -> None:
    def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None) -> None:
        raise AssertionError

    monkeypatch.setattr(library, "causal_conv1d_fn", causal_conv1d_fn)
    with pytest.raises(UnsupportedModelError, match=r"\(x, weight, bias\).*transformers 5") as info:
        load_model(model_folder("qwen3_5_text"))
    assert "causal_conv1d_fn" in str(info.value)
    assert library.causal_conv1d_fn is causal_conv1d_fn


@pytest.mark.parametrize(
    ("name", "what"),
    [("torch_chunk_gated_delta_rule", "linear attention"), ("causal_conv1d_fn", "convolution")],
)
def test_a_layer_that_no_patch_stands_in_for_stops_the_conversion(
    library: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    model_folder: Callable[..., Path],
    name: str,
    what: str,
) -> None:
    """As when a new version calls the same function by another name."""
    kept = [
        patches.Patch(tuple(s for s in p.swaps if s.name != name), p.families, p.tried)
        for p in patches.patches()
    ]
    monkeypatch.setattr(patches, "patches", lambda: tuple(kept))
    with pytest.raises(UnsupportedModelError, match=f"{what} of layer 0"):
        load_model(model_folder("qwen3_5_text"))


def test_every_patch_says_what_it_was_tried_with() -> None:
    found = patches.patches()
    assert found
    for patch in found:
        assert patch.swaps and patch.families and patch.tried


def test_states_are_those_of_the_run_they_belong_to() -> None:
    x, weight = torch.randn(1, 2, 5), torch.randn(2, 3)
    first = Carried({})
    with carrying(first):
        first.begin_convolution("0")
        whole = active().convolve(x, weight, None, None)
    second = Carried({})
    with carrying(second):
        second.begin_convolution("0")
        head = active().convolve(x[..., :2], weight, None, None)
    third = Carried(second.present)
    with carrying(third):
        third.begin_convolution("0")
        tail = active().convolve(x[..., 2:], weight, None, None)
    torch.testing.assert_close(torch.cat([head, tail], -1), whole)
    torch.testing.assert_close(third.present["conv_0"], first.present["conv_0"])
    torch.testing.assert_close(first.present["conv_0"], x[..., -2:])
