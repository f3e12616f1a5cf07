"""Folders of embedding models, as sentence-transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from tests.support.families import TINY, save_model
from tests.support.tokenizers import save_tokenizer

VOCABULARY, SPECIAL = 300, ("<pad>", "<s>", "</s>")
LONGEST = 20

Module = tuple[str, dict[str, Any] | None, dict[str, torch.Tensor]]
"""Type, configuration and weights."""


def dense(inputs: int, outputs: int, **config: Any) -> Module:
    """A projection with random weights."""
    torch.manual_seed(inputs)
    weights = {
        "linear.weight": torch.randn(outputs, inputs) / inputs**0.5,
        "linear.bias": torch.randn(outputs) / 9,
    }
    settings = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    return "Dense", {**settings, **config}, weights


def pooling(width: int, *modes: str) -> Module:
    """A pooling as earlier releases wrote it."""
    return "Pooling", {"word_embedding_dimension": width, **dict.fromkeys(modes, True)}, {}


NORMALIZE: Module = ("Normalize", None, {})


def save_sentence_model(
    kind: str, place: Path, modules: Sequence[Module], library: str = "sentence_transformers"
) -> Path:
    """Save a base model with a tokenizer, prompts and the modules behind it."""
    save_model({**TINY[kind], "vocab_size": VOCABULARY}, kind, place, "AutoModel")
    save_tokenizer(place, VOCABULARY, SPECIAL)
    path = str(place / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(path)
    write_modules(place, modules, library)
    files = {
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
        },
        "sentence_bert_config": {"max_seq_length": LONGEST, "do_lower_case": False},
        "config_sentence_transformers": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": "query: ", "document": "document: "},
            "default_prompt_name": None,
        },
    }
    for name, content in files.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    return place


def write_modules(place: Path, modules: Sequence[Module], library: str) -> None:
    """Write modules.json, and a folder for each module behind the first."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{library}.models.Transformer"}]
    for index, (kind, config, weights) in enumerate(modules, 1):
        folder = place / f"{index}_{kind}"
        folder.mkdir(exist_ok=True)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        if weights:
            save_file(weights, folder / "model.safetensors")
        whole = f"{library}.models.{kind}"
        listed.append({"idx": index, "name": str(index), "path": folder.name, "type": whole})
    (place / "modules.json").write_text(json.dumps(listed))
