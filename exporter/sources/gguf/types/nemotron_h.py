"""Nemotron-H: layers of Mamba2, attention without positions, MLPs and experts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from linexport.sources.files import refuse
from linexport.sources.gguf.file import AGAIN, GgufFile
from linexport.sources.gguf.recipes import MAMBA2, Change, Recipe, halves, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("nemotron_h", "nemotron_h_moe")

_OUTER = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm.weight": "norm.weight",
    **{f"attn_{part}.weight": f"mixer.{part}_proj.weight" for part in ("q", "k", "v")},
    "attn_output.weight": "mixer.o_proj.weight",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_norm.weight": "mixer.norm.weight",
    "ssm_out.weight": "mixer.out_proj.weight",
    **{f"ffn_{part}.weight": f"mixer.{part}_proj.weight" for part in ("up", "down")},
    **{f"ffn_{p}_exps.weight": f"mixer.experts.{{}}.{p}_proj.weight" for p in ("up", "down")},
    **{f"ffn_{p}_shexp.weight": f"mixer.shared_experts.{p}_proj.weight" for p in ("up", "down")},
    "ffn_gate_inp.weight": "mixer.gate.weight",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
}
_KINDS = {
    "ssm_a": "linear_attention",
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
}
"""Kinds of layers, by a tensor that no other kind has."""


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of NemotronHForCausalLM."""
    inner, heads = file.need("ssm.inner_size"), file.need("ssm.time_step_rank")
    found: JsonObject = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        "hidden_size": file.need("embedding_length"),
        "intermediate_size": _width(file),
        "num_hidden_layers": file.layers,
        "layers_block_type": [_kind(file, index) for index in range(file.layers)],
        "num_attention_heads": file.need("attention.head_count"),
        "num_key_value_heads": _keys(file),
        "head_dim": file.need("attention.key_length"),
        "layer_norm_epsilon": file.get(
            "attention.layer_norm_rms_epsilon", file.get("attention.layer_norm_epsilon")
        ),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": file.need("ssm.group_count"),
        "ssm_state_size": file.need("ssm.state_size"),
        "conv_kernel": file.need("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        "num_nextn_predict_layers": 0,
    }
    if experts := file.get("expert_count"):
        found |= {
            "n_routed_experts": experts,
            "num_experts_per_tok": file.need("expert_used_count"),
            "moe_intermediate_size": file.need("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": file.need("expert_shared_feed_forward_length"),
            "n_shared_experts": file.need("expert_shared_count"),
            "norm_topk_prob": file.need("expert_weights_norm"),
            "routed_scaling_factor": file.need("expert_weights_scale"),
            "n_group": file.get("expert_group_count", 1),
            "topk_group": file.get("expert_group_used_count", 1),
            "moe_latent_size": file.get("moe_latent_size"),
        }
    return found


def _kind(file: GgufFile, index: int) -> str:
    """Return the kind of a layer.

    Raises:
        UnsupportedModelError: it has the tensors of none.
    """
    found = [kind for name, kind in _KINDS.items() if f"blk.{index}.{name}" in file.tensors]
    if not found:
        raise refuse(file.path, f"layer {index} has none of {', '.join(_KINDS)}", AGAIN)
    return found[0]


def _width(file: GgufFile) -> int:
    """Return the width of MLPs, or of experts where there are no MLPs."""
    ups = (f"blk.{index}.ffn_up.weight" for index in range(file.layers))
    widths = [file.shape(name)[0] for name in ups if name in file.tensors]
    return max(widths, default=0) or int(file.get("expert_feed_forward_length", 1))


def _keys(file: GgufFile) -> int:
    return max(file.each("attention.head_count_kv"), default=0) or 1


def recipes(file: GgufFile) -> Iterable[Recipe]:
    """Return the weights."""
    changes: dict[str, Change] = {
        **MAMBA2,
        "attn_q.weight": partial(halves, file.need("attention.head_count")),
        "attn_k.weight": partial(halves, _keys(file)),
    }
    return named(file, _OUTER, _INNER, changes, "backbone.layers.{}.")
