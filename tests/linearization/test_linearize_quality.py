"""The verdict of ``linearize`` follows the error beside that of attending to all keys alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.linearization import fit_forms, quality
from linexport.linearization.error_bins import attended_share, position_bins
from linexport.models import DigitClassifier, DigitMemory, LanguageModel, feature_maps, save
from linexport.models.classifier import DigitClassifierConfig
from linexport.models.digit_memory import DigitMemoryConfig
from linexport.models.language_model import LanguageModelConfig
from linexport.models.softmax_attention import SoftmaxAttention
from linexport.models.softmax_calls import Call
from linexport.report.linearization import linearization_page

Cli = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("one_thread")

FEATURES = 64
ROWS = torch.randn(96, 12, 16, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(256, (48, 12), generator=torch.Generator().manual_seed(0))


def encoder(*sharpness: float) -> nn.Module:
    """Layers whose scores are larger by these factors than those of fresh ones."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in sharpness]
    with torch.no_grad():
        for layer, factor in zip(layers, sharpness, strict=True):
            layer.self_attn.in_proj_weight[:32] *= factor
    return nn.Sequential(*layers).eval()


def run(module: nn.Module, data: Any = ROWS, **options: Any) -> Any:
    settings = {"map": "favor+", "features": FEATURES, "bench": False, **options}
    return linexport.linearize(module, data, **settings)


def alone(module: nn.Module, at: int, data: Tensor) -> tuple[float, float]:
    """Errors of favor+ and of the mean in one layer, in float64, from their definitions."""
    x = module[:at](data)
    attention: Any = module[at].self_attn
    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).double().chunk(3, -1)
    q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in qkv)
    phi = feature_maps.make("favor+", 8, {"features": FEATURES, "seed": 0})
    frozen = [x.double() for x in phi.frozen()]
    weights = phi.phi(q, *frozen) @ phi.phi_key(k, *frozen).mT
    want = (q @ k.mT / 8**0.5).softmax(-1) @ v
    got, mean = weights @ v / weights.sum(-1, keepdim=True), v.mean(2, keepdim=True)
    return tuple(float((y - want).norm() / want.norm()) for y in (got, mean))  # type: ignore[return-value]


@torch.no_grad()
def test_a_layer_no_better_than_the_mean_of_its_values_keeps_its_softmax() -> None:
    module = encoder(0.5, 12.0)
    found = run(module)
    soft, sharp = found.report.layers
    assert soft.reason is None and sharp.reason is not None and "--force replaces" in sharp.reason
    fresh = torch.randn(64, 12, 16, generator=torch.Generator().manual_seed(9))
    for at, row in enumerate((soft, sharp)):
        error, mean = alone(module, at, fresh)
        assert (row.reason is None) == (error < mean)
        assert row.attention_error == pytest.approx(error, rel=0.2)
        assert row.uniform_error == pytest.approx(mean, rel=0.2)
    assert found.report.status == "ok" and found.report.verdict.startswith("1 of 2 layers are li")
    assert "softmax is kept in 1.self_attn" in found.report.verdict
    kept = found.module.inner[1](ROWS)
    torch.testing.assert_close(kept, module[1](ROWS))


def test_more_rows_are_judged_where_the_first_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(600, 12, 16, generator=torch.Generator().manual_seed(1))
    # 150 are held out, and features are fitted to 128 of the others.
    for margin, judged in ((0.0, 150), (1e9, 150 + 600 - 150 - 128)):
        monkeypatch.setattr(quality, "MARGIN", margin)
        (row,) = run(encoder(0.5), data).report.layers
        assert sum(one.queries for one in row.by_sharpness) == judged * 12 * 2
        assert (row.reason is None) == (margin == 0)
    assert "more rows of data" in row.reason


def test_forced_it_is_replaced_and_named() -> None:
    report = run(encoder(0.5, 12.0), force=True).report
    assert [row.reason for row in report.layers] == [None, None] and report.forced
    assert report.status == "ok" and "but forced: 1.self_attn" in report.verdict


def test_where_no_layer_is_better_nothing_is_replaced() -> None:
    module = encoder(12.0)
    found = run(module)
    assert not found.replaced and found.report.status == "declined"
    assert found.report.verdict.startswith(
        "No: no layer's linear form is better than the mean of its values. 0.self_attn is kept"
    )
    with torch.no_grad():
        torch.testing.assert_close(found.module(ROWS), module(ROWS))


def test_the_command_ends_with_3_and_writes_nothing_but_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = DigitClassifier(
        DigitClassifierConfig(dim=16, num_heads=2, layers=1, attention="softmax")
    )
    with torch.no_grad():
        for block in module.blocks:
            block.attention.query.weight *= 60
    save(module, tmp_path / "sharp.pt")
    np.savez("rows.npz", np.random.default_rng(0).random((40, 16, 4), np.float32))
    asked = ("linearize", "sharp.pt", "-o", "linear.pt", "--data", "rows.npz", "--no-bench")
    done = cli(*asked, "--features", 8, "--html", "page.html")
    assert done.code == 3 and not Path("linear.pt").exists()
    assert done.out.startswith("No: no layer's") and "nothing written" in done.out
    assert "Error by sharpness" in Path("page.html").read_text()
    forced = cli(*asked, "--features", 8, "--force")
    assert forced.code == 0 and Path("linear.pt").exists()
    assert max(len(line) for line in forced.out.splitlines()) <= 80


def test_after_distillation_layers_are_judged_again() -> None:
    module = encoder(0.5, 12.0)
    found = run(module, distil=2)
    first, second = found.report.layers
    assert first.distilled_error < first.distilled_uniform_error and first.reason is None
    assert second.distilled_error >= second.distilled_uniform_error
    assert "after distillation" in second.reason
    with torch.no_grad():
        torch.testing.assert_close(found.module.inner[1](ROWS), module[1](ROWS))
    # The first layer runs on the original's inputs: its error in the model is the same.
    assert first.layer_error == pytest.approx(first.distilled_error, rel=1e-4)


def test_a_layer_of_a_stack_gets_its_own_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_heads": 2, "layers": 2, "attention": "softmax"}
    module = DigitClassifier(DigitClassifierConfig(**sizes)).eval()  # type: ignore[arg-type]
    data = torch.rand(96, 16, 4, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(fit_forms, "no_better", lambda row: row.name == "blocks.1.attention")
    found = run(module, data, map="taylor2", features=None, distil=2)
    assert isinstance(found.module.blocks[1].attention, SoftmaxAttention)
    own = {id(x) for x in module.parameters()}
    learned = [n for n, x in found.module.named_parameters() if id(x) not in own]
    assert learned and all(name.startswith("blocks.0.attention.") for name in learned)
    first, _ = found.report.layers
    assert first.layer_error == pytest.approx(first.distilled_error, rel=1e-4)


def test_errors_by_position_and_sharpness_add_up_to_that_of_the_layer() -> None:
    (row,) = run(encoder(3.0), force=True).report.layers
    assert [(one.low, one.high) for one in row.by_position[:3]] == [(0, 1), (2, 2), (3, 4)]
    for bins in (row.by_position, row.by_sharpness):
        # Of 24 held-out rows of 12 tokens, in 2 heads.
        assert sum(one.queries for one in bins) == 24 * 12 * 2
    sharp, flat = row.by_sharpness[0], row.by_sharpness[-1]
    assert len(row.by_sharpness) > 1 and sharp.uniform_error > flat.uniform_error
    errors = [one.error for one in row.by_sharpness]
    assert min(errors) <= row.attention_error <= max(errors)


def test_the_share_of_the_keys_is_that_of_the_entropy() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, generator=g), torch.randn(2, 2, 5, 8, generator=g)
    k[0, 0, 0] *= 100
    found = attended_share(Call(q, k, k, None, 0.0, True, 1.0, True))
    weights = (q.double() @ k.double().repeat_interleave(2, 1).mT).masked_fill(
        ~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf
    )
    entropy = torch.distributions.Categorical(logits=weights.flatten(0, 2)).entropy()
    want = entropy.exp().view(2, 4, 5) / torch.arange(1, 6)
    torch.testing.assert_close(found, want)
    alike = attended_share(Call(q * 0, k, k, torch.rand(2, 1, 1, 5, generator=g) > 0.3))
    torch.testing.assert_close(alike, torch.ones(2, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("length", [1, 5, 8, 9, 100])
def test_positions_are_told_apart_in_at_most_eight_ranges(length: int) -> None:
    bounds, bins = position_bins(length)
    assert len(bounds) == min(8, length)
    for position, at in enumerate(bins.tolist()):
        assert bounds[at][0] <= position <= bounds[at][1]


# Scores of models that are known


def test_a_language_model_is_scored_in_bits_per_token() -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(dim=16, num_heads=2, layers=1, attention="softmax")
    module = LanguageModel(config).eval()
    found = run(module, TOKENS)
    metric = found.report.metric
    assert metric.name == "bits per token" and metric.lower_is_better
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    tokens = TOKENS[order[:12]]
    with torch.no_grad():
        for model, value in ((module, metric.before), (found.module, metric.after)):
            probabilities = model(tokens).double().softmax(-1)[:, :-1]
            bits = -probabilities.gather(-1, tokens[:, 1:, None]).log2().mean()
            assert value == pytest.approx(float(bits), rel=1e-9)


def test_a_classifier_is_scored_by_agreement_and_an_unknown_module_not_at_all() -> None:
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_heads": 2, "layers": 1, "attention": "softmax"}
    module = DigitClassifier(DigitClassifierConfig(**sizes))  # type: ignore[arg-type]
    metric = run(module, torch.rand(40, 16, 4)).report.metric
    assert metric.name == "agreement with the original's classes" and metric.before == 1
    assert 0 < metric.after <= 1
    assert run(encoder(1.0)).report.metric is None


# What the report says of sizes


def test_numbers_that_pseudo_keys_replace_are_not_in_an_artifact(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = DigitMemory(DigitMemoryConfig(rows=256, features=8, num_heads=2, head_dim=8))
    module.store(torch.rand(256, 8) * 8, torch.randint(10, (256,)))
    found = run(module, torch.rand(60, 4, 8) * 8, memory_keys=16, force=True)
    numbers = found.report.parameters
    # Query and output projections, and the pseudo-keys: keys, values and biases of 2 heads.
    assert (
        numbers.exported == 8 * 16 + 16 + 16 * 10 + 10 + 2 * 16 * (8 + 8 + 1) + numbers.exported % 2
    )
    assert numbers.exported < numbers.original / 5 and numbers.linear > numbers.original
    text = linearization_page(found.report)
    assert "times fewer than the original" in text


@pytest.mark.slow
def test_lengths_that_a_model_does_not_take_are_explained() -> None:
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_heads": 2, "layers": 1, "attention": "softmax"}
    module = DigitClassifier(DigitClassifierConfig(**sizes))  # type: ignore[arg-type]
    report = run(module, torch.rand(40, 16, 4), bench=True, lengths=[16, 64], threads=1).report
    assert report.lengths_left_out == (
        "Length 64 not measured: this model's inputs are of one size, 16, at which it was measured."
    )
    text = linearization_page(report)
    assert "One length was measured, 16." in text and "<svg" not in text
