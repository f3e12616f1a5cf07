"""Configurations of tiny models that see images, by model type."""

from __future__ import annotations

from typing import Any

from tests.support.families import TINY

IMAGE = 60
PLACES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
QWEN_VISION = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
    **{"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
}
ROTARY = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
WITH_PICTURES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        # 16 rotary channels, so that time, height and width have several each.
        "text_config": {
            **TINY["qwen3_5_text"],
            "head_dim": 32,
            "rope_parameters": {**ROTARY, "mrope_section": [3, 3, 2]},
        },
        "vision_config": QWEN_VISION,
        **dict(zip(PLACES, range(IMAGE, IMAGE + 4), strict=True)),
    },
    "qwen3_5_moe": {
        "text_config": TINY["qwen3_5_moe_text"],
        "vision_config": QWEN_VISION,
        **dict(zip(PLACES, range(IMAGE, IMAGE + 4), strict=True)),
    },
    "lfm2_vl": {
        "text_config": TINY["lfm2"],
        "vision_config": {
            **{"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
            **{"num_patches": 16, "vision_use_head": False},
        },
        **{"image_token_id": IMAGE, "projector_hidden_size": 40, "downsample_factor": 2},
    },
}
