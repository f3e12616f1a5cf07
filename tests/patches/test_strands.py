"""A bidirectional Mamba for both strands of DNA, of Caduceus's kind, as code of a user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import linexport
from linexport.sources.factory import load_factory

pytestmark = pytest.mark.usefixtures("one_thread")

COMPLEMENT = [0, 1, 2, 3, 7, 6, 5, 4]
"""Of each token: A and T, C and G belong together; others stand for themselves."""

CODE = f"""
import torch
from torch import nn
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.ops.triton.layernorm import RMSNorm


class BiMamba(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mamba_fwd, self.mamba_rev = Mamba(width, d_state=4), Mamba(width, d_state=4)
        self.mamba_rev.in_proj.weight = self.mamba_fwd.in_proj.weight
        self.mamba_rev.out_proj.weight = self.mamba_fwd.out_proj.weight

    def forward(self, x):
        return self.mamba_fwd(x) + self.mamba_rev(x.flip(1)).flip(1)


class Strands(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        one, other = x.chunk(2, -1)
        return torch.cat([self.inner(one), self.inner(other.flip(1, 2)).flip(1, 2)], -1)


class Dna(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(8, width)
        self.norm, self.mixer = Strands(RMSNorm(width)), Strands(BiMamba(width))
        self.register_buffer("complement", torch.tensor({COMPLEMENT}))

    def forward(self, input_ids):
        other = self.embedding(self.complement[input_ids].flip(1)).flip(1, 2)
        x = torch.cat([self.embedding(input_ids), other], -1)
        one, other = (x + self.mixer(self.norm(x))).chunk(2, -1)
        return (one + other.flip(2)).mean(1) / 2


def build():
    return Dna().eval(), (torch.randint(4, 8, (2, 20)),)
"""


def test_both_strands_have_one_vector(tmp_path: Path) -> None:
    file = tmp_path / f"dna_{tmp_path.name}.py"
    file.write_text(CODE)
    source = f"{file}:build"
    manifest = linexport.convert(source, stand_ins=True, output=tmp_path / "out", bench=False)
    assert manifest.status == "ok"
    assert manifest.fused["LinearAttention"] == 4  # two directions of two strands
    net, run = load_factory(source, seed=0, stand_ins=True).module, manifest.load().run
    for tokens in (1, 7, 33):
        ids = np.random.default_rng(tokens).integers(4, 8, (3, tokens))
        (found,) = run(ids).values()
        (other,) = run(np.asarray(COMPLEMENT)[ids[:, ::-1]]).values()
        np.testing.assert_allclose(other, found, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            np.testing.assert_allclose(net(torch.from_numpy(ids)), found, rtol=1e-4, atol=1e-6)
