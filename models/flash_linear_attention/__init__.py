"""Causal language models of flash-linear-attention checkpoints, on linexport's functions.

That library runs on Triton kernels only: without a GPU it does not even import, or fails in its
first kernel. Here its published layouts (config.json, weights by name) are modules of ordinary
PyTorch, one file per model type, found by scanning this folder: a module with ``LAYOUT``. Settings
that change what is computed are read from the configuration; one that is not known is refused.

    input_ids (B, T), attention_mask (B, T) -> logits (B, T, vocabulary)

A padded token reaches no other: it is zero before every convolution and leaves states as they are.
Padding belongs in front of a sequence, or behind its end.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from linexport.models.flash_linear_attention.base import CausalLM, WeightLayout

__all__ = ["OTHERS", "CausalLM", "WeightLayout", "build", "layouts"]

OTHERS = (
    "abc",
    "cat",
    "cyclic_flow_attention",
    "deltaformer",
    "forgetting_transformer",
    "log_linear_mamba2",
    "mesa_net",
    "moba",
    "mom",
    "nsa",
    "parallax",
    "path_attn",
    "precond_gated_deltanet",
    "precond_kda",
    "raven",
    "rodimus",
    "samba",
    "stickbreaking_attn",
    "wall_transformer",
    "yoco",
)
"""Model types of the library, version 0.6.0 and later ones, that there are no modules for here."""


@cache
def layouts() -> Mapping[str, WeightLayout]:
    """Every layout, by the model type configurations call it."""
    found = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        layout = getattr(importlib.import_module(f"{__name__}.{module.name}"), "LAYOUT", None)
        if isinstance(layout, WeightLayout):
            found[layout.model_type] = layout
    return found


def build(config: Mapping[str, Any]) -> CausalLM:
    """The model a configuration describes, with weights not yet loaded.

    Raises:
        UsageError: a setting is missing or of the wrong type.
        UnsupportedModelError: a setting asks for something that is not implemented here.
    """
    return CausalLM(layouts()[config["model_type"]], config)
