"""Mamba, and FalconMamba, which normalises dt, B and C."""

from __future__ import annotations

from collections.abc import Iterable

from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.recipes import MAMBA, Recipe, named
from linexport.system.json_object import JsonObject

ARCHITECTURES = ("mamba",)

_OUTER = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm.weight": "norm.weight",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_dt.weight": "mixer.dt_proj.weight",
    "ssm_dt.bias": "mixer.dt_proj.bias",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_in.bias": "mixer.in_proj.bias",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_out.bias": "mixer.out_proj.bias",
    "ssm_x.weight": "mixer.x_proj.weight",
}


def configuration(file: GgufFile) -> JsonObject:
    """Return the settings of MambaForCausalLM or FalconMambaForCausalLM."""
    kind, name = (
        ("falcon_mamba", "FalconMamba") if file.get("ssm.dt_b_c_rms") else ("mamba", "Mamba")
    )
    width, inner = file.need("embedding_length"), file.need("ssm.inner_size")
    return {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "hidden_size": width,
        "intermediate_size": inner,
        "expand": inner // width,
        "num_hidden_layers": file.layers,
        "state_size": file.need("ssm.state_size"),
        "conv_kernel": file.need("ssm.conv_kernel"),
        "time_step_rank": file.need("ssm.time_step_rank"),
        "layer_norm_epsilon": file.need("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
        "use_bias": "blk.0.ssm_in.bias" in file.tensors,
    }


def recipes(file: GgufFile) -> Iterable[Recipe]:
    """Return the weights."""
    return named(file, _OUTER, _INNER, MAMBA, "backbone.layers.{}.")
