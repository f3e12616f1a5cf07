"""Rotary embeddings whose frequencies depend on the length: what transformers computes, at any."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import linexport
from linexport.artifact.text.tokenizer import context
from linexport.sources import load_model
from linexport.sources.loaded_model import LoadedModel

pytestmark = pytest.mark.usefixtures("one_thread")

SAME = 64
"""Tokens up to which the frequencies are the same."""


def longrope(pairs: int) -> dict[str, Any]:
    return {
        **{"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0},
        "original_max_position_embeddings": SAME,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
    }


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    "original_max_position_embeddings": SAME,
}
MODELS = {
    "lfm2-longrope": ("lfm2", {"rope_parameters": longrope(4)}),
    "lfm2-dynamic": ("lfm2", {"rope_parameters": DYNAMIC, "max_position_embeddings": SAME}),
    "lfm2-yarn": ("lfm2", {"rope_parameters": YARN}),
    "qwen3_5-longrope": ("qwen3_5_text", {"rope_parameters": longrope(2)}),
    "lfm3-longrope": (
        "lfm3",
        {"rope_parameters": {"sliding_attention": longrope(8), "full_attention": YARN}},
    ),
    "zaya-longrope": ("zaya", {"rope_parameters": {"hybrid": longrope(4)}}),
    "zaya-dynamic": (
        "zaya",
        {"rope_parameters": {"hybrid": DYNAMIC}, "max_position_embeddings": SAME},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest, model_folder: Callable[..., Path]
) -> tuple[str, Path, LoadedModel]:
    model_type, changes = MODELS[request.param]
    folder = model_folder(model_type, **changes)
    return request.param, folder, load_model(folder)


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, 64, (batch, length), generator=generator)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_one_call_gives_what_the_library_gives(case: tuple[str, Path, LoadedModel]) -> None:
    """Below the boundary, at it, above it and below again, in a library that was just loaded."""
    _, folder, loaded = case
    step: Any = loaded.decode_module
    for length in (7, SAME, SAME + 1, 3 * SAME, SAME + 20, 7):
        ids = tokens(length)
        mask = torch.ones_like(ids)
        library = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad(), step.patched():
            found, _ = step.module(ids, mask, {})
        with torch.no_grad():
            expected = library(input_ids=ids, attention_mask=mask).logits
            close(loaded.module(ids, mask), expected)
        close(found, expected)


def test_steps_across_the_boundary_are_the_library_s(
    case: tuple[str, Path, LoadedModel],
) -> None:
    """Each with the frequencies of its own length, beside keys that stay as they were."""
    _, folder, loaded = case
    step: Any = loaded.decode_module
    ids = tokens(SAME + 6)
    library = AutoModelForCausalLM.from_pretrained(folder).eval()
    kept, past = DynamicCache(config=library.config), {}
    for piece in ids.split([SAME - 3, *[1] * 9], 1):
        with torch.no_grad():
            expected = library(input_ids=piece, past_key_values=kept, use_cache=True).logits
            with step.patched():
                found, past = step.module(piece, torch.ones_like(piece), past)
        close(found, expected)


def test_texts_end_where_frequencies_change(case: tuple[str, Path, LoadedModel]) -> None:
    name, _, loaded = case
    assert loaded.language is not None
    if name == "lfm2-yarn":
        assert loaded.language.context == 4096 and not loaded.warnings
    else:
        assert loaded.language.context == SAME
        assert f"change beyond {SAME} tokens" in loaded.warnings[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 640}, 640),
        ({"max_position_embeddings": 640, "rope_parameters": longrope(4)}, SAME),
        ({"max_position_embeddings": 640, "rope_parameters": {"hybrid": longrope(4)}}, SAME),
        ({"text_config": {"max_position_embeddings": 640, "rope_parameters": YARN}}, 640),
        (
            {
                **{"max_position_embeddings": 640, "original_max_position_embeddings": 100},
                "rope_scaling": {"type": "longrope"},
            },
            100,
        ),
        ({"rope_scaling": None}, None),
    ],
)
def test_an_artifact_takes_its_context_from_there(
    config: dict[str, Any], expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context(tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2-longrope", "lfm2-dynamic"])
def test_an_artifact_computes_both_sides_of_the_boundary(
    name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, changes = MODELS[name]
    folder = model_folder(model_type, **changes)
    manifest = linexport.convert(folder, tmp_path / "out", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    artifact = linexport.load(tmp_path / "out", threads=1)
    for length in (SAME, SAME + 1, 3 * SAME):
        library, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), tokens(length)
        with torch.no_grad():
            expected = library(input_ids=ids).logits
        close(torch.from_numpy(artifact.run(ids.numpy())["logits"]), expected)
