"""Attention to tokens that an indexer chooses: the library's choice, with padding and ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

import linexport
from linexport import patches
from linexport.errors import ParityError, UnsupportedModelError
from linexport.patches import indexers
from linexport.sources import load_model
from tests.support.families import BASES, TINY, save_model

pytestmark = pytest.mark.usefixtures("one_thread")

QWEN, GLM = "qwen4_exp_text", "glm5_next_text"
CONFIGS = {QWEN: TINY[QWEN], GLM: BASES[GLM]}
HEADS = {QWEN: "indexer_n_heads", GLM: "index_n_heads"}
AUTO = {QWEN: "AutoModelForCausalLM", GLM: "AutoModel"}
BUDGET, BLOCK, WIDTH = 8, 4, 32

Angles = tuple[Tensor, Tensor]


def config(model_type: str, **changes: Any) -> Any:
    parsed = transformers.AutoConfig.for_model(model_type, **{**CONFIGS[model_type], **changes})
    parsed._attn_implementation = "eager"
    return parsed


def drawn(layer: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return layer.double().eval()


def tokens(length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Hidden states, and which tokens of the first row are padding."""
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, :padding] = False
    return torch.randn(2, length, WIDTH, dtype=torch.float64), real


def angles_and_mask(parsed: Any, real: Tensor) -> tuple[Angles, Tensor]:
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    turn = qwen.Qwen4ExpTextRotaryEmbedding(config=parsed)
    cos, sin = turn(torch.zeros(1, dtype=torch.float64), positions.expand(3, -1, -1))
    causal = torch.ones(real.shape[1], real.shape[1]).tril().bool()
    mask = torch.zeros(causal.shape, dtype=torch.float64).expand(real.shape[0], 1, -1, -1)
    excluded = ~(causal & real[:, None, None])
    return (cos, sin), mask.masked_fill(excluded, torch.finfo(mask.dtype).min)


def own_choice(layer: Any, x: Tensor, angles: Angles, mask: Tensor) -> Tensor:
    """The blocks with the best scores, token by token, as they are defined."""
    index = layer.indexer
    chosen = torch.zeros(x.shape[0], x.shape[1], x.shape[1], dtype=torch.bool)
    projected = index.index_qk_proj(x)
    width = index.index_head_dim
    for row in range(x.shape[0]):
        keys = projected[row, :, -width:]
        for t in range(x.shape[1]):
            seen = (mask[row, 0, t] == 0).nonzero().flatten().tolist()
            blocks = [seen[i : i + BLOCK] for i in range(0, len(seen) - BLOCK + 1, BLOCK)]
            query = index.q_layernorm(projected[row, t, :-width].unflatten(0, (-1, width)))
            query = turned(query, angles, row, t)
            scores = []
            for block in blocks:
                key = index.k_layernorm(keys[block].mean(0, keepdim=True))
                products = query @ turned(key, angles, row, block[0])[0]
                scores.append(float(products.clamp(min=0).sum()))
            best = sorted(range(len(blocks)), key=lambda b: -scores[b])[: BUDGET // BLOCK]
            taken = [s for b in best for s in blocks[b]] + seen[len(blocks) * BLOCK :]
            chosen[row, t, taken] = True
    return chosen


def turned(x: Tensor, angles: Angles, row: int, place: int) -> Tensor:
    cos, sin = (a[row, place] for a in angles)
    size = cos.shape[-1]
    one, other = x[..., :size].chunk(2, -1)
    return torch.cat([x[..., :size] * cos + torch.cat([-other, one], -1) * sin, x[..., size:]], -1)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 30), padding=st.integers(0, 9))
def test_blocks_with_the_best_scores_are_chosen(seed: int, length: int, padding: int) -> None:
    parsed = config(QWEN)
    layer = drawn(qwen.Qwen4ExpTextAttention(parsed, 1), seed)
    x, real = tokens(length, min(padding, length - 1))
    angles, mask = angles_and_mask(parsed, real)
    with torch.no_grad():
        found = indexers._chosen(layer.indexer, x, angles, mask, None)
        expected = own_choice(layer, x, angles, mask)
    assert torch.equal((found & (mask == 0)[:, 0])[real], expected[real])
    if length > 20 and not padding:
        assert int(expected[1, -1].sum()) <= BUDGET + BLOCK - 1  # not all are attended to


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 40), padding=st.integers(0, 9))
def test_attention_of_qwen_is_that_of_the_library(seed: int, length: int, padding: int) -> None:
    parsed = config(QWEN)
    layer = drawn(qwen.Qwen4ExpTextAttention(parsed, 1), seed)
    x, real = tokens(length, min(padding, length - 1))
    angles, mask = angles_and_mask(parsed, real)
    with torch.no_grad():
        expected, *_ = layer(x, angles, mask, None)
        found, _ = indexers.qwen_attention(layer, x, angles, mask, None)
    torch.testing.assert_close(found[real], expected[real])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(1, 40), padding=st.integers(0, 9))
def test_attention_of_glm_is_that_of_the_library(seed: int, length: int, padding: int) -> None:
    layer = drawn(glm.Glm5NextTextAttention(config(GLM), 1), seed)
    x, real = tokens(length, min(padding, length - 1))
    with torch.no_grad():
        expected, *_ = layer(x, real, None)
        with patches.applied([glm]):
            found, *_ = layer(x, real, None)
    torch.testing.assert_close(found[real], expected[real])


def test_first_tokens_that_attend_to_nothing_are_refused() -> None:
    parsed = config(GLM, index_kpool_always_select_tail=False)
    layer = drawn(glm.Glm5NextTextAttention(parsed, 1), 0)
    with (
        patches.applied([glm]),
        pytest.raises(UnsupportedModelError, match="index_kpool_always_select_tail = False"),
    ):
        layer(*tokens(9, 0), None)


def test_a_library_that_chooses_other_blocks_is_told_from_one_that_does_not() -> None:
    parsed = config(QWEN)
    layer = drawn(qwen.Qwen4ExpTextAttention(parsed, 1), 0)
    x, real = tokens(30, 4)
    angles, mask = angles_and_mask(parsed, real)
    arguments = (layer.indexer, x, angles, mask, None)

    def other(*given: Any) -> Tensor:
        blocks = torch.arange(30) // BLOCK
        return (blocks < BUDGET // BLOCK).expand(2, 1, 30, 30)

    library = qwen.Qwen4ExpTextQSAIndexer.forward.__wrapped__
    with torch.no_grad():
        found = indexers.choosing_of_all(library, *arguments)
        assert torch.equal((found & (mask == 0))[:, 0], library(*arguments)[:, 0])
        with pytest.raises(ParityError, match="other blocks than the best"):
            indexers.choosing_of_all(other, *arguments)


@pytest.mark.services
@pytest.mark.parametrize("model_type", CONFIGS)
def test_pieces_with_states_choose_as_whole_sequences_do(model_type: str, tmp_path: Path) -> None:
    """Three layers, the last two of them indexed; those of GLM share a choice."""
    layers = ["linear_attention", "full_attention", "full_attention"]
    deep = {"num_hidden_layers": 3, "layer_types": layers}
    if model_type == GLM:
        deep |= {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        deep |= {"indexer_types": ["full", "full", "shared"]}
    save_model({**CONFIGS[model_type], **deep}, model_type, tmp_path, AUTO[model_type])
    loaded = load_model(tmp_path)
    step: Any = loaded.decode_module
    assert {s.op for s in step.states} >= {"IndexerKeys", "LinearAttention", "KeyValueCache"}
    ids = torch.randint(3, 60, (1, 45), generator=torch.Generator().manual_seed(0))
    past: dict[str, Tensor] = {}
    parts = []
    with torch.no_grad():
        expected = loaded.module(ids, torch.ones_like(ids))
        with step.patched():
            for piece in ids.split([21, 1, 23], 1):
                output, past = step.module(piece, torch.ones_like(piece), past)
                parts.append(output)
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONFIGS)
def test_scores_that_tie_are_settled(model_type: str, tmp_path: Path) -> None:
    """Of two heads, both are negative for many blocks, which then all have the score 0."""
    source = tmp_path / "model"
    save_model({**CONFIGS[model_type], HEADS[model_type]: 2}, model_type, source, AUTO[model_type])
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    assert any("rounding decides" in warning for warning in manifest.warnings)
