"""Qwen3-Next, and Qwen3.5 with and without experts: gated delta rule and gated attention.

llama.cpp orders the projections and the value heads of the delta rule otherwise:

    Qwen3-Next   published  [q k v z] of each key head      stored  all q, all k, all v; all z
    Qwen3.5      published  value heads by key head (k, r)  stored  by repetition (r, k)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import Change, Recipe, a_log, channels, lowered, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MLP = ("gate", "up", "down")
_INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in _MLP},
    **{f"ffn_{part}_exps.weight": f"mlp.experts.{{}}.{part}_proj.weight" for part in _MLP},
    **{f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight" for part in _MLP},
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in ("q", "k")},
    "attn_output.weight": "self_attn.o_proj.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
}
_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_CHANGES = {
    "ssm_a": a_log,
    "ssm_conv1d.weight": channels,
    **{f"{name}.weight": lowered for name in _NORMS},
}
_CLASSES = {
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of the class of transformers."""
    kind, name = _CLASSES[file.architecture]
    head, heads = file.need("attention.key_length"), file.need("ssm.time_step_rank")
    linear = [f"blk.{index}.ssm_a" in file.tensors for index in range(file.layers)]
    rotated = file.need("rope.dimension_count") / head
    found: JsonObject = {
        "model_type": kind,
        "architectures": [name],
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": file.get("feed_forward_length", 0),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": file.need("attention.head_count_kv"),
        "head_dim": head,
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "layer_types": ["linear_attention" if it else "full_attention" for it in linear],
        "linear_conv_kernel_dim": file.need("ssm.conv_kernel"),
        "linear_key_head_dim": file.need("ssm.state_size"),
        "linear_num_key_heads": file.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": file.need("ssm.inner_size") // heads,
        "partial_rotary_factor": rotated,
        "rope_parameters": {"partial_rotary_factor": rotated},
    }
    if sections := file.get("rope.dimension_sections"):
        found["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    if experts := file.get("expert_count"):
        found |= {
            "num_experts": experts,
            "num_experts_per_tok": file.need("expert_used_count"),
            "moe_intermediate_size": file.need("expert_feed_forward_length"),
            "shared_expert_intermediate_size": file.need("expert_shared_feed_forward_length"),
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        }
    return found


def recipes(file: GgufFile) -> Iterator[Recipe]:
    """Return the weights."""
    if file.architecture == "qwen3next":
        yield from named(file, _OUTER, _INNER, _CHANGES, "model.layers.{}.")
        yield from _joined(file)
        return
    order = partial(_by_key_head, file.need("ssm.group_count"), file.need("ssm.time_step_rank"))
    keys = 2 * file.need("ssm.group_count") * file.need("ssm.state_size")
    after = partial(_after, keys, order)
    changes: dict[str, Change] = {
        **_CHANGES,
        "ssm_a": lambda values: order(a_log(values)),
        "ssm_conv1d.weight": lambda values: after(values).unsqueeze(1),
        "ssm_out.weight": lambda values: order(values.T).T,
        **dict.fromkeys(("ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"), order),
        "attn_qkv.weight": after,
        "attn_gate.weight": order,
    }
    projections = {
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight": "linear_attn.in_proj_z.weight",
    }
    yield from named(file, _OUTER, _INNER | projections, changes, "model.layers.{}.")


def _joined(file: GgufFile) -> Iterable[Recipe]:
    """Return the projections of Qwen3-Next, each of them of two tensors."""
    heads, width = file.need("ssm.group_count"), file.need("ssm.state_size")
    for index in range(file.layers):
        parts = tuple(f"blk.{index}.attn_{part}.weight" for part in ("qkv", "gate"))
        if all(part in file.tensors for part in parts):
            name = f"model.layers.{index}.linear_attn.in_proj_qkvz.weight"
            yield Recipe(name, parts, partial(_by_head, heads, heads * width))


def _by_head(heads: int, keys: int, qkv: Tensor, z: Tensor) -> Tensor:
    """Return rows of queries, keys, values and gates of each key head after another."""
    parts = (qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], z)
    return torch.cat([p.reshape(heads, -1, p.shape[-1]) for p in parts], 1).reshape(-1, z.shape[-1])


def _by_key_head(keys: int, values: int, stored: Tensor) -> Tensor:
    """Return rows of value heads by key head, (k, r), that are stored by repetition, (r, k)."""
    rows = stored.reshape(values // keys, keys, -1, *stored.shape[1:])
    return rows.transpose(0, 1).reshape(stored.shape)


def _after(keys: int, order: partial[Tensor], stored: Tensor) -> Tensor:
    """Return rows of which those after queries and keys are ordered."""
    return torch.cat([stored[:keys], order(stored[keys:])])
