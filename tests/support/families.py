"""Configurations of every family of transformers, and folders of models with random weights.

``TINY`` for tests, ``WIDE`` (hidden size 512, four layers) for measuring.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONG = {"max_position_embeddings": 4096}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} | {
    "shared_expert_intermediate_size": 16
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8} | {
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    **TOKENS,
}

TINY: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**SIZES, **ATTENTION, **DELTA, **LONG, "head_dim": 16},
    "qwen3_5_moe_text": {**SIZES, **ATTENTION, **DELTA, **LONG, **EXPERTS, "head_dim": 16},
    "qwen3_next": {**SIZES, **ATTENTION, **DELTA, **LONG, **EXPERTS, "head_dim": 16},
    "olmo_hybrid": {**SIZES, **ATTENTION, **DELTA, **LONG},
    "kimi_linear": {
        **SIZES,
        **LONG,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mamba2": {
        **SIZES,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 16,
    },
    "bamba": {**SIZES, **ATTENTION, **MAMBA2, **LONG, "attn_layer_indices": [1]},
    "nemotron_h": {
        **SIZES,
        **ATTENTION,
        **LONG,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {**SIZES, **ATTENTION, **MAMBA2, **LONG, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **SIZES,
        **ATTENTION,
        **MAMBA2,
        **LONG,
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "zamba2": {
        **SIZES,
        **LONG,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "num_attention_heads": 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
    "mamba": {**SIZES, "state_size": 4, "time_step_rank": 4},
    "falcon_mamba": {**SIZES, "state_size": 4, "time_step_rank": 4},
    "jamba": {
        **SIZES,
        **ATTENTION,
        **LONG,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "minimax": {
        **SIZES,
        **ATTENTION,
        **LONG,
        "head_dim": 8,
        "num_local_experts": 4,
        "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {**SIZES, **ATTENTION, **LONG, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        **SIZES,
        **ATTENTION,
        **LONG,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
    },
    "lfm3": {
        **SIZES,
        **ATTENTION,
        **LONG,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["conv", "sliding_attention"],
    },
    "inkling_text": {
        **SIZES,
        **ATTENTION,
        **LONG,
        **{"head_dim": 8, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 24},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 24},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "moe_intermediate_size": 16,
    },
    "inkling2_text": {
        **SIZES,
        **ATTENTION,
        **LONG,
        **{"head_dim": 8, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 24},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 24},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": 64},
        "intermediate_size": 16,
        "log_scaling_n_floor": 40,
        "layer_types": ["hybrid_sliding", "hybrid"],
    },
    "inkling2_loop_text": {
        **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
        **ATTENTION,
        **LONG,
        **{"head_dim": 8, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 24},
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "sliding_window_size": 24},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": 64},
        **{"moe_intermediate_size": 16, "log_scaling_n_floor": 40, "num_hidden_layers": 3},
        **{"n_layers_per_attn_res_block": 1, "loop_gate_rank": 4, "loop_num_passes": 2},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 3},
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    },
    "lara_mini": {
        **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
        **ATTENTION,
        **{**DELTA, **LONG, **EXPERTS},
        **{"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 3},
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    },
    "zaya": {
        **SIZES,
        **ATTENTION,
        **LONG,
        **{"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 8},
        "moe_intermediate_size": 16,
    },
    "bailing_hybrid": {
        **SIZES,
        **LONG,
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
        **{"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2},
        "moe_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "zamba": {
        **SIZES,
        **LONG,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "recurrent_gemma": {
        **SIZES,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 24,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv": {
        **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
        **{"bos_token_id": 1, "eos_token_id": 2, "rescale_every": 1},
    },
    "xlstm": {
        **{"vocab_size": 64, "hidden_size": 32, "embedding_dim": 32, **TOKENS},
        **{"num_hidden_layers": 2, "num_blocks": 2, "num_heads": 2, "chunk_size": 16},
    },
}
"""Configuration by model type."""

_INDEXED = ["linear_attention", "full_attention"]
TINY["qwen4_exp_text"] = {
    **{name: TINY["qwen3_5_moe_text"][name] for name in (*SIZES, *ATTENTION, *EXPERTS)},
    **{name: value for name, value in DELTA.items() if name != "layer_types"},
    **{"head_dim": 16, "hc_count": 2, "hc_lowrank": 8, "layer_types": _INDEXED},
    **{"indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    **{"indexer_budget": 8, "indexer_compress_ratio": 4},
}
BASES: dict[str, dict[str, Any]] = {
    "glm5_next_text": {
        **SIZES,
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 16},
        **{"kv_lora_rank": 12, "q_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2},
        **{"linear_head_dim": 16, "linear_num_heads": 2, "layer_types": _INDEXED},
        **{"index_topk": 8, "index_head_dim": 16, "index_n_heads": 8, "index_kpool": 4},
        "mlp_layer_types": ["dense", "sparse"],
    },
}
"""Configuration of types that have no language model without towers: their base model."""

_SIGHT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "patch_size": 4},
}
_SOUND = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    "num_attention_heads": 2,
}
_SEEN = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
_MINICPM = {
    "text_config": {"model_type": "qwen3_5_text", **TINY["qwen3_5_text"]},
    "vision_config": {**_SIGHT, "image_size": 16, "insert_layer_id": 0},
    **{"insert_layer_id": 0, "image_token_id": 60, "video_token_id": 61},
}

WITH_TOWERS: dict[str, dict[str, Any]] = {
    "lfm3_vl": {
        "text_config": {"model_type": "lfm3", **TINY["lfm3"]},
        "vision_config": _SIGHT,
        "image_token_id": 60,
    },
    "inkling_mm_model": {
        "text_config": {"model_type": "inkling_text", **TINY["inkling_text"]},
        "vision_config": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"patch_size": 4, "text_hidden_size": 32},
        },
        "audio_config": {"text_hidden_size": 32, "mel_vocab_size": 8, "n_mel_bins": 4},
    },
    "inkling2": {
        "text_config": {"model_type": "inkling2_text", **TINY["inkling2_text"]},
        "vision_config": {**_SIGHT, "projection_hidden_dim": 32, "text_hidden_size": 32},
        "image_token_id": 60,
    },
    "inkling2_loop": {
        "text_config": {"model_type": "inkling2_loop_text", **TINY["inkling2_loop_text"]},
        "vision_config": {**_SIGHT, "projection_hidden_dim": 32, "text_hidden_size": 32},
        "image_token_id": 60,
    },
    "glm5_next": {
        "text_config": BASES["glm5_next_text"],
        "vision_config": {**_SEEN, "intermediate_size": 48},
    },
    "qwen4_exp": {"text_config": TINY["qwen4_exp_text"], "vision_config": _SEEN},
    "minicpm_ocr": _MINICPM,
    "minicpmv4_6": _MINICPM,
    "minicpmv4_7": _MINICPM,
    "nemotron_h_omni": {
        "text_config": {"model_type": "nemotron_h", **TINY["nemotron_h"]},
        "vision_config": {
            **{"model_type": "radio", "hidden_size": 32, "num_hidden_layers": 2, "patch_size": 4},
            **{"num_attention_heads": 2, "image_size": 16, "max_img_size": 64},
            "video_temporal_patch_size": 2,
        },
        **{"projector_hidden_size": 32, "vision_hidden_size": 32},
    },
    "nemo_speechlm": {
        "text_config": {"model_type": "nemotron_h", **TINY["nemotron_h"]},
        "audio_config": {
            "asr_config": _SOUND,
            "diarization_config": {
                **{"model_type": "nemotron3_diarization", "hidden_size": 32},
                **{"intermediate_size": 48, "num_hidden_layers": 1},
            },
        },
        "word_timestamp_config": {**_SOUND, "vocab_size": 64, "blank_token_id": 63},
        "audio_token_id": 64,
    },
}
"""Models with towers that are not converted: their language model is, for text alone."""

LINEAR_LAYERS = {
    "qwen3_5_text": 1,
    "qwen3_5_moe_text": 1,
    "qwen3_next": 1,
    "olmo_hybrid": 1,
    "kimi_linear": 1,
    "mamba2": 2,
    "bamba": 1,
    "nemotron_h": 1,
    "falcon_h1": 2,
    "granitemoehybrid": 1,
    "zamba2": 3,
    "mamba": 2,
    "falcon_mamba": 2,
    "jamba": 1,
    "minimax": 1,
    "lfm2": 0,
    "lfm2_moe": 0,
    "lfm3": 0,
    "inkling_text": 0,
    "inkling2_text": 0,
    "inkling2_loop_text": 0,
    "lara_mini": 1,
    "qwen4_exp_text": 1,
    "zaya": 0,
    "bailing_hybrid": 1,
    "zamba": 8,
    "recurrent_gemma": 2,
    "rwkv": 2,
    "xlstm": 2,
}
"""LinearAttention nodes with a state in a tiny model, by model type."""

NEW = {"inkling2_loop": "5.24", "inkling2_loop_text": "5.24", "lara_mini": "5.24"}
"""Model types that older releases of transformers do not have, with the first that has them."""

for _kind, _release in NEW.items():
    if Version(version("transformers")) < Version(_release):
        for _table in (TINY, WITH_TOWERS, LINEAR_LAYERS):
            _table.pop(_kind, None)

FOUR = ["linear_attention"] * 3 + ["full_attention"]
WIDE_SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
}
WIDE_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2}
WIDE_DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": FOUR,
}
WIDE_EXPERTS = {
    "num_experts": 8,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
WIDE_MAMBA2 = {
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_chunk_size": 64,
}

WIDE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**WIDE_ATTENTION, **WIDE_DELTA, "head_dim": 64},
    "qwen3_5_moe_text": {**WIDE_ATTENTION, **WIDE_DELTA, **WIDE_EXPERTS, "head_dim": 64},
    "qwen3_next": {**WIDE_ATTENTION, **WIDE_DELTA, **WIDE_EXPERTS, "head_dim": 64},
    "olmo_hybrid": {**WIDE_ATTENTION, **WIDE_DELTA},
    "kimi_linear": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 256,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "num_local_experts": 8,
        "linear_head_dim": 64,
        "linear_num_heads": 8,
        "layer_types": FOUR,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    },
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 64},
    "bamba": {**WIDE_ATTENTION, **WIDE_MAMBA2, "attn_layer_indices": [3]},
    "nemotron_h": {
        **WIDE_ATTENTION,
        "head_dim": 64,
        "ssm_state_size": 64,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "chunk_size": 64,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
    "falcon_h1": {**WIDE_ATTENTION, **WIDE_MAMBA2, "mamba_d_ssm": 1024},
    "granitemoehybrid": {
        **WIDE_ATTENTION,
        **WIDE_MAMBA2,
        "num_local_experts": 8,
        "shared_intermediate_size": 256,
        "layer_types": FOUR,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_attention_heads": 8,
        "n_mamba_heads": 16,
        "mamba_d_state": 64,
        "mamba_ngroups": 1,
        "chunk_size": 64,
    },
    "mamba": {"state_size": 16, "time_step_rank": 32},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 32},
    "jamba": {
        **WIDE_ATTENTION,
        "num_experts": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "mamba_d_state": 16,
        "mamba_dt_rank": 32,
    },
    "minimax": {
        **WIDE_ATTENTION,
        "head_dim": 64,
        "num_local_experts": 8,
        "block_size": 64,
        "layer_types": FOUR,
    },
    "lfm2": {**WIDE_ATTENTION, "layer_types": ["conv"] * 3 + ["full_attention"]},
    "lfm2_moe": {
        **WIDE_ATTENTION,
        "num_experts": 8,
        "moe_intermediate_size": 256,
        "layer_types": ["conv"] * 3 + ["full_attention"],
    },
    "lfm3": {
        **WIDE_ATTENTION,
        "head_dim": 64,
        "sliding_window": 256,
        "layer_types": ["conv"] * 3 + ["sliding_attention"],
    },
    "inkling_text": {
        **WIDE_ATTENTION,
        **{"head_dim": 64, "swa_head_dim": 64, "d_rel": 16, "rel_extent": 256},
        **{"swa_num_attention_heads": 8, "swa_num_key_value_heads": 2, "sliding_window_size": 256},
        **{"n_routed_experts": 8, "moe_intermediate_size": 256},
    },
    "inkling2_text": {
        **WIDE_ATTENTION,
        **{"head_dim": 64, "swa_head_dim": 64, "d_rel": 16, "rel_extent": 256},
        **{"swa_num_attention_heads": 8, "swa_num_key_value_heads": 2, "sliding_window_size": 256},
        **{"n_routed_experts": 8, "moe_intermediate_size": 256, "unpadded_vocab_size": 4096},
        "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
    },
    "zaya": {
        **WIDE_ATTENTION,
        **{"head_dim": 64, "num_experts": 8, "router_hidden_size": 64},
        "moe_intermediate_size": 256,
    },
    "bailing_hybrid": {
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64},
        **{"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64},
        **{"num_local_experts": 8, "moe_intermediate_size": 256},
        "layer_types": FOUR,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    },
    "zamba": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "mamba_d_state": 16,
        "mamba_dt_rank": 32,
    },
    "recurrent_gemma": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "lru_width": 512,
        "attention_window_size": 256,
    },
    "rwkv": {"intermediate_size": 2048},
    "xlstm": {"embedding_dim": 512, "num_blocks": 4, "num_heads": 8, "chunk_size": 64},
}
"""Options that are different in a wide model, by model type."""


def wide(model_type: str) -> dict[str, Any]:
    """The configuration of a wide model."""
    return {**TINY[model_type], **WIDE_SIZES, **WIDE[model_type]}


BIASES = (
    *("use_bias", "use_conv_bias", "conv_bias", "attention_bias", "mlp_bias", "lm_head_bias"),
    *("mamba_conv_bias", "mamba_proj_bias", "projectors_bias", "add_bias_linear"),
)
"""Settings that give layers a bias, by their names in any configuration."""


def biased_model(model_type: str) -> Any:
    """Return a tiny model with every bias that its configuration has, of 0.5 each, at random."""
    import transformers

    own = transformers.AutoConfig.for_model(model_type, **TINY[model_type])
    biases = {name: True for name in BIASES if hasattr(own, name)}
    config = transformers.AutoConfig.for_model(model_type, **{**TINY[model_type], **biases})
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model.eval()


def save_model(
    configuration: dict[str, Any],
    model_type: str,
    folder: Path,
    auto: str = "AutoModelForCausalLM",
) -> None:
    """A model with random weights, all of which matter to the outputs, as the hub has them."""
    import transformers

    torch.manual_seed(0)
    parsed = transformers.AutoConfig.for_model(model_type, **configuration)
    model: Any = getattr(transformers, auto).from_config(parsed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


def tie_experts(folder: Path, apart: float) -> None:
    """Give experts 2 n and 2 n + 1 of every router in a folder nearly the same scores."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    routers = [name for name in weights if name.endswith((".gate.weight", "correction_bias"))]
    assert routers
    torch.manual_seed(1)
    for name in routers:
        rows = weights[name]
        near = apart * torch.randn_like(rows[::2]) if rows.dim() > 1 else 0.0
        rows[1::2] = rows[::2] + near
    save_file(weights, file, {"format": "pt"})
