"""LFM2: short convolutions and attention, with experts in lfm2moe."""

from __future__ import annotations

from collections.abc import Iterable

from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import Recipe, channels, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("lfm2", "lfm2moe")

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
_MLP = {"gate": "w1", "down": "w2", "up": "w3"}
_INNER = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    **{f"ffn_{part}.weight": f"feed_forward.{name}.weight" for part, name in _MLP.items()},
    **{
        f"ffn_{part}_exps.weight": f"feed_forward.experts.{{}}.{name}.weight"
        for part, name in _MLP.items()
    },
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "shortconv.conv.weight": "conv.conv.weight",
    "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    **{f"attn_{part}_norm.weight": f"self_attn.{part}_layernorm.weight" for part in ("q", "k")},
    "attn_output.weight": "self_attn.out_proj.weight",
}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of Lfm2ForCausalLM or Lfm2MoeForCausalLM."""
    heads, experts = file.each("attention.head_count_kv"), file.architecture == "lfm2moe"
    found: JsonObject = {
        "model_type": "lfm2_moe" if experts else "lfm2",
        "architectures": ["Lfm2MoeForCausalLM" if experts else "Lfm2ForCausalLM"],
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": file.shape("blk.0.ffn_gate.weight")[0],
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": file.need("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }
    if experts:
        found |= {
            "num_experts": file.need("expert_count"),
            "num_experts_per_tok": file.need("expert_used_count"),
            "moe_intermediate_size": file.need("expert_feed_forward_length"),
            "num_dense_layers": file.need("leading_dense_block_count"),
            "use_expert_bias": any("exp_probs_b" in name for name in file.tensors),
        }
    return found


def recipes(file: GgufFile) -> Iterable[Recipe]:
    """Return the weights."""
    changes = {"shortconv.conv.weight": channels}
    return named(file, _OUTER, _INNER, changes, "model.layers.{}.")
