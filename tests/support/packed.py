"""Formulations with query, key and value packed into one input, exported once each."""

from __future__ import annotations

from functools import cache

import onnx
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.loaded_model import LoadedModel, Source
from linexport.trace import trace
from tests.support import formulations


class Packed(nn.Module):
    """A formulation on query, key and value side by side, so that their lengths are one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.formulation = find(name)
        torch.manual_seed(0)
        self.inner = self.formulation.build().eval()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 3 * WIDTH), or (B, T, WIDTH) where the module projects."""
        parts = x.chunk(3, -1) if self.formulation.inputs == 3 else (x,)
        return self.inner(*parts)

    def example(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """A standard normal input."""
        generator = torch.Generator().manual_seed(seed)
        width = formulations.WIDTH * self.formulation.inputs
        return torch.randn(batch, length, width, generator=generator)


def find(name: str):
    """The formulation of that name."""
    s = formulations
    tables = (s.CAUSAL, s.BIDIRECTIONAL, s.OTHER, s.SEPARATE, s.COLLECTED)
    return next(t[name] for t in tables if name in t)


@cache
def exported(name: str) -> tuple[Packed, onnx.ModelProto]:
    """A formulation with the graph it is exported to, with dynamic batch and length."""
    module = Packed(name)
    example = (module.example(2, module.formulation.length),)
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    source = Source("factory", name, None, name)
    loaded = LoadedModel(module, example, {}, dynamic, source)
    return module, trace(loaded).model
