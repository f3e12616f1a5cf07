"""Weights and logits of the flash-linear-attention library itself, for the tests beside this.

    python tests/flash_linear_attention/reference.py FOLDER

makes one small model with random weights for each of ``configurations.json``, runs it, and writes
what came out. The library's kernels run in Triton's interpreter, so a GPU is not needed; that needs

    pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 einops==0.8.2 triton==3.7.1
    export MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE
    pip install --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import autotuner

# There is nothing to choose between in the interpreter, and nothing to time it with.
autotuner.Autotuner._bench = lambda self, *args, **kwargs: [1.0, 1.0, 1.0]

import mamba3_kernels  # noqa: E402  beside this file

mamba3_kernels.replace()

import fla  # noqa: E402  registers its models with transformers
import fla.ops.utils.op  # noqa: E402
import triton.language as tl  # noqa: E402
from fla.layers.gdn2 import GatedDeltaNet2  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

# The interpreter has none of the functions of a GPU's library.
fla.ops.utils.op.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x))

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


def model_of(settings: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the library's model and its configuration.

    It has the layer of ``gdn2`` alone: that is put in the place of those of ``kda``.
    """
    if settings["model_type"] != "gdn2":
        config = AutoConfig.for_model(**settings)
        return AutoModelForCausalLM.from_config(config), config.to_dict()
    config = AutoConfig.for_model(**{**settings, "model_type": "kda"})
    model = AutoModelForCausalLM.from_config(config)
    given = {**config.to_dict(), **settings}
    for index, block in enumerate(model.model.layers):
        arguments = inspect.signature(GatedDeltaNet2).parameters.keys() & given.keys()
        block.attn = GatedDeltaNet2(**{n: given[n] for n in arguments}, layer_idx=index)
    return model, given


def run(settings: dict[str, Any], ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Weights by name, and logits with and without padding."""
    torch.manual_seed(0)
    settings = {**SMALL, **RANKS.get(settings["model_type"], {}), **settings}
    model, config = model_of(settings)
    model = model.float().eval()
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
    return {**found, "config": np.array(json.dumps(config, sort_keys=True))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    tokens, keep = np.random.default_rng(0).integers(24, size=(3, 12)), np.ones((3, 12), np.int64)
    keep[1, :4] = 0
    keep[2, 9:] = 0
    for label, chosen in json.loads(CONFIGURATIONS.read_text()).items():
        np.savez_compressed(folder / f"{label}.npz", **run(chosen, tokens, keep))
