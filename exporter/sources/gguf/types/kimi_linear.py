"""Kimi Linear: Kimi delta attention and latent attention, with experts.

llama.cpp splits the projection of latent attention from the latent to keys and values:

    kv_b_proj, of each head  [k; v]     stored  attn_k_b, transposed, and attn_v_b
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import Change, Recipe, a_log, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("kimi-linear",)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MLP = ("gate", "up", "down")
_EXPERTS = {"gate": "w1", "down": "w2", "up": "w3"}
_SPARSE = "block_sparse_moe"
_INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_beta.weight": "self_attn.b_proj.weight",
    "ssm_norm.weight": "self_attn.o_norm.weight",
    **{f"ssm_conv1d_{part}.weight": f"self_attn.{part}_conv1d.weight" for part in ("q", "k", "v")},
    **{f"ssm_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("f_a", "f_b")},
    **{f"ssm_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("g_a", "g_b")},
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in _MLP},
    **{f"ffn_{p}_exps.weight": f"{_SPARSE}.experts.{{}}.{n}.weight" for p, n in _EXPERTS.items()},
    **{f"ffn_{p}_shexp.weight": f"{_SPARSE}.shared_experts.{p}_proj.weight" for p in _MLP},
    "ffn_gate_inp.weight": f"{_SPARSE}.gate.weight",
    "exp_probs_b.bias": f"{_SPARSE}.gate.e_score_correction_bias",
}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of KimiLinearForCausalLM."""
    heads, rotated = file.each("attention.head_count_kv"), file.need("rope.dimension_count")
    layers, width = range(file.layers), file.need("kda.head_dim")
    sparse = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in layers]
    query = next((f"blk.{i}.ssm_beta.weight" for i in layers if not heads[i]), None)
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": file.need("attention.head_count"),
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "mlp_layer_types": ["sparse" if it else "dense" for it in sparse],
        "kv_lora_rank": file.need("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": file.need("attention.key_length_mla") - rotated,
        "v_head_dim": file.need("attention.value_length_mla"),
        "linear_head_dim": width,
        "linear_num_heads": file.shape(query)[0] if query else 1,
        "linear_conv_kernel_dim": file.need("ssm.conv_kernel"),
        "num_experts": file.need("expert_count"),
        "num_experts_per_token": file.need("expert_used_count"),
        "num_shared_experts": file.need("expert_shared_count"),
        "moe_intermediate_size": file.need("expert_feed_forward_length"),
        "routed_scaling_factor": file.need("expert_weights_scale"),
        "num_expert_group": file.get("expert_group_count", 1),
        "topk_group": file.get("expert_group_used_count", 1),
        "moe_renormalize": file.get("expert_weights_norm", True),
    }


def recipes(file: GgufFile) -> Iterator[Recipe]:
    """Return the weights."""
    changes: dict[str, Change] = {
        "ssm_a": _a_log,
        **{f"ssm_conv1d_{part}.weight": _channels for part in ("q", "k", "v")},
    }
    yield from named(file, _OUTER, _INNER, changes, "model.layers.{}.")
    for index in range(file.layers):
        parts = tuple(f"blk.{index}.attn_{part}_b.weight" for part in ("k", "v"))
        if all(part in file.tensors for part in parts):
            yield Recipe(f"model.layers.{index}.self_attn.kv_b_proj.weight", parts, _keys_values)


def _a_log(values: Tensor) -> Tensor:
    return a_log(values).reshape(1, 1, -1, 1)


def _channels(values: Tensor) -> Tensor:
    return values.reshape(-1, 1, values.shape[-1])


def _keys_values(keys: Tensor, values: Tensor) -> Tensor:
    """Return the rows of keys (heads, latent, width) and values (heads, width, latent) by head."""
    return torch.cat([keys.transpose(1, 2), values], 1).reshape(-1, values.shape[-1])
