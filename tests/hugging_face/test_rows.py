"""A row of a batch is what it is alone: models of every family with biases, padded on any side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linexport
from linexport import parity, patches
from linexport.parity.cases import ChosenSizes
from linexport.parity.language import check as language
from linexport.parity.language.prompts import PADDINGS
from linexport.parity.reference.module import Widened
from linexport.patches.state_cache import StateCache
from tests.hugging_face.test_layer_by_layer import Written
from tests.support.families import TINY, biased_model

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

LIMIT = 5e-5
"""Of the largest logit: the tolerance of float32."""

TOKENS = st.integers(1, 9)
"""Tokens of a row: fewer than a convolution of 4 has inputs, and more."""

ROWS = st.lists(st.tuples(st.integers(0, 9), TOKENS, st.integers(0, 9)), min_size=1, max_size=3)
"""Padding on the left, tokens, and padding on the right."""


@cache
def streaming(model_type: str) -> tuple[Any, Any]:
    """A model of transformers in float64, and in float32 as it is traced."""
    from linexport.sources.hugging_face.streaming_model import Streaming

    model = biased_model(model_type)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    traced = Streaming(biased_model(model_type)).eval()
    traced.model.set_attn_implementation("eager")
    return model.double(), traced


def of_row_alone(original: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits (T, vocabulary) of transformers for one sequence, without a mask."""
    with torch.no_grad(), patches.original(patches.modeling_files(original)), Widened():
        return original(torch.from_numpy(tokens[None]), use_cache=False).logits[0].numpy()


def batch_of(rows: list[np.ndarray], left: list[int], length: int) -> tuple[torch.Tensor, ...]:
    """Ids and mask of rows that begin at those places; padding is the tokens 1 and 2."""
    ids = 1 + np.random.default_rng(0).integers(2, size=(len(rows), length))
    mask = np.zeros_like(ids)
    for row, (tokens, start) in enumerate(zip(rows, left, strict=True)):
        ids[row, start : start + len(tokens)], mask[row, start : start + len(tokens)] = tokens, 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@pytest.mark.parametrize("model_type", sorted(TINY))
@settings(max_examples=4, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_the_traced_model_gives_for_a_row_what_transformers_gives_for_it_alone(
    model_type: str, rows: list[tuple[int, int, int]], seed: int
) -> None:
    original, traced = streaming(model_type)
    choose = np.random.default_rng(seed)
    drawn = [choose.integers(3, 64, count) for _, count, _ in rows]
    left = [before for before, _, _ in rows]
    batch = batch_of(drawn, left, max(map(sum, rows)))
    with torch.no_grad(), traced.patched():
        logits, _ = traced(*batch, {})
    for row, (tokens, start) in enumerate(zip(drawn, left, strict=True)):
        expected = of_row_alone(original, tokens)
        got = logits[row, start : start + len(tokens)].numpy()
        assert np.abs(got - expected).max() <= LIMIT * np.abs(expected).max()


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_rows_go_on_from_a_prompt_with_left_padding_as_alone(model_type: str) -> None:
    """In pieces, of which the first is all padding in two of the rows, and then token by token."""
    original, traced = streaming(model_type)
    choose = np.random.default_rng(0)
    rows = [choose.integers(3, 64, count) for count in (14, 8, 5)]
    ids, mask = batch_of(rows, [0, 6, 9], 14)
    parts, past = [], {}
    with torch.no_grad(), traced.patched():
        for piece in (5, 6, 1, 1, 1):
            start = sum(part.shape[1] for part in parts)
            given = ids[:, start : start + piece], mask[:, start : start + piece]
            logits, past = traced(*given, past)
            parts.append(logits)
    found = torch.cat(parts, 1).numpy()
    for row, tokens in enumerate(rows):
        expected = of_row_alone(original, tokens)
        got = found[row, -len(tokens) :]
        assert np.abs(got - expected).max() <= LIMIT * np.abs(expected).max()


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biased") / "mamba2"
    biased_model("mamba2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(
    mamba2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    """``converted(model_type)``: the artifact of a model with biases, and its manifest."""

    @cache
    def convert(model_type: str) -> tuple[Path, Any]:
        place, source = tmp_path_factory.mktemp("artifacts"), mamba2
        if model_type != "mamba2":
            source = place / "model"
            biased_model(model_type).save_pretrained(source)
        return place / "out", linexport.convert(source, place / "out", bench=False, threads=1)

    return convert


FAMILIES = ["mamba2", *(pytest.param(t, marks=pytest.mark.slow) for t in TINY if t != "mamba2")]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_texts_of_a_batch_are_those_of_each_prompt_alone(
    converted: Callable[[str], tuple[Path, Any]], model_type: str
) -> None:
    folder, manifest = converted(model_type)
    assert manifest.status == "ok"
    artifact = linexport.load(folder, threads=1)
    choose = np.random.default_rng(3)
    for _ in range(4):
        prompts = [choose.integers(3, 64, count) for count in (4, 40, 1)]
        alone = [list(artifact.generate(p, max_tokens=20, temperature=0)) for p in prompts]
        steps = zip(*artifact.generate_batch(prompts, max_tokens=20, temperature=0), strict=True)
        assert [[token for token in row if token is not None] for row in steps] == alone


def test_the_manifest_says_that_the_original_s_own_padded_rows_differ(
    converted: Callable[[str], tuple[Path, Any]],
) -> None:
    folder, manifest = converted("mamba2")
    assert {case.name for case in manifest.parity.cases} >= {*PADDINGS}
    assert manifest.parity.padded_original > 0.01
    share = f"{manifest.parity.padded_original:.1g}"
    [said] = [w for w in manifest.warnings if "Padded rows of the original" in w]
    assert f"differ by {share} of the largest output from the same rows alone" in said
    assert said in (folder / "report.html").read_text()


def test_an_original_whose_padded_rows_are_right_is_not_told_otherwise(
    converted_family: Callable[[str], tuple[Path, Any]],
) -> None:
    """Without a bias in the projection."""
    _, manifest = converted_family("mamba2")
    assert manifest.parity.padded_original <= LIMIT
    assert not any("Padded rows" in warning for warning in manifest.warnings)


def _as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is zeroed in front of the projection, and not behind it."""
    kept = [
        patches.Patch(
            tuple(s for s in p.swaps if s.name != "apply_mask_to_padding_states"),
            *(p.families, p.tried),
        )
        for p in patches.patches()
    ]
    monkeypatch.setattr(patches, "patches", lambda: tuple(kept))
    monkeypatch.setattr(StateCache, "_without_padding", lambda self, x: x)


def _decaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear attention takes padding for tokens."""
    attend = StateCache.attend

    def unmasked(self: StateCache, *args: Any, **options: Any) -> Any:
        mask, self.mask = self.mask, None
        try:
            return attend(self, *args, **options)
        finally:
            self.mask = mask

    monkeypatch.setattr(StateCache, "attend", unmasked)


@pytest.mark.parametrize("fault", [_as_transformers, _decaying])
def test_parity_finds_padding_that_enters_a_row(
    mamba2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Two lengths, one of them shorter than the convolution."""
    fault(monkeypatch)
    monkeypatch.setattr(language, "GREEDY_STEPS", 4)
    tested = Written(mamba2, tmp_path).tested
    found = parity.check_language(replace(tested, chosen=ChosenSizes((3, 37), (1, 3))))
    failed = {case.name for case in found.cases if not case.passed}
    assert "left padding" in failed and "no padding" not in failed
