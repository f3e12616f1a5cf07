"""Forms with a window: what they are, how their gain is fitted, and that they stream and export."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport import models
from linexport.errors import UsageError
from linexport.graph.states import find_states
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.window_forms import WindowForm, best_gain, fit_far_gains
from linexport.models import feature_maps
from linexport.models.softmax_calls import Attending, Call
from linexport.sources import load_model
from linexport.token_flow import classify
from tests.support.near_far import near_far
from tests.support.pieces import in_pieces, largest_error, random_pieces, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

SITE = Site(
    index=0, name="attention", heads=4, kv_heads=2, head_dim=8, value_dim=5, scale=0.4,
    causal=True, masked=False, cross=False, length=19, keys=19,
)  # fmt: skip


def call(site: Site, masked: bool) -> Call:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, site.heads, site.length, site.head_dim, generator=g)
    k = torch.randn(2, site.kv_heads, site.keys, site.head_dim, generator=g)
    v = torch.randn(2, site.kv_heads, site.keys, site.value_dim, generator=g)
    shown = torch.arange(19) < torch.tensor([[19], [12]])
    mask = shown[:, None, None] & torch.ones(19, 19, dtype=torch.bool).tril()
    return Call(q, k, v, mask if masked else None, 0.0, not masked, site.scale, True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("kind", ["elu1", "taylor2", "favor+"])
def test_a_form_is_the_ratio_over_all_pairs(kind: str, sinks: int, masked: bool) -> None:
    form = WindowForm(SITE, feature_maps.make(kind, 8), 4, sinks)
    nn.init.normal_(form.far_gain)
    given = call(SITE, masked)
    q, k, v = (x.double().numpy() for x in (given.query, given.key, given.value))
    q = q * SITE.scale * math.sqrt(8)
    phi, frozen = form.feature_map, [x.double() for x in form.feature_map.frozen()]
    features = (
        phi.phi(torch.from_numpy(q), *frozen).numpy(),
        phi.phi_key(torch.from_numpy(k), *frozen).numpy(),
    )
    shown = None if given.attn_mask is None else given.attn_mask[:, 0, -1].numpy()
    gain = form.far_gain.detach().numpy()
    expected = near_far(q, k, v, features, 4, sinks, gain, shown)
    with torch.no_grad():
        np.testing.assert_allclose(form(given).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [KernelAttention, WindowForm])
def test_keys_that_a_call_repeats_for_every_head_are_taken_once(form: type[Any]) -> None:
    own = (4, 1) if form is WindowForm else ()
    made, given = form(SITE, feature_maps.make("elu1", 8), *own), call(SITE, False)
    key, value = (x.repeat_interleave(2, 1) for x in (given.key, given.value))
    with torch.no_grad():
        found = made(replace(given, key=key, value=value, enable_gqa=False))
        torch.testing.assert_close(found, made(given))


class Attend(nn.Module):
    """Causal attention of grouped heads with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.out = nn.Linear(16, 32), nn.Linear(32, 16)
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 0.2 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    sine, cosine = angle.sin(), angle.cos()
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


DATA = torch.randn(40, 30, 16, generator=torch.Generator().manual_seed(5))


def linearized(name: str, **options: Any) -> linexport.Linearization:
    return linexport.linearize(Attend(), DATA, map=name, bench=False, force=True, **options)


def test_a_longer_window_errs_less_and_one_of_all_tokens_not_at_all() -> None:
    errors = []
    for name in ("elu1", "window4+elu1", "window16+elu1", "window30+elu1"):
        (row,) = linearized(name).report.layers
        errors.append(row.attention_error)
        assert row.map == name
    assert all(a > b for a, b in itertools.pairwise(errors)), errors
    assert errors[-1] < 1e-6


def test_sinks_are_an_option_and_the_window_is_in_the_multiply_adds() -> None:
    (row,) = linearized("window4+elu1", map_options={"sinks": 2}).report.layers
    assert row.options == {"sinks": 2}
    (plain,) = linearized("elu1").report.layers
    (one,), (other,) = row.multiply_adds, plain.multiply_adds
    assert one.linear - other.linear == 4 * 30 * (4 + 2) * (8 + 8)


def test_the_gain_of_far_keys_is_found_again() -> None:
    """The true output is that of the form with other gains."""
    module = Attend().eval()
    known = torch.tensor([-2.0, 0.5, 1.0, 2.0])
    site = replace(SITE, value_dim=8, scale=8**-0.5, length=30, keys=30)
    form = WindowForm(site, feature_maps.make("elu1", 8), 4, 0)
    true = WindowForm(site, feature_maps.make("elu1", 8), 4, 0)
    true.far_gain.data = known

    seen = list[Call]()

    def record(index: int, found: Call) -> Tensor:
        seen.append(found)
        return found.softmax()

    with torch.no_grad(), Attending(record):
        module(DATA[:8])
    with torch.no_grad():
        found = best_gain(form.parts(seen[0]), true(seen[0]).double())
    assert (found - known).abs().max() <= 0.126
    fit_far_gains(module, (DATA[:8],), {0: form})
    assert (form.far_gain != 0).all()


def test_rotary_grouped_heads_with_sinks_stream_4100_tokens_by_constant_states() -> None:
    found = linearized("window16+elu1", map_options={"sinks": 2})
    model = rewritten(found.module, DATA[:2])
    states = find_states(model)
    assert not classify(model, states).mixing
    assert not [s for s in states if s.growing_axis is not None]
    x = torch.randn(1, 4100, 16)
    with torch.no_grad():
        expected = found.module.double()(x.double()).numpy()
    pieces = [1, 2, 13, 17, *random_pieces(3400, 500, 0)]
    for cuts in (pieces, [*[1] * 40, 4060]):
        assert largest_error(in_pieces(model, x.numpy(), cuts), expected) < 2e-5


def test_a_stack_keeps_its_class_and_its_checkpoint_has_windows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = {"dim": 16, "num_heads": 4, "kv_heads": 2, "layers": 2, "attention": "softmax"}
    model = models.build("language_model", config)
    tokens = torch.randint(256, (32, 40))
    found = linexport.linearize(
        model, tokens, map={"*": "keep", "blocks.1.*": "window8+taylor2"},
        map_options={"sinks": 1}, bench=False, force=True, distil=3,
    )  # fmt: skip
    found.save(tmp_path / "linear.pt")
    loaded = load_model(tmp_path / "linear.pt")
    own = loaded.module.config["per_layer"][1]  # type: ignore[index]
    assert (own["attention"], own["window"], own["sinks"]) == ("window", 8, 1)
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(tokens[:2]), found.module(tokens[:2]))
        assert (loaded.module.blocks[1].attention.far_gain != 0).all()  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("window0+elu1", {}, r"'window0\+elu1'; expected windowN\+MAP, with N from 1"),
        ("window-3+elu1", {}, r"'window-3\+elu1'; expected windowN\+MAP"),
        ("window4", {}, r"'window4'; expected windowN\+MAP"),
        ("window4+", {}, r"expected windowN\+MAP"),
        ("window+elu1", {}, r"expected windowN\+MAP"),
        ("window4+window2+elu1", {}, r"expected windowN\+MAP"),
        ("window65537+elu1", {}, "to 65,536 tokens"),
        (f"window{'9' * 5000}+elu1", {}, "to 65,536 tokens"),
        ("window4+elu2", {}, "Unknown feature map 'elu2'"),
        ("window4+trigonometric", {}, "kernel that can be negative"),
        ("window4+elu1", {"sinks": -1}, "sinks is -1"),
        ("window4+elu1", {"sinks": 10**6}, "sinks is 1000000; expected a .* from 0 to 65,536"),
        ("elu1", {"sinks": 1}, "unknown key 'sinks'"),
        ("window4+elu1", {"features": 3}, "unknown key 'features'"),
        ("window4+elu1", {"sink": 2}, "unknown key 'sink'.* A window has the option sinks"),
        ("elu1", {"sink": 2}, r"unknown key 'sink'\. It has no options\.$"),
    ],
)
def test_names_and_options_that_do_not_fit_are_refused(
    name: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        linearized(name, map_options=options)


def test_a_bidirectional_layer_is_named() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with pytest.raises(UsageError, match="self_attn is bidirectional: a window needs causal"):
        linexport.linearize(encoder, DATA, map="window4+elu1", bench=False)
