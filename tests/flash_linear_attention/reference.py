"""Weights and logits of the flash-linear-attention library itself, for the tests beside this.

    python tests/flash_linear_attention/reference.py FOLDER

makes one small model with random weights for each of ``configurations.json``, runs it, and writes
what came out. The library's kernels run in Triton's interpreter, so a GPU is not needed; that needs

    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2 triton==3.7.1
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import autotuner

# There is nothing to choose between in the interpreter, and nothing to time it with.
autotuner.Autotuner._bench = lambda self, *args, **kwargs: [1.0, 1.0, 1.0]

import fla  # noqa: E402, F401  registers its models with transformers
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

CONFIGURATIONS = Path(__file__).with_name("configurations.json")
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 24,
    "intermediate_size": 32,
    "fuse_cross_entropy": False,
}
RANKS = {
    "rwkv6": {"proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
    "rwkv7": dict.fromkeys(
        ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"), 4
    ),
}


def run(settings: dict[str, Any], ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Weights by name, and logits with and without padding."""
    torch.manual_seed(0)
    settings = {**SMALL, **RANKS.get(settings["model_type"], {}), **settings}
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Norms about 1, and every other weight large enough to matter.
            scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
            norm = "norm" in name and "bias" not in name
            weight.copy_(torch.randn_like(weight) * scale + norm)
        tokens, keep = torch.from_numpy(ids), torch.from_numpy(mask)
        whole = model(tokens, use_cache=False).logits
        padded = model(tokens, attention_mask=keep, use_cache=False).logits
    weights = {f"weight:{name}": t.numpy() for name, t in model.state_dict().items()}
    found = {"whole": whole.numpy(), "padded": padded.numpy(), "ids": ids, "mask": mask, **weights}
    return {**found, "config": np.array(json.dumps(config.to_dict(), sort_keys=True))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    tokens, keep = np.random.default_rng(0).integers(24, size=(3, 12)), np.ones((3, 12), np.int64)
    keep[1, :4] = 0
    keep[2, 9:] = 0
    for label, chosen in json.loads(CONFIGURATIONS.read_text()).items():
        np.savez_compressed(folder / f"{label}.npz", **run(chosen, tokens, keep))
