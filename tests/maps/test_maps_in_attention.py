"""Attention with every feature map: all forms of it agree, in PyTorch and as exported.

A map added to the folder is tested here without a line added to this file.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import linexport
from linexport import models, passes, targets, trace
from linexport.errors import UsageError
from linexport.graph import states
from linexport.models.attention import AttentionConfig, LinearAttention
from linexport.models.feature_maps import find_map, kinds
from linexport.models.linear_attention_layer import LinearAttentionLayer
from linexport.plugins.ops.stabilized_exp import LOWEST
from linexport.sources import LoadedModel, Source
from linexport.targets.lowering.choice import lower

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Feature map"),
]

KINDS = kinds()
CAUSAL = [kind for kind in KINDS if not find_map(kind).over_time]
EXPONENTIAL = [kind for kind in KINDS if find_map(kind).exponential]
WIDTH = 4


def options(kind: str) -> dict[str, Any] | None:
    """Few features, where there is a choice."""
    known = {f.name for f in fields(find_map(kind).Options)}
    if find_map(kind).exponential and "bandwidth" in known:
        # Exponents hardly larger than those of favor+, whose rounding is the limit of float32.
        return {"features": 12, "bandwidth": 20.0}
    return {"features": 12} if "features" in known else None


def layer(kind: str, causal: bool = True, **changes: Any) -> LinearAttentionLayer:
    """Four query heads on two key/value heads; normalised where the kernel is positive."""
    settings = {
        "num_heads": 4,
        "kv_heads": 2,
        "head_dim": WIDTH,
        "value_dim": 5,
        "feature_map": kind,
        "feature_map_options": options(kind),
        "causal": causal,
        "normalize": find_map(kind).kernel_positive,
        # Relative to the largest feature, not to 1, where exponents are stabilised.
        "eps": 0.0 if find_map(kind).exponential else 1e-6,
    }
    made = models.build("linear_attention_layer", {**settings, **changes})
    assert isinstance(made, LinearAttentionLayer)
    return made.eval()


def quadratic(made: LinearAttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """All pairs of tokens, from plain features: the definition."""
    phi, spec = made.feature_map, made.spec
    q = phi(query, spec.q_num_heads).unflatten(-1, (spec.q_num_heads, -1))
    k = phi(key, spec.kv_num_heads, "key").unflatten(-1, (spec.kv_num_heads, -1))
    v = value.unflatten(-1, (spec.kv_num_heads, -1))
    k, v = (x.repeat_interleave(spec.q_num_heads // spec.kv_num_heads, 2) for x in (k, v))
    scores = torch.einsum("bthm,bshm->bhts", q, k)
    if spec.causal:
        scores = scores.tril()
    output = torch.einsum("bhts,bshv->bthv", scores, v)
    if spec.normalize:
        output = output / (scores.sum(-1).transpose(1, 2)[..., None] + spec.eps)
    return output.flatten(2)


def assert_near(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Within a tolerance of the largest value, or of 1 where that is larger."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance * max(want.abs().max().item(), 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_layer_equals_all_pairs(kind: str, causal: bool) -> None:
    if causal and find_map(kind).over_time:
        pytest.skip("not a causal map")
    made = layer(kind, causal).double()
    for length in (1, 37, 130):
        x = [t.double() for t in made.example_inputs(2, length, seed=length)]
        assert_near(made(*x), quadratic(made, *x), 1e-10)


@pytest.mark.parametrize("kind", CAUSAL)
def test_whole_is_recurrent_is_chunked_is_streamed(kind: str) -> None:
    """One token at a time, chunks of several sizes, and random splits."""
    torch.manual_seed(0)
    config = AttentionConfig(
        dim=8,
        num_heads=4,
        kv_heads=2,
        head_dim=WIDTH,
        value_dim=3,
        feature_map=kind,
        feature_map_options=options(kind),
        normalize=find_map(kind).kernel_positive,
    )
    attention = LinearAttention(config).double()
    x = torch.randn(2, 90, 8, dtype=torch.float64)
    mask = torch.rand(2, 90) > 0.2
    mask[:, 0] = True
    whole, last = attention(x, mask)
    cuts = np.random.default_rng(0).choice(np.arange(1, 90), 6, replace=False)
    random = np.diff([0, *sorted(cuts), 90]).tolist()
    for sizes in ([1] * 90, [64, 26], [16] * 5 + [10], random):
        state, outputs = attention.initial_state(2), []
        for part, keep in zip(x.split(sizes, 1), mask.split(sizes, 1), strict=True):
            output, state = attention(part, keep, state)
            outputs.append(output)
        assert_near(torch.cat(outputs, 1), whole, 1e-10)
        for one, other in zip(state, last, strict=True):
            if other is not None:
                assert_near(one, other, 1e-10)


@pytest.mark.parametrize("decay_per_channel", [False, True])
@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_exponentials_under_a_gate(kind: str, decay_per_channel: bool) -> None:
    """A gate of its own and that of the maximum together."""
    torch.manual_seed(0)
    config = AttentionConfig(
        dim=8,
        num_heads=2,
        feature_map=kind,
        feature_map_options=options(kind),
        update_rule="gated",
        eps=0.0,
        decay_per_channel=decay_per_channel,
    )
    attention = LinearAttention(config).double()
    x = torch.randn(2, 40, 8, dtype=torch.float64)
    got, _ = attention(x)
    phi, heads = attention.feature_map, 2
    q = phi(attention.query(x), heads).unflatten(-1, (heads, -1))
    k = phi(attention.key(x), heads, "key").unflatten(-1, (heads, -1))
    v = attention.value(x).unflatten(-1, (heads, -1))
    g = torch.nn.functional.logsigmoid(attention.decay(x)).unflatten(-1, (heads, -1))
    total = g.cumsum(1)
    pairs = (total[:, :, None] - total[:, None]).exp().expand(-1, -1, -1, -1, k.shape[-1])
    scores = torch.einsum("bthm,bshm,btshm->bhts", q, k, pairs).tril()
    output = torch.einsum("bhts,bshv->bthv", scores, v)
    output = output / (scores.sum(-1).transpose(1, 2)[..., None] + config.eps)
    assert_near(got, attention.output(output.flatten(2)), 1e-10)


# As exported -------------------------------------------------------------------------------------


@cache
def traced(kind: str, causal: bool) -> tuple[LinearAttentionLayer, onnx.ModelProto]:
    """A layer and its graph of linexport ops, made once for all targets."""
    made = layer(kind, causal)
    source = Source("factory", "here", None, "a layer")
    example = made.example_inputs(2, 16, 0)
    loaded = LoadedModel(made, example, {}, made.dynamic_shapes(), source)
    return made, passes.run(trace.trace(loaded).model)


class Exported:
    """A layer on a target, as ``convert`` makes it; runs whole sequences and pieces of one."""

    def __init__(self, kind: str, causal: bool, target: str) -> None:
        self.layer, model = traced(kind, causal)
        chosen = targets.find_target(target)
        self.model, _ = lower(chosen.prepare(model), chosen.candidates)
        onnx.checker.check_model(self.model, full_check=True)
        self.states = states.find_states(self.model)
        self.session = chosen.open(self.model.SerializeToString(), threads=1)

    def start(self, batch: int) -> dict[str, np.ndarray]:
        return {s.past: s.start(batch) for s in self.states}

    def __call__(
        self, x: tuple[Tensor, ...], state: dict[str, np.ndarray] | None = None
    ) -> tuple[Tensor, dict[str, np.ndarray]]:
        feeds = dict(zip(("query", "key", "value"), (t.numpy() for t in x), strict=True))
        got = self.session.run({**feeds, **(state or self.start(x[0].shape[0]))})
        after = {s.past: got[s.present] for s in self.states}
        return torch.from_numpy(got["output"]), after


def allowed(made: LinearAttentionLayer, x: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The output in float64, and four times what float32 loses in PyTorch, or 2e-5."""
    single = made(*x)
    want = made.double()(*(t.double() for t in x))
    made.float()
    return want, max(2e-5 * want.abs().max().item(), 4 * (single - want).abs().max().item())


@pytest.mark.parametrize("target", [pytest.param("onnx", marks=pytest.mark.slow), "ort"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_layer(kind: str, target: str) -> None:
    causal = not find_map(kind).over_time
    exported = Exported(kind, causal, target)
    made = exported.layer
    assert bool(exported.states) is causal
    for batch, length in ((1, 1), (2, 37), (1, 128), (1, 1000)):
        x = made.example_inputs(batch, length, seed=length)
        want, limit = allowed(made, x)
        got, _ = exported(x)
        assert (got - want).abs().max() <= limit, length
    if causal:
        state, outputs = exported.start(1), []
        for part in zip(*(t.split([1, 499, 1, 1, 498], 1) for t in x), strict=True):
            output, state = exported(part, state)
            outputs.append(output)
        assert (torch.cat(outputs, 1) - want).abs().max() <= limit


@pytest.mark.parametrize("kind", [*EXPONENTIAL, "elu1", "taylor2"])
def test_exported_bidirectional_layer(kind: str) -> None:
    exported = Exported(kind, False, "onnx")
    made = exported.layer
    assert not exported.states
    for length in (1, 130):
        x = made.example_inputs(2, length, seed=length)
        want, limit = allowed(made, x)
        assert (exported(x)[0] - want).abs().max() <= limit


def sensitivity(made: LinearAttentionLayer, x: tuple[Tensor, ...]) -> float:
    """What the rounding of exponents in float32 can change of an output.

    An output is a mean of values under weights exp(b + a): a weight off by a factor exp(e) moves it
    by at most 2 e max|v|. Here e is how far exponents in float32 are from float64, and half a
    unit in the last place for each difference and sum of them that follows.
    """
    e = 0.0
    for t, heads, side in ((x[0], 4, "query"), (x[1], 2, "key")):
        single = made.feature_map(t.float(), heads, side, True)
        double = made.feature_map.double()(t.double(), heads, side, True)
        made.feature_map.float()
        e += (single - double).abs().max().item() + 2 * 2.0**-24 * double.abs().max().item()
    return 2 * e * x[2].abs().max().item()


@pytest.mark.parametrize("target", ["onnx", "ort"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_inputs_a_hundred_times_as_large(kind: str, causal: bool, target: str) -> None:
    """Finite and right, with eps = 0: whole, in pieces, and against all pairs in float64."""
    exported = Exported(kind, causal, target)
    made = exported.layer
    assert made.spec.eps == 0
    x = made.example_inputs(2, 150, seed=1)
    x = (100 * x[0], 100 * x[1], x[2])
    got, _ = exported(x)
    want = definition(made, x)
    assert torch.isfinite(got).all()
    limit = sensitivity(made, x)
    assert limit < 0.2
    assert (got - want).abs().mean() < 1e-4
    assert (got - want).abs().max() <= limit
    assert (made(*x) - want).abs().max() <= limit
    if causal:
        state, outputs = exported.start(2), []
        for part in zip(*(t.split([1, 70, 79], 1) for t in x), strict=True):
            output, state = exported(part, state)
            outputs.append(output)
        assert (torch.cat(outputs, 1) - want).abs().max() <= limit


def definition(made: LinearAttentionLayer, x: tuple[Tensor, ...]) -> Tensor:
    """All pairs of tokens from exponents in float64: each row's largest is subtracted."""
    phi, spec = made.feature_map.double(), made.spec
    query, key, value = (t.double() for t in x)
    b = phi(query, 4, "query", True).unflatten(-1, (4, -1))
    a = phi(key, 2, "key", True).unflatten(-1, (2, -1)).repeat_interleave(2, 2)
    v = value.unflatten(-1, (2, -1)).repeat_interleave(2, 2)
    made.feature_map.float()
    scores = torch.logsumexp(b[:, :, None] + a[:, None], -1)  # (B, T, S, H)
    if spec.causal:
        seen = torch.ones(scores.shape[1:3], dtype=torch.bool).tril()
        scores = torch.where(seen[..., None], scores, -torch.inf)
    return torch.einsum("btsh,bshv->bthv", scores.softmax(2), v).flatten(2)


@pytest.mark.parametrize("kind", EXPONENTIAL)
def test_half_precision_inputs_a_hundred_times_as_large(kind: str) -> None:
    """Exponents are computed in float32 from inputs of half precision."""
    made = layer(kind).half()
    x = tuple(s * t for s, t in zip((100, 100, 1), made.example_inputs(2, 150, 1), strict=True))
    x = tuple(t.half() for t in x)
    got = made(*x)
    assert got.dtype == torch.float16
    assert torch.isfinite(got).all()
    limit = sensitivity(made, x) + 2.0**-11 * x[2].abs().max().item()
    assert (got - definition(made, x)).abs().max() <= limit


@pytest.mark.parametrize("kind", ["squared_relu", "taylor2", "quadratic"])
def test_products_leave_the_range_of_half_precision(kind: str) -> None:
    made = layer(kind).half()
    x = made.example_inputs(2, 30, 1)
    x = tuple(t.half() for t in (100 * x[0], 100 * x[1], x[2]))
    got = made(*x)
    want = made.double()(*(t.double() for t in x))
    assert (got - want).abs().max() <= 2.0**-9 * want.abs().max()


# In models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_models_take_any_map(kind: str) -> None:
    """Gradients reach every weight, and a checkpoint's options rebuild the same model."""
    settings = {
        "dim": 8,
        "num_heads": 2,
        "layers": 1,
        "feature_map": kind,
        "feature_map_options": options(kind),
        "normalize": find_map(kind).kernel_positive,
    }
    for name in ("language_model", "digit_classifier"):
        if name == "language_model" and find_map(kind).over_time:
            with pytest.raises(UsageError, match=r"'softmax_time'.*causal=False"):
                models.build(name, settings)
            continue
        torch.manual_seed(0)
        model = models.build(name, settings)
        example = model.example_inputs(2, 20, 0)
        model(*example).square().mean().backward()
        used = {n: p.grad for n, p in model.named_parameters() if "feature_map" not in n}
        assert all(g is not None and g.isfinite().all() for g in used.values())
        again = models.build(name, model.config)
        again.load_state_dict(model.state_dict())
        assert torch.equal(again(*example), model(*example))


def test_an_old_checkpoint_still_loads(tmp_path: Path) -> None:
    """Its config knows nothing of options."""
    model = models.build("linear_attention_layer", {"num_heads": 2, "head_dim": 4})
    models.save(model, tmp_path / "m.pt")
    content = torch.load(tmp_path / "m.pt", weights_only=True)
    del content["config"]["feature_map_options"]
    torch.save(content, tmp_path / "m.pt")
    assert models.load(tmp_path / "m.pt").config["feature_map_options"] is None


def test_a_language_model_of_random_features_streams(tmp_path: Path) -> None:
    """The whole way: checkpoint, artifact, states that do not begin with zeros, text in pieces."""
    torch.manual_seed(0)
    settings = {"dim": 16, "num_heads": 2, "layers": 2, "feature_map": "favor+"}
    model = models.build("language_model", {**settings, "feature_map_options": {"features": 16}})
    models.save(model.eval(), tmp_path / "m.pt")
    manifest = linexport.convert(tmp_path / "m.pt", tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok"
    assert manifest.streaming.passed is True
    assert manifest.fused["StabilizedExp"] == 2
    assert {s.initial for s in manifest.states} == {0.0, LOWEST}
    assert manifest.parity.smallest_denominator.denominator >= 1
    opened = linexport.load(tmp_path / "a")
    tokens = np.random.default_rng(0).integers(0, 256, (2, 40))
    whole = opened.run(tokens)["output"]
    stream = opened.stream()
    parts = [stream.step(piece)["output"] for piece in np.split(tokens, [1, 2, 30], 1)]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        want = model(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-5)
