"""Modules of packages for which nothing in linexport was written: none has a swapped function."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.support.third_party.registry import (
    WIDTH,
    Projected,
    empty_modules,
    heads,
    module,
)


@contextmanager
def _folder_of(package: str) -> Iterator[None]:
    """Let imports find the modules of a package by themselves."""
    found = importlib.util.find_spec(package)
    places = list((found.submodule_search_locations if found else None) or ())
    sys.path[:0] = places
    try:
        yield
    finally:
        del sys.path[: len(places)]


@module("mamba-stock", "mamba_stock")
def stock_mamba() -> nn.Module:
    with _folder_of("mamba_stock"):  # it imports its other module so
        from mamba_stock.mamba import MambaBlock, MambaConfig

    return MambaBlock(MambaConfig(d_model=WIDTH, n_layers=1, d_state=4))


@module("griffin-torch", "griffin_torch")
def griffin_recurrence() -> nn.Module:
    with empty_modules("zeta", "zeta.nn") as layers:
        vars(layers)["FeedForward"] = None
        from griffin_torch.main import RGLRU

    return RGLRU(WIDTH, 1)


@module("astrohebbian", "astrohebbian")
def astrocyte_attention() -> nn.Module:
    from astrohebbian.causal import CausalAstrocyteHebbianAttention

    return CausalAstrocyteHebbianAttention(WIDTH, 2, gradient_mode="surrogate")


@module("leetDecoding", "leetDecoding")
def decoding_by_tokens() -> nn.Module:
    from leetDecoding.methods.causal_dot_product_torch import causal_dot_product_torch

    gamma = torch.tensor([0.9, 0.8])

    def cell(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = causal_dot_product_torch(*map(heads, (q, k, v)), gamma.to(q.dtype))
        return found.transpose(1, 2).flatten(2)

    return Projected(cell, 16, 16, 16)


@module("rwkv7-hf", "rwkv7_hf")
def rwkv7_recurrence() -> nn.Module:
    from rwkv7_hf.ops_rwkv7 import rwkv7_recurrent

    def cell(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        r, w, k, v, a = (x.unflatten(-1, (2, 8)) for x in (r, w, k, v, a))
        k, a, w = nn.functional.normalize(k, dim=-1), a.sigmoid(), (-0.6 * w.sigmoid()).exp()
        state = r.new_zeros(r.shape[0], 2, 8, 8)
        return rwkv7_recurrent(r, w, k, v, -k, k * a, state)[0].flatten(2)

    return Projected(cell, 16, 16, 16, 16, 16)


@module("mamba3-ssm", "mamba3_ssm")
def mamba3_layer() -> nn.Module:
    from mamba3_ssm.layer import Mamba3

    return Mamba3(WIDTH, d_state=8, headdim=8)


@module("mamba3-ssm", "mamba3_ssm")
def mamba3_of_two_ranks() -> nn.Module:
    from mamba3_ssm.layer import Mamba3

    return Mamba3(WIDTH, d_state=8, headdim=8, is_mimo=True, mimo_rank=2)


@module("samovar-var", "samovar")
def dynamic_autoregression() -> nn.Module:
    with _folder_of("samovar"):  # the package itself imports pandas
        from layers import LinearVARAttention

    return LinearVARAttention(WIDTH, 2)


@module("torch-dimensions", "torch_dimensions")
def selective_scan_reference() -> nn.Module:
    from torch_dimensions._vendor.mamba.mamba_simple import Mamba

    return Mamba(WIDTH, d_state=4)


@module("torch-dimensions", "torch_dimensions", unit=16)
def mamba2_listing() -> nn.Module:
    from torch_dimensions._vendor.mamba.ssd_minimal import ssd_minimal_discrete

    def cell(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x, b, c = (t.unflatten(-1, (2, 8)) for t in (x, b, c))
        return ssd_minimal_discrete(x, -nn.functional.softplus(a), b, c, 16)[0].flatten(2)

    return Projected(cell, 16, 2, 16, 16)


class _Stepped(nn.Module):
    """A cell that keeps its state between the tokens of one call."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        self.cell.zero_states()
        return torch.stack([self.cell(x[:, t]) for t in range(x.shape[1])], 1)


@module("tracetorch", "tracetorch")
def trace_of_one_state() -> nn.Module:
    from tracetorch.ssm import S5

    return _Stepped(S5(WIDTH, 8))


@module("tracetorch", "tracetorch")
def trace_of_selected_states() -> nn.Module:
    from tracetorch.ssm import S6

    return _Stepped(S6(WIDTH, 8))
