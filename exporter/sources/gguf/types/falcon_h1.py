"""Falcon-H1, whose multipliers llama.cpp's conversion applies to the weights: all are 1 here."""

from __future__ import annotations

from collections.abc import Iterable

from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import MAMBA2, Recipe, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("falcon-h1",)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.final_layernorm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm": "pre_ff_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **{f"ffn_{part}.weight": f"feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"ffn_{part}.bias": f"feed_forward.{part}_proj.bias" for part in ("gate", "up", "down")},
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    **{f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in ("q", "k", "v")},
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_in.bias": "mamba.in_proj.bias",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ssm_out.bias": "mamba.out_proj.bias",
}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of FalconH1ForCausalLM."""
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    ones = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": file.need("attention.head_count_kv"),
        "head_dim": file.need("attention.key_length"),
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.need("ssm.group_count"),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in file.tensors,
        "projectors_bias": "blk.0.ssm_out.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        **{f"{name}_multiplier": 1.0 for name in ones},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }


def recipes(file: GgufFile) -> Iterable[Recipe]:
    """Return the weights."""
    return named(file, _OUTER, _INNER, MAMBA2, "model.layers.{}.")
