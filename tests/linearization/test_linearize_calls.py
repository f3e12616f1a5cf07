"""Softmax attention is found wherever it is called, with its mask understood or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization.find_softmax import Site, find_sites
from linexport.linearization.replace import shared_copy
from linexport.models import attention_masks
from linexport.models.multihead_attention import Multihead
from linexport.models.softmax_calls import Attending

DIM, HEADS, LENGTH = 16, 2, 6


class Attend(nn.Module):
    """q, k and v of one layer, and whatever else F.scaled_dot_product_attention is given."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.arguments = arguments

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        o = F.scaled_dot_product_attention(q, k, v, **self.arguments)
        return self.out(o.transpose(1, 2).flatten(2))


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, LENGTH, DIM, generator=torch.Generator().manual_seed(0))


def one(module: nn.Module, *args: Tensor) -> Site:
    (site,) = find_sites(shared_copy(module.eval()), [args or (rows(),)])
    return site


def test_a_call_in_any_module_is_found_with_its_sizes_and_projection() -> None:
    site = one(nn.Sequential(nn.LayerNorm(DIM), Attend(is_causal=True, scale=0.3)))
    assert (site.name, site.projection) == ("1", "1.out.weight")
    assert (site.heads, site.kv_heads, site.head_dim, site.value_dim) == (2, 2, 8, 8)
    assert (site.causal, site.scale, site.cross, site.memory) == (True, 0.3, False, False)
    assert site.replaceable


def test_it_is_found_in_an_exported_program() -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Attend().eval(), (rows(),), dynamic_shapes=shapes)
    (site,) = find_sites(shared_copy(program.module()), [(rows(),)])
    assert site.projection == "out.weight" and site.replaceable


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_torch_call_it_even_where_torch_would_fuse_them(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, norm_first=norm_first, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    copy, seen = shared_copy(encoder), []
    with torch.no_grad(), Attending(lambda at, call: seen.append(at) or call.softmax()):
        got = copy(rows())
    assert seen == [0, 1]
    torch.testing.assert_close(got, encoder(rows()))


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": torch.arange(LENGTH) >= torch.tensor([[6], [4], [3], [5]])},
    "causal": {"attn_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH)},
    "hidden": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)},
    "by head": {"attn_mask": torch.zeros(4 * HEADS, LENGTH, LENGTH)},
}
MASKS["both"] = MASKS["padding"] | MASKS["hidden"]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_torchs_own(name: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first).eval()
    ours = shared_copy(layer)
    assert type(ours) is Multihead and ours.in_proj_weight is layer.in_proj_weight
    x = rows() if batch_first else rows().transpose(0, 1)
    torch.testing.assert_close(ours(x, x, x, **MASKS[name])[0], layer(x, x, x, **MASKS[name])[0])


def test_multihead_cross_attention_of_other_widths_is_torchs_own() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(DIM, HEADS, kdim=5, vdim=7, bias=False, batch_first=True).eval()
    memory = torch.randn(4, 9, 5), torch.randn(4, 9, 7)
    torch.testing.assert_close(
        shared_copy(layer)(rows(), *memory)[0], layer(rows(), *memory, need_weights=False)[0]
    )


def test_masks_of_keys_and_causal_ones_are_understood() -> None:
    keys = torch.arange(LENGTH) < torch.tensor([6, 4, 3, 5])[:, None]
    earlier = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert attention_masks.understood(keys[:, None, None], LENGTH, LENGTH) == "keys"
    assert attention_masks.understood(keys[:, None, None] & earlier, LENGTH, LENGTH) == "causal"
    additive = torch.where(earlier, 0.0, torch.finfo(torch.float32).min)
    assert attention_masks.understood(additive, LENGTH, LENGTH) == "causal"
    found = attention_masks.key_mask(keys[:, None, None] & earlier, 4, LENGTH)
    assert torch.equal(found, keys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attn_mask": -torch.arange(LENGTH).float()[None]}, "bias"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)}, "window"),
        ({"attn_mask": torch.tensor([True, False])[:, None, None] | torch.eye(6).bool()}, "head"),
        ({"dropout_p": 0.1}, "drops 10% of its weights"),
    ],
)
def test_what_no_feature_map_can_be_is_refused(arguments: dict[str, Any], words: str) -> None:
    site = one(Attend(**arguments))
    assert site.reason is not None and words in site.reason


def test_a_module_without_softmax_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="calls no softmax attention"):
        one(nn.Linear(DIM, DIM))

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    with pytest.raises(UnsupportedModelError, match="attention: it adds a key of its own"):
        one(Added())


def test_data_that_the_module_does_not_take_is_refused_with_its_shapes() -> None:
    with pytest.raises(UsageError, match=r"float32 \(4, 3\).*arguments of its forward"):
        one(Attend(), torch.randn(4, 3))
