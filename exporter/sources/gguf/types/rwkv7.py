"""RWKV-7, in the layout of flash-linear-attention.

The mixes of a token with the one before are one tensor, in the order r, w, k, v, a, g. Values of
the first layer are mixed with no others: llama.cpp's conversion writes a copy of another weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import Change, Recipe, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("rwkv7",)

_OUTER = {
    "token_embd.weight": "model.embeddings.weight",
    "output.weight": "lm_head.weight",
    **{f"output_norm.{end}": f"model.norm.{end}" for end in ("weight", "bias")},
    **{f"token_embd_norm.{end}": f"model.layers.0.pre_norm.{end}" for end in ("weight", "bias")},
}
_NORMS = {"attn_norm": "attn_norm", "attn_norm_2": "ffn_norm", "time_mix_ln": "attn.g_norm"}
_PROJECTIONS = {"receptance": "r", "key": "k", "value": "v", "output": "o"}
_LORAS = {"1.weight": "0.weight", "2.weight": "2.weight", "0.weight": "2.bias"}
_INNER = {
    **{f"{a}.{end}": f"{b}.{end}" for a, b in _NORMS.items() for end in ("weight", "bias")},
    **{f"time_mix_{a}.weight": f"attn.{b}_proj.weight" for a, b in _PROJECTIONS.items()},
    **{f"time_mix_{x}{a}": f"attn.{x}_lora.lora.{b}" for x in "wvag" for a, b in _LORAS.items()},
    **{f"time_mix_{name}.weight": f"attn.{name}" for name in ("k_k", "k_a", "r_k")},
    "channel_mix_lerp_k.weight": "ffn.x_k",
    "channel_mix_key.weight": "ffn.key.weight",
    "channel_mix_value.weight": "ffn.value.weight",
}
_MIXES = "rwkvag"
_RANKS = {"decay": "decay", "gate": "gate", "a": "iclr", "v": "value_residual_mix"}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of RWKV7ForCausalLM of flash-linear-attention."""
    return {
        "model_type": "rwkv7",
        "architectures": ["RWKV7ForCausalLM"],
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.layers,
        "head_dim": file.need("wkv.head_size"),
        "norm_eps": file.need("attention.layer_norm_epsilon"),
        "hidden_act": "sqrelu",
        **{
            f"{ours}_low_rank_dim": file.need(f"attention.{theirs}_lora_rank")
            for ours, theirs in _RANKS.items()
        },
    }


def recipes(file: GgufFile) -> Iterator[Recipe]:
    """Return the weights."""
    width = file.need("wkv.head_size")
    changes: dict[str, Change] = {"time_mix_r_k.weight": partial(_by_heads, width)}
    for recipe in named(file, _OUTER, _INNER, changes, "model.layers.{}."):
        if not recipe.name.startswith("model.layers.0.attn.v_lora."):
            yield recipe
    for index in range(file.layers):
        for place, name in enumerate(_MIXES):
            part = f"blk.{index}.time_mix_lerp_fused.weight"
            yield Recipe(f"model.layers.{index}.attn.x_{name}", (part,), None, place)


def _by_heads(width: int, values: Tensor) -> Tensor:
    return values.reshape(-1, width)
