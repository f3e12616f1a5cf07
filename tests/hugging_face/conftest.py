"""Tiny models of every family, with random weights, in folders as the hub has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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

FAMILIES: dict[str, dict[str, Any]] = {
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
        "kv_lora_rank": 8,
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
}
"""Configuration by model type."""


def save_model(model_type: str, folder: Path, **changes: Any) -> None:
    """A model of that type with random weights, all of which matter to the outputs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **changes})
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * noise)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_folder(model_type, **changes)``: such a folder, made once; change copies only."""
    made: dict[str, Path] = {}

    def folder(model_type: str, **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            save_model(model_type, made[key], **changes)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def converted_family(
    model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """``converted_family(model_type)``: its artifact, made once, and the manifest of it."""
    import linexport

    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def convert(model_type: str) -> tuple[Path, dict[str, Any]]:
        if model_type not in made:
            place = tmp_path_factory.mktemp("artifacts") / model_type
            source = model_folder(model_type)
            made[model_type] = place, linexport.convert(source, place, bench=False, threads=1)
        return made[model_type]

    return convert


@pytest.fixture(scope="session")
def families() -> dict[str, dict[str, Any]]:
    """Configuration of every family, by model type."""
    return FAMILIES
