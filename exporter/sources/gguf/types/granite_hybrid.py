"""Granite 4: Mamba2 and attention without positions, with experts or without.

llama.cpp's conversion orders the rows of queries and keys for its rotary embedding, pairs of
neighbours in place of halves, though these models have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from linexport.sources.files import refuse
from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import MAMBA2, Change, Recipe, halves, named, stacked
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("granitehybrid",)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    "attn_output.weight": "self_attn.o_proj.weight",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_norm.weight": "mamba.norm.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    "ffn_down.weight": "shared_mlp.output_linear.weight",
}
_JOINED = {
    "_exps": "block_sparse_moe.input_linear.weight",
    "_shexp": "shared_mlp.input_linear.weight",
    "": "shared_mlp.input_linear.weight",
}
"""Weights of gates and ups as one, by the ends of the names of the two tensors."""


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of GraniteMoeHybridForCausalLM.

    Raises:
        UnsupportedModelError: it is a Bamba, which the same architecture stands for.
    """
    if file.get("rope.scaling.finetuned"):
        raise refuse(
            file.path,
            "a hybrid of type granitehybrid with rotary positions, as Bamba is",
            "give the folder of the model that the file was made of",
        )
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    width, keys = file.need("embedding_length"), file.each("attention.head_count_kv")
    experts = file.get("expert_count", 0)
    shared = "_shexp" if experts else ""
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "hidden_size": width,
        "intermediate_size": file.need("feed_forward_length"),
        "shared_intermediate_size": file.shape(f"blk.0.ffn_gate{shared}.weight")[0],
        "num_hidden_layers": file.layers,
        "layer_types": ["full_attention" if count else "linear_attention" for count in keys],
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": max(keys, default=0) or 1,
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "position_embedding_type": None,
        "attention_multiplier": file.get("attention.scale", 1.0),
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
        "num_local_experts": experts,
        "num_experts_per_tok": file.get("expert_used_count", 0),
        "mamba_expand": inner // width,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.need("ssm.group_count"),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": False,
    }


def recipes(file: GgufFile) -> Iterator[Recipe]:
    """Return the weights."""
    keys = max(file.each("attention.head_count_kv"), default=0) or 1
    changes: dict[str, Change] = {
        **MAMBA2,
        "attn_q.weight": partial(halves, file.need("attention.head_count")),
        "attn_k.weight": partial(halves, keys),
    }
    yield from named(file, _OUTER, _INNER, changes, "model.layers.{}.")
    for index in range(file.layers):
        for end, name in _JOINED.items():
            parts = tuple(f"blk.{index}.ffn_{part}{end}.weight" for part in ("gate", "up"))
            if all(part in file.tensors for part in parts):
                yield Recipe(f"model.layers.{index}.{name}", parts, stacked)
