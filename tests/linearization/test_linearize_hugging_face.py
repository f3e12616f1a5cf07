"""An encoder and a decoder of transformers, with small random weights, in linear form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linexport
from linexport import passes
from linexport.errors import UnsupportedModelError
from linexport.graph.states import find_states
from linexport.sources import load_model
from linexport.sources.hugging_face.whole import Whole
from linexport.token_flow import classify
from linexport.trace import trace

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

Cli = Callable[..., Any]

IDS = np.random.default_rng(0).integers(1, 64, (16, 10))
MASK = (np.arange(10) < np.arange(16)[:, None] % 5 + 6).astype(np.int64)
SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"intermediate_size": 64, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 0}
    | {"eos_token_id": 0},
}
CLASSES = {"bert": "BertForMaskedLM", "gpt2": "GPT2LMHeadModel"}


def tiny(kind: str) -> Any:
    torch.manual_seed(0)
    settings = {"vocab_size": 64, "initializer_range": 0.1, **SIZES[kind]}
    config = transformers.AutoConfig.for_model(kind, **settings)
    return getattr(transformers, CLASSES[kind])(config).eval()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with calibration data."""
    monkeypatch.chdir(tmp_path)
    np.savez("rows.npz", input_ids=IDS, attention_mask=MASK)
    return tmp_path


@pytest.mark.parametrize("kind", CLASSES)
def test_a_folders_layers_are_replaced_and_the_rest_is_the_original(
    folder: Path, kind: str
) -> None:
    model = tiny(kind)
    model.save_pretrained(kind)
    loaded = load_model(kind, whole=True)
    ids, mask = torch.from_numpy(IDS), torch.from_numpy(MASK)
    wish = {"*": "taylor2", "*1*": "keep"}
    found = linexport.linearize(loaded, (ids, mask), map=wish, bench=False)
    first, second = found.report.layers
    assert first.map == "taylor2" and second.map is None
    assert first.causal is (kind == "gpt2") and first.masked
    assert first.projection is not None and 0 < first.layer_error < 1
    assert found.report.rest_error < 1e-5 < found.report.output_error < 0.5
    with torch.no_grad():
        got, want = found.module(ids, mask), model(input_ids=ids, attention_mask=mask)[0]
    there = mask.bool()
    assert 1e-5 < (got - want)[there].norm() / want[there].norm() < 0.5


@pytest.mark.parametrize("name", ["elu1", "window4+elu1"])
def test_a_decoder_of_grouped_heads_streams_without_a_mask(folder: Path, name: str) -> None:
    """transformers repeats keys and writes the causal mask out where the model is traced."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    loaded = load_model("llama", whole=True)
    ids = torch.from_numpy(IDS)
    found = linexport.linearize(loaded, (ids,), map=name, bench=False, force=True)
    found.save("linear.pt2")
    traced = trace(load_model("linear.pt2"))
    model = passes.rewrite(traced.graph, weights=traced.weights).model
    states = find_states(model)
    assert not classify(model, states).mixing
    assert any(s.past.startswith("past_state") for s in states)
    assert any(s.past.startswith("past_window") for s in states) is ("window" in name)


def test_a_decoder_calibrated_without_a_mask_has_none_and_streams_beside_softmax(
    folder: Path,
) -> None:
    """An input for a mask would not be looked at, and kept the softmax layer from streaming."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads)
    transformers.LlamaForCausalLM(config).save_pretrained("llama")
    wish = {"*0*": "keep", "*1*": "window4+elu1"}
    loaded, ids = load_model("llama", whole=True), torch.from_numpy(IDS)
    found = linexport.linearize(loaded, (ids,), map=wish, bench=False, force=True)
    found.save("linear.pt2")
    saved = load_model("linear.pt2")
    assert len(saved.args) == 1
    torch.testing.assert_close(saved.module(ids), found.module(ids))
    traced = trace(saved)
    model = passes.rewrite(traced.graph, weights=traced.weights).model
    states = find_states(model)
    assert not classify(model, states).mixing
    assert {"past_key_0", "past_value_0"} <= {s.past for s in states}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_the_linear_form_is_measured_and_converts(folder: Path, cli: Cli, kind: str) -> None:
    tiny(kind).save_pretrained(kind)
    options = ("--data", "rows.npz", "--map", "taylor2", "--lengths", "16,64", "--json")
    done = cli("linearize", kind, "-o", "linear.pt2", *options)
    found = done.json()
    assert CLASSES[kind] in found["source"]["description"]
    assert done.code in (0, 3) and [row["length"] for row in found["latency"]] == [16, 64]
    manifest = linexport.convert("linear.pt2", "artifact", bench=False)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 2


def test_a_factory_may_return_a_language_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("gpt2").save_pretrained("gpt2")
    monkeypatch.chdir("gpt2")
    loaded = load_model("saved_language_model:make", whole=True)
    found = linexport.linearize(loaded, torch.from_numpy(IDS), map="taylor2", bench=False)
    assert [row.map for row in found.report.layers] == ["taylor2"] * 2


def test_a_model_of_something_else_than_tokens_is_refused() -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    with pytest.raises(UnsupportedModelError, match="and its decoder more; expected input_ids"):
        Whole(transformers.T5Model(transformers.T5Config(**sizes)))


def test_an_architecture_that_is_no_model_is_refused(folder: Path, cli: Cli) -> None:
    tiny("gpt2").save_pretrained("gpt2")
    config = json.loads(Path("gpt2/config.json").read_text())
    for wrong in ("Trainer", "os"):
        Path("gpt2/config.json").write_text(json.dumps({**config, "architectures": [wrong]}))
        done = cli("linearize", "gpt2", "-o", "linear.pt2", "--data", "rows.npz", "--json")
        assert done.code == 4 and "is no model of transformers" in done.json()["message"]
