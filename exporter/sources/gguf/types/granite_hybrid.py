"""Granite 4 and Bamba: Mamba2 and attention, without positions or with rotary ones.

Granite 4 has no positions, and experts or none; Bamba has rotary ones, and no experts. llama.cpp's
conversion orders the rows of queries and keys for its rotary embedding, pairs of neighbours in
place of halves, in both.
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
_BAMBA_OUTER = {"output_norm.weight": "model.final_layernorm.weight"}
_BAMBA = {
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **{f"ffn_{part}.weight": f"feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_JOINED = {
    "_exps": "block_sparse_moe.input_linear.weight",
    "_shexp": "shared_mlp.input_linear.weight",
    "": "shared_mlp.input_linear.weight",
}
"""Weights of gates and ups as one, by the ends of the names of the two tensors."""


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of GraniteMoeHybridForCausalLM or BambaForCausalLM.

    Raises:
        UnsupportedModelError: a Bamba with what the class does not have.
    """
    keys = file.each("attention.head_count_kv")
    own = _of_bamba(file, keys) if _is_bamba(file) else _of_granite(file, keys)
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    width = file.need("embedding_length")
    return {
        "hidden_size": width,
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": max(keys, default=0) or 1,
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "mamba_expand": inner // width,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.need("ssm.group_count"),
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "mamba_proj_bias": False,
        **own,
    }


def _is_bamba(file: GgufFile) -> bool:
    return bool(file.get("rope.scaling.finetuned"))


def _of_bamba(file: GgufFile, keys: list[int]) -> JsonObject:
    others = ("expert_count", "attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    found = next((name for name in others if file.get(name)), None)
    if found is not None:
        raise refuse(
            file.path,
            f"a hybrid with rotary positions, as Bamba is, and {found}, which that has not",
            "give the folder of the model that the file was made of",
        )
    head = file.need("embedding_length") // file.need("attention.head_count")
    rotated = file.get("rope.dimension_count", head)
    return {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [place for place, count in enumerate(keys) if count],
        "rope_parameters": {"partial_rotary_factor": rotated / head},
    }


def _of_granite(file: GgufFile, keys: list[int]) -> JsonObject:
    experts = file.get("expert_count", 0)
    shared = "_shexp" if experts else ""
    return {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "shared_intermediate_size": file.shape(f"blk.0.ffn_gate{shared}.weight")[0],
        "layer_types": ["full_attention" if count else "linear_attention" for count in keys],
        "position_embedding_type": None,
        "attention_multiplier": file.get("attention.scale", 1.0),
        "embedding_multiplier": file.get("embedding_scale", 1.0),
        "residual_multiplier": file.get("residual_scale", 1.0),
        "logits_scaling": file.get("logit_scale", 1.0),
        "num_local_experts": experts,
        "num_experts_per_tok": file.get("expert_used_count", 0),
    }


def recipes(file: GgufFile) -> Iterator[Recipe]:
    """Return the weights."""
    keys = max(file.each("attention.head_count_kv"), default=0) or 1
    changes: dict[str, Change] = {
        **MAMBA2,
        "attn_q.weight": partial(halves, file.need("attention.head_count")),
        "attn_k.weight": partial(halves, keys),
    }
    if _is_bamba(file):
        yield from named(file, _OUTER | _BAMBA_OUTER, _INNER | _BAMBA, changes, "model.layers.{}.")
        return
    yield from named(file, _OUTER, _INNER, changes, "model.layers.{}.")
    for index in range(file.layers):
        for end, name in _JOINED.items():
            parts = tuple(f"blk.{index}.ffn_{part}{end}.weight" for part in ("gate", "up"))
            if all(part in file.tensors for part in parts):
                yield Recipe(f"model.layers.{index}.{name}", parts, stacked)
