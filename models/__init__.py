"""PyTorch reference models with linear attention, and the layers they are made of.

Importing this package registers the linexport operators with PyTorch, so that what is traced
with ``torch.export`` keeps them whole.
"""

from linexport.models import torch_ops as torch_ops
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
