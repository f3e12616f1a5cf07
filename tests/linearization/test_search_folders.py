"""The search on folders of transformers of several families, by the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from linexport.linearization import search_candidates
from linexport.sources import load_model
from tests.linearization.test_linearize_search import given_cost

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

Cli = Callable[..., Any]

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FEED_FORWARD = {"intermediate_size": 48}
GROUPED = {"num_key_value_heads": 1, "head_dim": 16}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TEXT = {"vocab_size": 64, "max_position_embeddings": 64, **TOKENS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**LAYERS, **FEED_FORWARD, **GROUPED, **TEXT}),
    "qwen2": ("Qwen2ForCausalLM", {**LAYERS, **FEED_FORWARD, "num_key_value_heads": 1, **TEXT}),
    "qwen3": ("Qwen3ForCausalLM", {**LAYERS, **FEED_FORWARD, **GROUPED, **TEXT}),
    "smollm3": ("SmolLM3ForCausalLM", {**LAYERS, **FEED_FORWARD, "num_key_value_heads": 1, **TEXT}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 64, **TOKENS},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**LAYERS, **FEED_FORWARD, **TEXT}),
    "bert": ("BertForSequenceClassification", {**LAYERS, **FEED_FORWARD, "vocab_size": 64}),
    "vit": (
        "ViTForImageClassification",
        {**LAYERS, **FEED_FORWARD, "image_size": 16, "patch_size": 4, "num_channels": 1},
    ),
}


def write(kind: str) -> dict[str, np.ndarray]:
    """Write a model folder of small random weights; return data for it."""
    name, sizes = FAMILIES[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    getattr(transformers, name)(config).eval().save_pretrained(kind)
    generator = np.random.default_rng(0)
    if kind == "vit":
        return {"pixel_values": generator.standard_normal((64, 1, 16, 16), np.float32)}
    ids = generator.integers(1, 64, (64, 24))
    if kind != "bert":
        return {"input_ids": ids}
    mask = (np.arange(24) < np.arange(64)[:, None] % 8 + 17).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "kind",
    [k if k in ("gpt2", "vit") else pytest.param(k, marks=pytest.mark.slow) for k in FAMILIES],
)
def test_a_folder_becomes_a_program(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_candidates, "measure", given_cost)
    np.savez("rows.npz", **write(kind))
    causal = kind not in ("bert", "vit")
    maps = ("--map", "elu1", *(("--map", "window8+elu1") if causal else ()))
    done = cli(
        *("linearize", kind, "-o", "linear.pt2", "--data", "rows.npz", "--auto", *maps),
        *("--max-drop", 0.5, "--time-budget", 0.2, "--no-bench", "--threads", 1, "--json"),
    )
    found = done.json()
    assert done.code == 0, found.get("verdict", done.err)
    names = {form for point in found["search"]["points"] for form in point["forms"]}
    assert names <= {"softmax", "elu1", "window8+elu1"} and len(names) > 1
    assert found["search"]["bound"] <= 0.5 and "never saw" in found["verdict"]
    loss = {"bert": "agreement", "vit": "agreement"}.get(kind, "bits per token")
    assert found["search"]["loss"].startswith(loss)
    loaded = load_model("linear.pt2")
    outputs = loaded.module(*loaded.args)
    assert torch.isfinite(outputs if isinstance(outputs, torch.Tensor) else outputs[0]).all()


def test_options_of_a_search_need_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", **write("vit"))
    given = ("linearize", "vit", "-o", "linear.pt2", "--data", "rows.npz", "--json")
    for options, words in (
        (("--time-budget", 1), "add --auto"),
        (("--labels", "rows.npz"), "add --auto"),
        (("--auto",), "--max-drop 0.02"),
        (("--auto", "--max-drop", 0.1, "--distil", 3), "leave --features"),
        (("--auto", "--max-drop", 0.1, "--map", "*1*=elu1"), "Unknown feature map"),
        (("--auto", "--max-drop", 0.1, "--labels", "rows.npz"), "The labels are float32"),
    ):
        done = cli(*given, *options)
        assert done.code == 2 and words in done.json()["message"], done.json()
    assert not Path("linear.pt2").exists()
