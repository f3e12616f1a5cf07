"""linexport.linearize from data to report: choices, memories, distillation, scores, bad input."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.linearization.cost import crossover
from linexport.linearization.verdict import Measurements, verdict
from linexport.manifest.linearization_records import FormCosts, FormTimes
from linexport.models import DigitClassifier, LanguageModel, LinearAttention
from linexport.models.classifier import DigitClassifierConfig
from linexport.models.language_model import LanguageModelConfig
from linexport.models.softmax_attention import SoftmaxAttention
from linexport.sources.metric import Metric

pytestmark = pytest.mark.usefixtures("one_thread")


def digits() -> DigitClassifier:
    torch.manual_seed(0)
    config = DigitClassifierConfig(dim=16, num_heads=2, layers=2, attention="softmax")
    return DigitClassifier(config).eval()


def language() -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(dim=16, num_heads=2, layers=2, attention="softmax")
    return LanguageModel(config).eval()


PIXELS = torch.rand(96, 16, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(256, (48, 12), generator=torch.Generator().manual_seed(0))


def run(module: nn.Module, data: Any = PIXELS, **options: Any) -> Any:
    return linexport.linearize(module, data, bench=False, **options)


class Remembers(nn.Module):
    """Cross-attention of every row to the same 256 keys and values."""

    def __init__(self, spread: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        centres = torch.randn(8, 16)
        keys = centres.repeat(32, 1) + spread * torch.randn(256, 16)
        self.memory = nn.Parameter(keys)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.expand(x.shape[0], -1, -1)
        return self.attention(4 * x, 4 * memory, memory)[0]


QUERIES = torch.randn(200, 4, 16, generator=torch.Generator().manual_seed(2))


# Reference models


def test_a_reference_model_stays_one_and_shares_its_weights() -> None:
    module = digits()
    found = run(module, map={"*": "favor+", "blocks.0.*": "taylor2"}, features=32)
    assert type(found.module) is DigitClassifier
    layers = [block.attention for block in found.module.blocks]
    assert [layer.feature_map.kind for layer in layers] == ["taylor2", "favor+"]
    assert layers[1].feature_map.features == 32
    own = {id(x) for x in module.parameters()}
    assert all(id(x) in own for x in found.module.parameters())
    assert all(isinstance(b.attention, SoftmaxAttention) for b in module.blocks)


def test_its_checkpoint_is_the_same_model(tmp_path: Any) -> None:
    found = run(digits(), map="pseudo_keys", features=8, distil=20)
    found.save(tmp_path / "linear.pt")
    loaded = linexport.models.load(tmp_path / "linear.pt")
    with torch.no_grad():
        assert torch.equal(loaded(PIXELS), found.module(PIXELS))


def test_the_linear_language_model_streams_as_it_runs() -> None:
    found = run(language(), TOKENS, map="favor+", features=32, force=True)
    assert all(isinstance(b.attention, LinearAttention) for b in found.module.blocks)
    with torch.no_grad():
        whole, state, parts = found.module(TOKENS), found.module.initial_state(48), []
        for at in range(TOKENS.shape[1]):
            logits, state = found.module.step(TOKENS[:, at : at + 1], state)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)


def test_softmax_attention_streams_with_its_rows() -> None:
    module = language()
    with torch.no_grad():
        first, state = module.step(TOKENS[:, :5], module.initial_state(48))
        rest, _ = module.step(TOKENS[:, 5:], state)
        whole = module(TOKENS)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-5, rtol=1e-4)


def test_per_layer_settings_are_checked() -> None:
    sizes = {"dim": 16, "num_heads": 2, "layers": 2}
    for wrong in ([{}], [{}, {"attention": "none"}], [{}, {"maps": 1}]):
        with pytest.raises(UsageError):
            DigitClassifier(DigitClassifierConfig(**sizes, per_layer=wrong))


# Choosing


def test_locality_is_judged_by_exact_masked_attention() -> None:
    torch.manual_seed(0)
    config = DigitClassifierConfig(dim=8, num_heads=4, layers=1, attention="softmax")
    module = DigitClassifier(config).eval()
    options = {"tau": 0.7}
    (row,) = run(module, PIXELS, locality=2.0, map_options=options, features=4096).report.layers
    assert row.map == "favor+*local" and row.options["delta"] == 2.0
    assert row.local_error < row.uniform_error < row.attention_error
    with pytest.raises(UsageError, match="built on favor"):
        run(module, locality=1.0, map="taylor2")


# Static memories


def test_keys_that_never_change_become_pseudo_keys() -> None:
    found = run(Remembers(), QUERIES, memory_keys=16)
    (row,) = found.report.layers
    assert row.memory and row.pseudo_keys == 16
    assert row.held_out_error < 0.5 * row.mean_of_values_error
    assert row.attention_error == pytest.approx(row.held_out_error, rel=0.5)


def test_a_memory_no_better_than_the_mean_of_its_values_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"1 pseudo-keys for 256 keys .*of no use"):
        run(Remembers(spread=3.0), torch.randn(60, 2, 16) * 1e-3, memory_keys=1)


# Distillation


def test_distillation_comes_nearer_and_leaves_the_original_as_it_is() -> None:
    module = digits()
    for block in module.blocks:  # random layers are nearly uniform: make them attend to something
        block.attention.query.weight.data *= 6
    before = {k: v.clone() for k, v in module.state_dict().items()}
    plain, distilled = (run(module, map="favor+", features=16, distil=n) for n in (0, 60))
    errors = [[r.layer_error for r in f.report.layers] for f in (plain, distilled)]
    assert all(after < 0.8 * first for first, after in zip(*errors, strict=True))
    assert distilled.report.distillation.after < distilled.report.distillation.before
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


def test_a_seed_gives_the_same_bits() -> None:
    one, same = (run(digits(), features=16, distil=20, seed=3).module.state_dict() for _ in "ab")
    other = run(digits(), features=16, distil=20, seed=4).module.state_dict()
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert not all(torch.equal(one[k], other[k]) for k in one)


# Scores and verdicts


def test_a_score_before_and_after_decides_with_max_drop() -> None:
    def score(module: nn.Module) -> Tensor:
        return module(PIXELS[:8]).mean()

    found = run(digits(), map="taylor2", evaluate=score)
    metric = found.report.metric
    assert metric.name == "score" and metric.drop == metric.before - metric.after
    assert found.report.status == "ok"
    loss = Metric("loss", lambda m: float(isinstance(m.blocks[0].attention, LinearAttention)), True)
    bad = run(digits(), map="taylor2", evaluate=loss, max_drop=0.5).report
    assert bad.status == "declined"
    assert bad.verdict.startswith("No: loss rises from 0 to 1, more than the 0.5 allowed. 2 of 2")
    json.dumps(asdict(bad))


@pytest.mark.parametrize(
    ("value", "words"),
    [(float("nan"), "returned nan"), ("good", "returned str"), (None, "returned NoneType")],
)
def test_a_score_that_is_no_number_is_refused(value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(digits(), map="taylor2", evaluate=lambda module: value)


def test_a_score_that_raises_is_told_with_its_line() -> None:
    def broken(module: nn.Module) -> float:
        raise ValueError("no labels")

    with pytest.raises(UsageError, match=r"broken failed at .*test_linearize_library.py.*no label"):
        run(digits(), map="taylor2", evaluate=broken)


def test_the_crossover_is_where_it_stays_ahead() -> None:
    def rows(*linear: float) -> tuple[FormTimes, ...]:
        return tuple(FormTimes(2**n, 2.0, ms, 3.0, 4.0) for n, ms in enumerate(linear))

    assert crossover(rows(1, 3, 1, 1)) == 4
    assert crossover(rows(1, 1, 3)) is None
    status, sentence = verdict(Measurements(costs=FormCosts(latency=rows(3, 3))))
    assert status == "declined"
    assert "from 1 to 2 tokens: at 2 it takes 3 ms and the original 2 ms" in sentence


def test_a_module_in_training_is_taken_without_its_dropout_and_left_in_training() -> None:
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)

    def score(module: nn.Module) -> float:
        return float(module(QUERIES).sum() - module(QUERIES).sum())

    found = run(module, QUERIES, map="taylor2", evaluate=score)
    assert found.report.metric.before == 0 and found.report.rest_error < 1e-5
    assert module.training and not found.module.training


# Bad input


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (PIXELS[:0], "has 0 rows; expected at least 2"),
        (PIXELS[:1].repeat(9, 1, 1), "All 9 rows of the calibration data are equal"),
        (torch.zeros(9, 16, 4), "All 9 rows"),
        (PIXELS.masked_fill(PIXELS > 0.9, float("nan")), "NaN or infinite"),
        ((PIXELS, PIXELS[:3]), "has 96, 3 rows"),
        ([1, 2], "is int, int"),
        (torch.rand(9, 5, 4), "does not run on the calibration data"),
    ],
)
def test_calibration_data_that_is_of_no_use_is_refused(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(digits(), data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"map": {"block.*": "favor+"}}, "No layer is called 'block..'; found blocks.0.attention"),
        ({"map": "favour+"}, "Did you mean 'favor+'"),
        ({"map": "auto"}, "auto is not a map"),
        ({"map": "taylor2", "features": 8}, "unknown key 'features'"),
        ({"map": "keep"}, "as it is"),
        ({"locality": -1.0}, "above 0"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(LinexportError, match=words.replace("+", r"\+")):
        run(digits(), **options)


def test_functional_attention_without_a_projection_cannot_be_distilled() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    data = torch.randn(20, 2, 5, 8)
    assert run(Bare(), data, map="taylor2").report.layers[0].projection is None
    with pytest.raises(UsageError, match="Leave distil out"):
        run(Bare(), data, map="taylor2", distil=3)
