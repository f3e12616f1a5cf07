"""Layers of near and far attention: against float64 over all pairs, streamed, exported, trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from linexport import models
from linexport.errors import UsageError
from linexport.models.window_attention import WindowedAttention, WindowedConfig
from tests.support.near_far import heads_first, near_far

pytestmark = pytest.mark.usefixtures("one_thread")


def layer(**changes: Any) -> WindowedAttention:
    torch.manual_seed(0)
    config = {"dim": 12, "num_heads": 4, "kv_heads": 2, "head_dim": 6, "window": 5, **changes}
    found = WindowedAttention(WindowedConfig(**config)).double()
    torch.nn.init.normal_(found.far_gain)
    return found


def defined(attention: WindowedAttention, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    phi, spec = attention.feature_map, attention.window
    packed = attention.query(x), attention.key(x), attention.value(x)
    features = (phi(packed[0], 4, "query"), phi(packed[1], 2, "key"))
    q, k, v = (heads_first(y, h) for y, h in zip(packed, (4, 2, 2), strict=True))
    phis = (heads_first(features[0], 4), heads_first(features[1], 2))
    gain = attention.far_gain.detach().numpy()
    shown = None if mask is None else mask.numpy()
    found = near_far(q, k, v, phis, spec.window, spec.sinks, gain, shown)
    return attention.output(torch.from_numpy(found).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["elu1", "taylor2", "hedgehog", "favor+", "softmax"])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_is_one_ratio_over_all_pairs(kind: str, sinks: int, masked: bool) -> None:
    attention = layer(feature_map=kind, sinks=sinks, value_dim=3)
    x = torch.randn(2, 31, 12, dtype=torch.float64)
    mask = torch.rand(2, 31) < 0.8 if masked else None
    with torch.no_grad():
        torch.testing.assert_close(attention(x, mask)[0], defined(attention, x, mask))


def test_a_window_of_all_tokens_is_softmax_attention() -> None:
    attention = layer(window=64)
    x = torch.randn(2, 40, 12, dtype=torch.float64)
    q, k, v = (
        f(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        for f in (attention.query, attention.key, attention.value)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    with torch.no_grad():
        torch.testing.assert_close(
            attention(x)[0], attention.output(expected.transpose(1, 2).flatten(2))
        )


def test_scores_in_the_thousands_and_far_below_zero_have_finite_outputs() -> None:
    attention = layer(window=3, sinks=1)
    for factor in (200.0, -200.0):
        attention.key.weight.data = factor * attention.query.weight.data[:12]
        x = torch.randn(1, 20, 12, dtype=torch.float64)
        with torch.no_grad():
            output = attention(x)[0]
        assert output.isfinite().all()
        torch.testing.assert_close(output, defined(attention, x, None))


def test_states_of_constant_size_stream_4200_tokens() -> None:
    torch.manual_seed(0)
    config = {"dim": 16, "num_heads": 4, "kv_heads": 2, "layers": 2}
    model = models.build("language_model", {**config, "attention": "window", "sinks": 2})
    model.eval()
    with torch.no_grad():
        for block in model.blocks:  # type: ignore[union-attr]
            block.attention.far_gain.normal_()
    tokens = torch.randint(256, (1, 4200))
    with torch.no_grad():
        whole = model(tokens)
        state = model.initial_state(1)  # type: ignore[operator]
        sizes = [x.shape for x in state[0].attention]
        parts = []
        for piece in tokens.split([1, 1, 700, 64, 63, 1, 3370], 1):
            part, state = model.step(piece, state)  # type: ignore[operator]
            parts.append(part)
            assert [x.shape for x in state[0].attention] == sizes
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_formula() -> None:
    attention = layer(window=3, sinks=1)
    x = torch.randn(1, 9, 12, dtype=torch.float64, requires_grad=True)
    parameters = [attention.query.weight, attention.far_gain]

    def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return attention(x)[0]

    assert torch.autograd.gradcheck(run, (x, *parameters))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feature_map": "trigonometric"}, "kernel that can be negative"),
        ({"update_rule": "gated"}, "update_rule 'gated'"),
        ({"num_heads": 1}, "2 key/value heads for 1"),
    ],
)
def test_settings_that_have_no_such_form_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        layer(**changes)
    with pytest.raises(UsageError, match="causal"):
        WindowedAttention(WindowedConfig(dim=8, num_heads=2), causal=False)


def test_layers_of_a_stack_choose_their_own_window() -> None:
    config = {"dim": 16, "num_heads": 4, "layers": 3, "attention": "window"}
    own = [{"window": 7}, {"attention": "softmax"}, {"sinks": 2, "attention": "window"}]
    model = models.build("language_model", {**config, "per_layer": own})
    first, _, last = (block.attention for block in model.blocks)  # type: ignore[union-attr]
    assert (first.window.window, last.window.window, last.window.sinks) == (7, 64, 2)
    with pytest.raises(UsageError, match="unknown key 'window'"):
        refused = [{"attention": "linear", "window": 3}, {}, {}]
        models.build("language_model", {**config, "per_layer": refused})
    np.testing.assert_equal(model(torch.zeros(1, 5, dtype=torch.long)).shape, (1, 5, 256))
