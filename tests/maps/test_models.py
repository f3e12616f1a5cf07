"""Reference models: layer against the oracle, streaming, checkpoints, training, export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from linexport import models
from linexport.errors import (
    EnvironmentProblemError,
    OpError,
    UnsupportedModelError,
    UsageError,
)
from linexport.models import checkpoint, data, samples, scores, training
from linexport.models import train as train_script
from linexport.models.attention import AttentionConfig, AttentionState, LinearAttention
from linexport.models.classifier import DigitClassifier
from linexport.models.language_model import LanguageModel
from linexport.models.short_conv import ShortConv
from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.linear_attention import linear_attention

OTHERS = ["digit_memory", "digit_network"]
"""Models without linear attention."""

SMALL: dict[str, dict[str, Any]] = {
    "language_model": {"dim": 24, "num_heads": 4, "kv_heads": 2, "value_dim": 5, "layers": 2},
    "digit_classifier": {"dim": 24, "num_heads": 4, "layers": 2},
    "linear_attention_layer": {"num_heads": 4, "head_dim": 6, "kv_heads": 2, "value_dim": 3},
    "window_attention_layer": {"num_heads": 4, "head_dim": 6, "kv_heads": 2, "value_dim": 3},
}
RULES = [
    {"update_rule": "linear", "normalize": True},
    {"update_rule": "linear", "normalize": False, "scale": 0.3},
    {"update_rule": "gated", "normalize": True},
    {"update_rule": "gated", "normalize": False, "decay_per_channel": True},
    {"update_rule": "delta", "normalize": False},
    {"update_rule": "gated_delta", "normalize": False},
    {"update_rule": "gated_delta", "normalize": False, "decay_per_channel": True},
]
HEADS = [(4, 4), (4, 2), (4, 1), (2, 4), (1, 3)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors here are tiny, and threads that wait for each other slow a busy machine down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(causal: bool = True, **settings_: Any) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(AttentionConfig(**settings_), causal).double()


def inputs(batch: int, length: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, dim, generator=generator, dtype=torch.float64)


def defined(
    attention: LinearAttention, x: Tensor, key_mask: Tensor | None, state: AttentionState | None
) -> tuple[Tensor, AttentionState]:
    """The layer with the oracle in place of the chunk form, and its own formulas spelled out."""
    spec, heads = attention.spec, attention.spec.kv_num_heads
    k = attention.feature_map(attention.key(x), heads)
    decay = beta = None
    if spec.has_decay:
        decay = torch.log(1 / (1 + torch.exp(-attention.decay(x))))
    if spec.has_beta:
        beta = 1 / (1 + torch.exp(-attention.beta(x)))
        split = k.reshape(*x.shape[:2], heads, -1)
        k = (split / split.square().sum(-1, keepdim=True).sqrt()).flatten(-2)
    q = attention.feature_map(attention.query(x), spec.q_num_heads)
    past = (None, None) if state is None else state[:2]
    tensors = (q, k, attention.value(x), *past, decay, beta, key_mask)
    arrays = (None if t is None else t.detach().numpy() for t in tensors)
    output, S, z = linear_attention(spec, *arrays)  # type: ignore[arg-type]
    return (
        attention.output(torch.from_numpy(output)),
        AttentionState(torch.from_numpy(S), torch.from_numpy(z) if spec.normalize else None),
    )


def assert_same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Tensors, or tuples of them, within a tolerance relative to the largest expected value."""
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, tolerance)
    elif expected is None:
        assert found is None
    else:
        assert found.shape == expected.shape
        worst = (found - expected).abs().max() if expected.numel() else torch.tensor(0.0)
        largest = expected.abs().max() if expected.numel() else torch.tensor(0.0)
        assert worst.item() <= tolerance * max(1.0, largest.item())


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_causal_layer_equals_the_oracle(rule: dict[str, Any], heads: tuple[int, int]) -> None:
    attention = layer(
        dim=10, num_heads=heads[0], kv_heads=heads[1], head_dim=6, value_dim=3, **rule
    )
    x, mask = inputs(2, 70, 10), torch.arange(70) != torch.tensor([[3], [69]])
    _, state = attention(inputs(2, 5, 10, seed=1))
    assert_same(attention(x), defined(attention, x, None, None))
    assert_same(attention(x, mask, state), defined(attention, x, mask, state))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("feature_map", ["elu1", "relu", "identity"])
def test_bidirectional_layer_equals_the_oracle(heads: tuple[int, int], feature_map: str) -> None:
    attention = layer(
        causal=False,
        dim=10,
        num_heads=heads[0],
        kv_heads=heads[1],
        head_dim=6,
        value_dim=9,
        feature_map=feature_map,
        normalize=feature_map != "identity",
    )
    x, mask = inputs(2, 33, 10), torch.arange(33) < torch.tensor([[20], [33]])
    assert_same(attention(x, mask), defined(attention, x, mask, None))


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    heads=st.sampled_from(HEADS),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    masked=st.booleans(),
)
def test_any_split_of_a_sequence_reproduces_the_whole(
    rule: dict[str, Any],
    heads: tuple[int, int],
    widths: tuple[int, int],
    batch: int,
    lengths: list[int],
    masked: bool,
) -> None:
    attention = layer(
        dim=4,
        num_heads=heads[0],
        kv_heads=heads[1],
        head_dim=widths[0],
        value_dim=widths[1],
        **rule,
    )
    x = inputs(batch, sum(lengths), 4)
    mask = inputs(batch, sum(lengths), 1)[..., 0] > -1 if masked else None
    if mask is not None:
        mask[:, 0] = True  # a normaliser without any key is zero
    whole = attention(x, mask)
    assert_same(whole, defined(attention, x, mask, None))
    state = attention.initial_state(batch)
    outputs = []
    for part, keep in zip(
        x.split(lengths, 1), mask.split(lengths, 1) if masked else [None] * 3, strict=False
    ):
        output, state = attention(part, keep, state)
        outputs.append(output)
    assert_same((torch.cat(outputs, 1), state), whole)


@pytest.mark.parametrize("causal", [True, False])
def test_content_of_masked_tokens_does_not_reach_the_others(causal: bool) -> None:
    attention = layer(causal, dim=8, num_heads=2)
    mask = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[:, 0] = True
    x, other = inputs(3, 40, 8), inputs(3, 40, 8, seed=9)
    changed = torch.where(mask[..., None], x, other)
    (before, state), (after, state_after) = attention(x, mask), attention(changed, mask)
    assert torch.equal(before[mask], after[mask])
    assert_same(state_after, tuple(state), 0)
    assert not torch.equal(attention(x)[0][mask], attention(changed)[0][mask])


def test_padding_is_the_same_as_a_shorter_sequence() -> None:
    attention = layer(causal=False, dim=8, num_heads=2)
    x = inputs(2, 20, 8)
    mask = (torch.arange(20) < 13).expand(2, 20)
    assert_same(attention(x, mask)[0][:, :13], attention(x[:, :13])[0])


def test_layer_refuses_what_has_no_meaning() -> None:
    with pytest.raises(UsageError, match="Unknown feature map 'elu'"):
        layer(dim=8, num_heads=2, feature_map="elu")
    with pytest.raises(UsageError, match="dim 9 does not split into num_heads 2"):
        layer(dim=9, num_heads=2)
    with pytest.raises(OpError, match="multiple"):
        layer(dim=12, num_heads=3, kv_heads=2)
    with pytest.raises(OpError, match="normalize=1"):
        layer(dim=8, num_heads=2, update_rule="delta")
    with pytest.raises(OpError, match="causal=0"):
        layer(causal=False, dim=8, num_heads=2, update_rule="gated")
    bidirectional = layer(causal=False, dim=8, num_heads=2)
    with pytest.raises(OpError, match="no past state"):
        bidirectional(inputs(1, 3, 8), state=bidirectional.initial_state(1))


def test_states_are_float32_for_half_precision() -> None:
    attention = LinearAttention(
        AttentionConfig(dim=8, num_heads=2, update_rule="gated_delta", normalize=False)
    ).half()
    state = attention.initial_state(1)
    output, after = attention(inputs(1, 5, 8).half(), state=state)
    assert output.dtype == torch.float16
    assert state.state.dtype == after.state.dtype == torch.float32
    assert output.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 5), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_short_convolution_streams(size: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    conv = ShortConv(3, size).double()
    x = inputs(2, sum(lengths), 3)
    weight, bias = conv.conv.weight, conv.conv.bias
    assert bias is not None
    arrays = (t.detach().numpy() for t in (x.transpose(1, 2), weight, bias))
    expected = [np.ascontiguousarray(a) for a in causal_conv("silu", *arrays)]
    state, outputs = conv.initial_state(2), []
    for part in x.split(lengths, 1):
        output, state = conv(part, state)
        outputs.append(output)
    y = torch.cat(outputs, 1)
    assert_same((y.transpose(1, 2), state), tuple(torch.from_numpy(a) for a in expected))
    assert_same(conv(x), (y, state))


@pytest.fixture
def language_model() -> LanguageModel:
    torch.manual_seed(0)
    model = models.build("language_model", SMALL["language_model"]).eval()
    assert isinstance(model, LanguageModel)
    return model


def test_language_model_step_by_step_equals_the_whole(language_model: LanguageModel) -> None:
    model = language_model.double()
    (tokens,) = model.example_inputs(2, 90, seed=1)
    whole = model(tokens)
    assert whole.shape == (2, 90, 256)
    for sizes in ([1] * 90, [64, 26], [7, 1, 82]):
        state, parts = model.initial_state(2), []
        for part in tokens.split(sizes, 1):
            logits, state = model.step(part, state)
            parts.append(logits)
        assert_same(torch.cat(parts, 1), whole)


def test_language_model_does_not_look_ahead(language_model: LanguageModel) -> None:
    (tokens,) = language_model.example_inputs(2, 40, seed=1)
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 256
    before, after = language_model(tokens), language_model(changed)
    assert_same(after[:, :25], before[:, :25], 1e-6)
    assert (before[:, 25:] - after[:, 25:]).abs().max() > 1e-3


def test_language_model_reads_the_order_of_tokens(language_model: LanguageModel) -> None:
    """Without the convolutions the last of these would not know one order from another."""
    one, other = (torch.tensor([[*text, 0]]) for text in (b"abcdefgh", b"bacdefgh"))
    gap = language_model(one)[:, -1] - language_model(other)[:, -1]
    assert gap.abs().max() > 1e-3


def test_generation_is_greedy_and_repeats(language_model: LanguageModel) -> None:
    prompt = torch.tensor([list(b"def "), list(b"impo")])
    produced = language_model.generate(prompt, 12)
    assert produced.shape == (2, 12)
    assert torch.equal(produced, language_model.generate(prompt, 12))
    text = prompt
    for _ in range(12):
        text = torch.cat([text, language_model(text)[:, -1:].argmax(-1)], 1)
    assert torch.equal(text[:, 4:], produced)
    assert language_model.generate(prompt, 0).shape == (2, 0)


def test_classifier_images_are_independent() -> None:
    torch.manual_seed(0)
    model = models.build("digit_classifier", SMALL["digit_classifier"]).eval().double()
    (pixels,) = model.example_inputs(5, 0, seed=2)
    pixels = pixels.double()
    together = model(pixels)
    assert together.shape == (5, 10)
    assert_same(torch.cat([model(p[None]) for p in pixels]), together)


def test_patches_are_squares_of_the_image() -> None:
    image = torch.arange(64).view(1, 8, 8)
    cut = data.patches(image, 16)
    assert cut.shape == (1, 16, 4)
    assert cut[0, 0].tolist() == [0, 1, 8, 9]
    assert cut[0, 5].tolist() == [18, 19, 26, 27]
    assert data.patches(image, 64)[0, :, 0].tolist() == list(range(64))


@pytest.mark.parametrize("name", SMALL)
def test_checkpoint_round_trip(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = models.build(name, SMALL[name]).eval()
    path = tmp_path / "model.pt"
    path.write_bytes(b"an older file")
    models.save(model, path)
    assert list(tmp_path.iterdir()) == [path]
    content = torch.load(path, weights_only=True)
    assert list(content) == ["format", "version", "model", "config", "state_dict"]
    assert (content["format"], content["version"]) == (checkpoint.FORMAT, checkpoint.VERSION)
    assert content["model"] == name
    assert json.loads(json.dumps(content["config"])) == content["config"] == model.config
    again = models.load(str(path))
    assert type(again) is type(model)
    assert not again.training
    example = model.example_inputs(2, 16, seed=0)
    assert torch.equal(again(*example), model(*example))
    first = path.read_bytes()
    models.save(again, path)
    assert path.read_bytes() == first


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    path = tmp_path / "model.pt"
    path.write_bytes(b"an older file")
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        models.save(models.build("digit_classifier", SMALL["digit_classifier"]), path)
    assert path.read_bytes() == b"an older file"
    assert list(tmp_path.iterdir()) == [path]


def test_load_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    for content in (
        {"weight": torch.ones(2)},
        torch.ones(2),
        {"format": "linexport", "version": 2},
    ):
        torch.save(content, path)
        with pytest.raises(UnsupportedModelError, match="not a linexport checkpoint"):
            models.load(path)


def test_build_names_what_is_wrong() -> None:
    assert models.names() == sorted([*SMALL, *OTHERS])
    with pytest.raises(
        UsageError, match=r"digit_classifier, digit_memory, .*language_model.*'language_model'"
    ):
        models.build("langage_model", {})
    for change, message in [
        ({"dims": 3}, "unknown key 'dims'. Did you mean 'dim'"),
        ({"layers": "2"}, "'layers' is '2'; expected int >= 1"),
        ({"layers": 0}, "'layers' is 0"),
        ({"layers": True}, "'layers' is True"),
        ({"normalize": 1}, "'normalize' is 1; expected bool"),
        ({"kv_heads": 2.0}, "'kv_heads' is 2.0; expected int >= 1 | None"),
        ({"feature_map": "soft_max"}, "Unknown feature map 'soft_max'"),
        ({"feature_map_options": {"features": 2}}, "feature map 'elu1': unknown key 'features'"),
    ]:
        with pytest.raises(UsageError) as raised:
            models.build("language_model", SMALL["language_model"] | change)
        assert message in str(raised.value)
    with pytest.raises(UsageError, match=r"missing key 'layers'.*Known keys: dim, num_heads"):
        models.build("language_model", {"dim": 8, "num_heads": 2})
    assert models.build("language_model", SMALL["language_model"] | {"scale": 1, "kv_heads": None})


def test_models_build_without_memory() -> None:
    """So that shapes of a file can be compared before memory is taken."""
    with torch.device("meta"):
        for name, config in SMALL.items():
            for tensor in (
                models.build(name, config | {"num_heads": 4096, "head_dim": 4096})
                .state_dict()
                .values()
            ):
                assert tensor.is_meta


@pytest.mark.parametrize("length", [16, 7])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in SMALL),
        ("language_model", {"update_rule": "gated", "decay_per_channel": True}),
        ("language_model", {"update_rule": "gated_delta", "normalize": False}),
    ],
    ids=str,
)
def test_export_keeps_the_ops_whole(name: str, changes: dict[str, Any], length: int) -> None:
    torch.manual_seed(0)
    model = models.build(name, SMALL[name] | changes).eval()
    example = model.example_inputs(2, length, seed=0)
    assert all(
        torch.equal(a, b) for a, b in zip(example, model.example_inputs(2, length, 0), strict=True)
    )
    shapes = model.dynamic_shapes()
    assert len(shapes) == len(example)
    program = torch.export.export(model, example, dynamic_shapes=shapes)
    layers = SMALL[name].get("layers", 1)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("linexport.linear_attention.default") == layers
    assert called.count("linexport.feature_map.default") == 2 * layers
    assert called.count("linexport.causal_conv.default") == layers * (name == "language_model")
    for batch, other in ((2, length), (3, 70), (1, 1)):
        new = model.example_inputs(batch, other, seed=1)
        assert_same(program.module()(*new), model(*new), 1e-5)
    for position, (low, high) in model.integer_ranges().items():
        tensor = torch.utils._pytree.tree_leaves(example)[position]
        assert not tensor.is_floating_point()
        assert low <= int(tensor.min()) <= int(tensor.max()) < high
    integers = [i for i, tensor in enumerate(example) if not tensor.is_floating_point()]
    assert integers == list(model.integer_ranges())


def test_text_is_split_by_file_and_real() -> None:
    text, again = data.library_text(), data.library_text()
    assert text.train.dtype == torch.uint8
    assert torch.equal(text.train, again.train)
    assert len(text.train) > 2_000_000
    assert 0.01 < len(text.held_out) / len(text.train) < 0.2
    assert 4 < scores.unigram_bits_per_byte(text) < 5.5


def test_text_needs_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(EnvironmentProblemError, match="standard library"):
        data.library_text()


def test_digits_are_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    (train, held_out), (again, _) = data.digits(), data.digits()
    assert (len(train.labels), len(held_out.labels)) == (1437, 360)
    assert torch.equal(train.images, again.images)
    assert 0 == train.images.min() < train.images.max() == 1
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(EnvironmentProblemError, match=r"pip install '\.\[train\]'"):
        data.digits()


def test_unigram_and_model_score_the_same_bytes() -> None:
    """A model that always says the training histogram scores what the baseline says."""
    text = data.Text(torch.tensor([0, 0, 0, 1]).byte(), torch.tensor([0, 1] * 1024).byte())
    frequency = torch.full((256,), 1 / 260)
    frequency[:2] = torch.tensor([4 / 260, 2 / 260])

    class Histogram(LanguageModel):
        def forward(self, tokens: Tensor) -> Tensor:
            return frequency.log().expand(*tokens.shape, 256)

    model = Histogram(LanguageModel.Config(**SMALL["language_model"]))
    expected = scores.unigram_bits_per_byte(text)
    # The first byte of each window, a 0, is not scored.
    assert scores.bits_per_byte(model, text.held_out) == pytest.approx(expected, rel=1e-3)


def first_and_last(lines: list[str]) -> tuple[float, float]:
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (lines[0], lines[-1]))
    return first, last


def test_a_few_steps_reduce_the_loss_and_repeat() -> None:
    lines: list[str] = []
    global_state = torch.random.get_rng_state()
    model = training.train_language_model(8, seed=1, say=lines.append)
    assert torch.equal(torch.random.get_rng_state(), global_state)
    first, last = first_and_last(lines)
    assert last < first - 0.5
    assert "step 8/8" in lines[-1]
    again = training.train_language_model(8, seed=1)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "identity"])
def test_digits_learn_with_every_map(feature_map: str) -> None:
    pytest.importorskip("sklearn")
    lines: list[str] = []
    model = training.train_digits(40, feature_map=feature_map, say=lines.append)
    first, last = first_and_last(lines)
    assert last < 0.8 * first
    assert isinstance(model, DigitClassifier)
    assert not model.training


def test_a_memory_of_digits_answers_from_what_is_stored(tmp_path: Path) -> None:
    model = training.train_digit_memory(40)
    stored, asked = data.remembered()
    assert [len(part.labels) for part in (stored, asked)] == [4096, 3717]
    pixels = asked.images.flatten(1)[:48].unflatten(0, (6, 8))
    with torch.no_grad():
        logits = model(pixels)
        fresh = model.look_up(pixels, *model.memory(stored.images.flatten(1), stored.labels))
    torch.testing.assert_close(logits, fresh)
    assert logits.shape == (6, 8, 10)
    assert samples.memory_accuracy(model) > 0.4
    models.save(model, tmp_path / "memory.pt")
    with torch.no_grad():
        assert torch.equal(models.load(tmp_path / "memory.pt")(pixels), logits)


def test_time_limit_ends_training() -> None:
    # That it returns is the proof: so many steps take hours.
    training.train_digits(1_000_000, seconds=1)


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "linexport.models.train", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )


@pytest.mark.services
def test_command_line_trains_and_refuses(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "digits.pt"
    done = train("digits", "--out", str(path), "--steps", "20")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert "step 20/20" in done.stderr
    assert isinstance(models.load(path), DigitClassifier)
    refused = train("digits", "--out", str(tmp_path / "nowhere" / "digits.pt"))
    assert refused.returncode == UsageError.exit_code
    assert "does not exist" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_options_of_a_map_on_the_command_line() -> None:
    given_ = ["seed=3", "orthogonal=false", "c=0.5", "init=random"]
    want = {"features": 8, "seed": 3, "orthogonal": False, "c": 0.5, "init": "random"}
    assert train_script._options(8, given_) == want
    assert train_script._options(None, []) == {}
    with pytest.raises(UsageError, match="--map-option degree: expected NAME=VALUE"):
        train_script._options(None, ["degree"])


def test_a_wrong_map_is_named_before_anything_is_trained() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(UsageError, match=r"'favr\+'.*Did you mean 'favor\+'"):
        training.train_digits(1, feature_map="favr+")
    with pytest.raises(UsageError, match="'features' is 0; expected int >= 1"):
        training.train_digits(1, feature_map="favor+", options={"features": 0})


@pytest.mark.slow
def test_full_training_reaches_its_numbers(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    text = data.library_text()
    done = train("language-model", "--out", str(tmp_path / "model.pt"))
    assert done.returncode == 0, done.stderr
    model = models.load(tmp_path / "model.pt")
    assert isinstance(model, LanguageModel)
    bits, unigram = (
        scores.bits_per_byte(model, text.held_out),
        scores.unigram_bits_per_byte(text),
    )
    assert f"{bits:.3f} bits per byte" in done.stdout
    assert bits < 2.4 < 4 < unigram

    done = train("digits", "--out", str(tmp_path / "digits.pt"))
    assert done.returncode == 0, done.stderr
    classifier = models.load(tmp_path / "digits.pt")
    assert isinstance(classifier, DigitClassifier)
    assert scores.accuracy(classifier, data.digits()[1]) > 0.96
