"""Layers of transformers in a model of the user's own are swapped as in the library's models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.export import Dim
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import linexport
from linexport.sources.factory import load_module
from tests.support.independent import check_independently

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.services]

WIDTH = 16


class Normed(nn.Module):
    """A layer of tokens (B, T, 16) behind a norm, beside the tokens themselves."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


def scan() -> nn.Module:
    sizes = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}
    return Mamba2Mixer(transformers.Mamba2Config(hidden_size=WIDTH, **sizes), 0)


def gated_delta_rule() -> nn.Module:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "hidden_size": WIDTH}
    config = transformers.Qwen3NextConfig(
        **heads, **widths, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    return Qwen3NextGatedDeltaNet(config, 0)


@pytest.mark.parametrize("layer", [scan, gated_delta_rule])
def test_a_layer_is_fused_and_streams(layer: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Normed(layer()).eval()
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    source = load_module((module, (torch.randn(2, 16, WIDTH),), dynamic), "own:model")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.fused == {"CausalConvWithState": 1, "LinearAttention": 1}
    assert manifest.streaming.passed
    check_independently(tmp_path / "artifact", module, WIDTH, lengths=(1, 7, 130))
