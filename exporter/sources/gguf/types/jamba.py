"""Jamba: Mamba and attention without positions, with experts in some layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from linexport.sources.files import refuse
from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import MAMBA, Recipe, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("jamba",)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.final_layernorm.weight",
    "output.weight": "lm_head.weight",
}
_MLP = ("gate", "up", "down")
_INNER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **{f"ffn_{part}.weight": f"feed_forward.{part}_proj.weight" for part in _MLP},
    **{f"ffn_{p}_exps.weight": f"feed_forward.experts.{{}}.{p}_proj.weight" for p in _MLP},
    "ffn_gate_inp.weight": "feed_forward.router.weight",
    **{f"attn_{part}.weight": f"self_attn.{part}_proj.weight" for part in ("q", "k", "v")},
    "attn_output.weight": "self_attn.o_proj.weight",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_conv1d.weight": "mamba.conv1d.weight",
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.weight": "mamba.dt_proj.weight",
    "ssm_dt.bias": "mamba.dt_proj.bias",
    "ssm_in.weight": "mamba.in_proj.weight",
    "ssm_out.weight": "mamba.out_proj.weight",
    "ssm_x.weight": "mamba.x_proj.weight",
    **{f"ssm_{part}_norm.weight": f"mamba.{part}_layernorm.weight" for part in ("dt", "b", "c")},
}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of JambaForCausalLM."""
    width, heads = file.need("embedding_length"), file.each("attention.head_count_kv")
    attention = [index for index, count in enumerate(heads) if count]
    experts = [i for i in range(file.layers) if f"blk.{i}.ffn_gate_exps.weight" in file.tensors]
    return {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": max(heads, default=0) or 1,
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "mamba_expand": file.need("ssm.inner_size") // width,
        "mamba_d_state": file.need("ssm.state_size"),
        "mamba_d_conv": file.need("ssm.conv_kernel"),
        "mamba_dt_rank": file.need("ssm.time_step_rank"),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_experts": file.get("expert_count", 1),
        "num_experts_per_tok": file.get("expert_used_count", 1),
        **_every(file, "attn_layer", attention),
        **_every(file, "expert_layer", experts),
        "max_position_embeddings": file.need("context_length"),
    }


def _every(file: GgufFile, name: str, found: Sequence[int]) -> JsonObject:
    """Return the period and the offset of layers.

    Raises:
        UnsupportedModelError: they do not follow one.
    """
    first = found[0] if found else file.layers
    period = found[1] - first if len(found) > 1 else max(file.layers, first + 1)
    if list(found) != [i for i in range(first, file.layers) if (i - first) % period == 0]:
        raise refuse(
            file.path,
            f"{name}s {list(found)}, which do not repeat with one period",
            "give the folder of the model that the file was made of",
        )
    return {f"{name}_period": period, f"{name}_offset": first}


def recipes(file: GgufFile) -> Iterable[Recipe]:
    """Return the weights."""
    return named(file, _OUTER, _INNER, MAMBA, "model.layers.{}.")
