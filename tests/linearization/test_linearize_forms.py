"""Linear forms are what their kernels say, for every kind of attention, and export as they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.errors import ParityError
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.locality import masked
from linexport.models import feature_maps
from linexport.models.softmax_calls import Call
from linexport.sources import load_model

SITE = Site(
    index=0, name="attention", heads=4, kv_heads=4, head_dim=8, value_dim=5, scale=0.4,
    causal=False, masked=False, cross=False, length=7, keys=7,
)  # fmt: skip


def call(site: Site) -> Call:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, site.heads, site.length, site.head_dim, generator=g)
    k = torch.randn(2, site.kv_heads, site.keys, site.head_dim, generator=g)
    v = torch.randn(2, site.kv_heads, site.keys, site.value_dim, generator=g)
    mask = (torch.arange(site.keys) < torch.tensor([[site.keys], [4]]))[:, None, None]
    if site.causal:
        mask = mask & torch.ones(site.keys, site.keys, dtype=torch.bool).tril()
    return Call(q, k, v, mask if site.masked else None, 0.0, site.causal and not site.masked,
                site.scale, site.heads != site.kv_heads)  # fmt: skip


def from_kernel(site: Site, form: KernelAttention, given: Call) -> Tensor:
    """The definition: every pair's kernel, masked, normalised."""
    repeats = site.heads // site.kv_heads
    k, v = (x.repeat_interleave(repeats, 1).double() for x in (given.key, given.value))
    q = given.query.double() * site.scale * math.sqrt(site.head_dim)
    frozen = [x.double() for x in form.feature_map.frozen()]
    phi = form.feature_map
    scores = phi.phi(q, *frozen) @ phi.phi_key(k, *frozen).mT
    if given.attn_mask is not None:
        scores = scores * given.attn_mask
    elif site.causal:
        scores = scores.tril()
    return scores @ v / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["favor+", "taylor2", "elu1"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"causal": True},
        {"masked": True},
        {"causal": True, "masked": True},
        {"kv_heads": 2},
        {"cross": True, "keys": 11},
        {"cross": True, "keys": 11, "masked": True, "kv_heads": 2},
    ],
    ids=str,
)
def test_a_form_is_the_ratio_of_its_kernel(kind: str, change: dict[str, int]) -> None:
    site = replace(SITE, **change)  # type: ignore[arg-type]
    form = KernelAttention(site, feature_maps.make(kind, 8))
    given = call(site)
    with torch.no_grad():
        torch.testing.assert_close(
            form(given).double(), from_kernel(site, form, given), atol=1e-5, rtol=1e-4
        )


def test_many_features_come_near_to_softmax() -> None:
    site, given = SITE, call(SITE)
    given = replace(given, query=given.query / 2, key=given.key / 2)
    errors = []
    for features in (16, 2048):
        form = KernelAttention(site, feature_maps.make("favor+", 8, {"features": features}))
        with torch.no_grad():
            errors.append(float((form(given) - given.softmax()).norm() / given.softmax().norm()))
    assert errors[1] < 0.1 < errors[0]


def test_exact_masked_attention_sees_only_near_keys() -> None:
    given = call(SITE)
    torch.testing.assert_close(masked(given, 1e6), given.softmax())
    near = replace(given, key=given.query.clone(), value=given.value)
    torch.testing.assert_close(masked(near, 1e-3), given.value)


class Attend(nn.Module):
    def __init__(self, causal: bool = False, sharp: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.causal, self.sharp = causal, sharp

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (2, -1)).transpose(1, 2)
            for y in (self.sharp * self.q(x), *self.kv(x).chunk(2, -1))
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(o.transpose(1, 2).flatten(2))


DATA = torch.randn(40, 6, 16, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["favor+", "taylor2", "pseudo-keys"])
def test_a_saved_form_gives_what_pytorch_gives(kind: str, tmp_path: Path) -> None:
    found = linexport.linearize(Attend(kind == "favor+"), DATA, map=kind, bench=False, force=True)
    found.save(tmp_path / "linear.pt2")
    loaded = load_model(tmp_path / "linear.pt2")
    for length in (6, 9):
        x = torch.randn(3, length, 16)
        with torch.no_grad():
            torch.testing.assert_close(loaded.module(x), found.module(x))
    assert any("linexport" in str(node.target) for node in loaded.program.graph.nodes)  # type: ignore[union-attr]


def test_a_denominator_that_vanishes_on_the_data_is_refused_with_layer_and_map() -> None:
    with pytest.raises(
        ParityError,
        match=r"attention with the feature map 'trigonometric'.*zero or negative for \d+ of",
    ):
        linexport.linearize(Attend(sharp=30.0), DATA, map="trigonometric", bench=False)


def test_what_is_not_replaced_is_the_original_to_the_bit() -> None:
    module = nn.Sequential(Attend(), Attend(True)).eval()
    found = linexport.linearize(module, DATA, map={"*": "keep", "1": "taylor2"}, bench=False)
    with torch.no_grad():
        assert torch.equal(found.module.inner[0](DATA), module[0](DATA))
    assert [row.map for row in found.report.layers] == [None, "taylor2"]
    own = {id(x) for x in module.parameters()}
    new = [n for n, x in found.module.named_parameters() if id(x) not in own]
    assert new == ["forms.by_site.1.gain"]
