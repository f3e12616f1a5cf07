"""PyTorch reference models with linear attention, and the layers they are made of.

Importing this package registers the linexport operators with PyTorch, so that a trace with
``torch.export`` keeps them whole. Models and layers are imported when they are first used: those
who convert their own model need none of them.
"""

from typing import TYPE_CHECKING

from linexport.models import torch_ops as torch_ops
from linexport.system.first_use import on_first_use

if TYPE_CHECKING:
    from linexport.models.attention import AttentionConfig, AttentionState, LinearAttention
    from linexport.models.checkpoint import build, load, save
    from linexport.models.classifier import DigitClassifier
    from linexport.models.digit_memory import DigitMemory
    from linexport.models.digit_network import DigitNetwork
    from linexport.models.language_model import LanguageModel
    from linexport.models.linear_attention_layer import LinearAttentionLayer
    from linexport.models.registry import ReferenceModel, names
    from linexport.models.short_conv import ShortConv

__all__ = [
    "AttentionConfig",
    "AttentionState",
    "DigitClassifier",
    "DigitMemory",
    "DigitNetwork",
    "LanguageModel",
    "LinearAttention",
    "LinearAttentionLayer",
    "ReferenceModel",
    "ShortConv",
    "build",
    "load",
    "names",
    "save",
]

_HOMES = {
    **dict.fromkeys(("AttentionConfig", "AttentionState", "LinearAttention"), ".attention"),
    **dict.fromkeys(("build", "load", "save"), ".checkpoint"),
    "DigitClassifier": ".classifier",
    "DigitMemory": ".digit_memory",
    "DigitNetwork": ".digit_network",
    "LanguageModel": ".language_model",
    "LinearAttentionLayer": ".linear_attention_layer",
    **dict.fromkeys(("ReferenceModel", "names"), ".registry"),
    "ShortConv": ".short_conv",
}

__getattr__ = on_first_use(__name__, _HOMES)
