"""Models from PyPI, tiny and seeded, each a factory as a user writes it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.export import Dim

Made = tuple[nn.Module, tuple[torch.Tensor, ...], Any]

DYNAMIC = Dim.DYNAMIC
IMAGE = {0: DYNAMIC, 2: DYNAMIC, 3: DYNAMIC}
SEQUENCE = {0: DYNAMIC, 1: DYNAMIC}


class _Stand(type):
    """A class whose attributes are names: what timm reads of torchvision's enumerations."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Module(types.ModuleType):
    """A module that has a class of every name, save for those Python itself asks modules for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Stand(name, (nn.Module,), {})


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """In place of torchvision, which timm imports for loading data and never runs in a model."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _timm(name: str) -> nn.Module:
    try:
        import torchvision  # noqa: F401
    except Exception:
        finder = _Torchvision()
        sys.meta_path.insert(0, finder)
        try:
            import timm
        finally:
            # Other packages ask whether torchvision is there, and should hear that it is not.
            sys.meta_path.remove(finder)
            for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
    else:
        import timm
    return timm.create_model(name)


class Positional(nn.Module):
    """A module that is called with keywords, called by position."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def efficientvit() -> Made:
    return _timm("efficientvit_b0"), (torch.randn(2, 3, 64, 96),), (IMAGE,)


def mobilevitv2() -> Made:
    return _timm("mobilevitv2_050"), (torch.randn(2, 3, 64, 64),), ({0: DYNAMIC},)


def swiftformer() -> Made:
    return _timm("swiftformer_xs"), (torch.randn(2, 3, 64, 64),), ({0: DYNAMIC},)


def sana_attention() -> Made:
    from diffusers.models.attention_processor import Attention, SanaLinearAttnProcessor2_0

    processor = SanaLinearAttnProcessor2_0()
    module = Attention(query_dim=32, heads=4, dim_head=8, bias=False, processor=processor)
    return Positional(module), (torch.randn(2, 16, 32),), (SEQUENCE,)


def sana_transformer() -> Made:
    from diffusers import SanaTransformer2DModel

    module = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=8,
        patch_size=1,
    )

    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor, text: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.module(x, text, t, return_dict=False)[0]

    args = (torch.randn(2, 4, 8, 8), torch.randn(2, 5, 8), torch.rand(2))
    return Denoise(), args, (IMAGE, SEQUENCE, {0: DYNAMIC})


def _decoder() -> nn.Module:
    from diffusers import AutoencoderDC

    blocks = ("ResBlock", "EfficientViTBlock")
    module = AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    return Positional(module.decoder)


def dcae_linear() -> Made:
    """More pixels than a head is wide: its linear side."""
    return _decoder(), (torch.randn(2, 4, 12, 12),), (IMAGE,)


def dcae_quadratic() -> Made:
    """Fewer: its quadratic side."""
    return _decoder(), (torch.randn(2, 4, 2, 2),), ({0: DYNAMIC},)


def loftr_attention() -> Made:
    """With masks of queries and keys."""
    from kornia.feature.loftr.loftr_module.linear_attention import LinearAttention

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.project = LinearAttention(), nn.Linear(32, 96)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(2)
            return self.attention(q, k, v, keep, keep)

    args = (torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.bool))
    return Masked(), args, (SEQUENCE, SEQUENCE)


def loftr_transformer() -> Made:
    from kornia.feature.loftr.loftr_module.transformer import LocalFeatureTransformer

    names = ["self", "cross"]
    config = {"d_model": 32, "nhead": 4, "layer_names": names, "attention": "linear"}
    args = (torch.randn(2, 16, 32), torch.randn(2, 20, 32))
    return LocalFeatureTransformer(config), args, (SEQUENCE, SEQUENCE)


def performer() -> Made:
    from performer_pytorch import SelfAttention

    module = SelfAttention(dim=32, heads=4, dim_head=8, causal=False, nb_features=16)
    return Positional(module), (torch.randn(2, 16, 32),), (SEQUENCE,)


def linear_transformer() -> Made:
    from linear_attention_transformer import LinearAttentionTransformer

    module = LinearAttentionTransformer(dim=32, heads=4, depth=2, max_seq_len=256, causal=False)
    return Positional(module), (torch.randn(2, 16, 32),), (SEQUENCE,)
