"""Public models by their shape: configurations whose weights benchmarks draw at random.

    qwen3.5-0.8b       24 layers of width 1024, 248,320 words
    lfm2-1.2b          16 of 2048, 65,536
    granite-4-h-350m   32 of 768, 100,352
    mamba2-370m        48 of 1024, 50,288
    rwkv7-0.4b         24 of 1024, 65,536
    kimi-like          12 of 1024, 163,840

``--shape NAME`` of a benchmark takes one of these, and ``--layers N`` its first layers. Sizes are
those of the published configurations; weights are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Shape:
    """A public configuration.

    Attributes:
        model_type: of transformers.
        layers: the number of layers.
        configuration: everything that does not depend on it.
        by_layer: gives options that are lists over so many layers.
    """

    model_type: str
    layers: int
    configuration: dict[str, Any]
    by_layer: Callable[[int], dict[str, Any]] = lambda layers: {}

    def of(self, layers: int | None = None, vocabulary: int | None = None) -> dict[str, Any]:
        """Return the configuration with so many layers and words; None for its own number."""
        count = layers or self.layers
        words = {} if vocabulary is None else {"vocab_size": vocabulary}
        given = {**self.configuration, "num_hidden_layers": count, **self.by_layer(count)}
        return {**given, **TOKENS, **words}


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""Tokens that no benchmark draws; those of the public files are beyond smaller vocabularies."""


def _every(period: int, linear: str, layers: int) -> list[str]:
    return [linear if (n + 1) % period else "full_attention" for n in range(layers)]


def _at(places: tuple[int, ...], linear: str, layers: int) -> list[str]:
    return ["full_attention" if n in places else linear for n in range(layers)]


SHAPES: dict[str, Shape] = {
    "qwen3.5-0.8b": Shape(
        "qwen3_5_text",
        24,
        {
            "vocab_size": 248_320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
            "tie_word_embeddings": True,
        },
        lambda layers: {"layer_types": _every(4, "linear_attention", layers)},
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        16,
        {
            "vocab_size": 65_536,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "block_auto_adjust_ff_dim": False,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
        },
        lambda layers: {"layer_types": _at((2, 5, 8, 10, 12, 14), "conv", layers)},
    ),
    "granite-4-h-350m": Shape(
        "granitemoehybrid",
        32,
        {
            "vocab_size": 100_352,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.246,
            "attention_multiplier": 0.015625,
            "position_embedding_type": "nope",
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
        lambda layers: {"layer_types": _at((10, 13, 17, 27), "linear_attention", layers)},
    ),
    "mamba2-370m": Shape(
        "mamba2",
        48,
        {
            "vocab_size": 50_288,
            "hidden_size": 1024,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "expand": 2,
            "chunk_size": 256,
            "tie_word_embeddings": True,
        },
    ),
    "rwkv7-0.4b": Shape(
        "rwkv7",
        24,
        {
            "vocab_size": 65_536,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "head_dim": 64,
            "decay_low_rank_dim": 64,
            "a_low_rank_dim": 64,
            "v_low_rank_dim": 32,
            "gate_low_rank_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "kimi-like": Shape(
        "kimi_linear",
        12,
        {
            "vocab_size": 163_840,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "moe_intermediate_size": 512,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_head_dim": 128,
            "linear_num_heads": 8,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": False,
        },
        lambda layers: {
            "layer_types": _every(4, "linear_attention", layers),
            "mlp_layer_types": ["dense", *["sparse"] * (layers - 1)],
        },
    ),
}
"""Shapes by name. Kimi-Linear's 48 billion weights fit no machine that benchmarks run on: the last
has its kinds of layers, its vocabulary and sizes of heads at less than half its width."""

LIBRARY = tuple(name for name, shape in SHAPES.items() if shape.model_type != "rwkv7")
"""Shapes that transformers has, whose eager step can be timed."""


@dataclass(frozen=True)
class Chosen:
    """A shape that is to be measured.

    Attributes:
        name: of the shape.
        layers: of the model.
    """

    name: str
    layers: int

    @classmethod
    def parse(cls, text: str) -> Chosen:
        """Read what ``str`` gives, such as "qwen3.5-0.8b:4"."""
        name, _, layers = text.partition(":")
        return cls(name, int(layers) if layers else SHAPES[name].layers)

    def __str__(self) -> str:
        return f"{self.name}:{self.layers}"

    @property
    def shape(self) -> Shape:
        """The configuration of that name."""
        return SHAPES[self.name]

    @property
    def vocabulary(self) -> int:
        """Number of words."""
        return int(self.shape.configuration["vocab_size"])

    def save(self, folder: Path, vocabulary: int | None = None) -> None:
        """Save it with random weights in bfloat16, in a process of its own; see ``save``."""
        command = [sys.executable, __file__, str(self), str(folder), str(vocabulary or "")]
        subprocess.run(command, check=True)


def add_options(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(SHAPES)) -> None:
    """Add ``--shape NAME`` to a script's options; ``--layers`` is the script's own."""
    parser.add_argument("--shape", choices=names, help="a public model's, with random weights")


def chosen(given: argparse.Namespace) -> Chosen | None:
    """Return the shape that options name, with ``--layers`` of it; None without."""
    if given.shape is None:
        return None
    return Chosen(given.shape, given.layers or SHAPES[given.shape].layers)


def save(shape: Chosen, folder: Path, vocabulary: int | None = None) -> None:
    """Save a model as the hub has it, its weights random, in bfloat16.

    Args:
        shape: of the model.
        folder: to make.
        vocabulary: number of words; None for that of the public model.
    """
    import torch

    sys.path.insert(0, str(ROOT))
    from tests.support.families import save_model

    torch.set_default_dtype(torch.bfloat16)
    configuration = shape.shape.of(shape.layers, vocabulary)
    if shape.name in LIBRARY:
        save_model(configuration, shape.shape.model_type, folder)
    else:
        _save_layout({"model_type": shape.shape.model_type, **configuration}, folder)


def _save_layout(configuration: dict[str, Any], folder: Path) -> None:
    """Save a model in the layout of flash-linear-attention, which transformers has not."""
    import torch
    from safetensors.torch import save_file

    from linexport.models.flash_linear_attention import build

    torch.manual_seed(0)
    weights = {}
    for name, weight in build(configuration).state_dict().items():
        noise = torch.randn_like(weight)
        wide = weight.dim() > 1 and min(weight.shape) > 1
        weights[name] = noise * weight.shape[-1] ** -0.5 if wide else weight + 0.1 * noise
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def save_tokenizer(words: int, folder: Path) -> None:
    """Write a tokenizer of bytes beside a model, with a word for every further token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    save(Chosen.parse(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3] or 0) or None)
