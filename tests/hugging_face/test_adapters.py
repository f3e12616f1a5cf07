"""Adapters of peft's, merged on loading: beside their formula in float64, and beside peft."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import linexport
from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.sources import load_model
from tests.support import SCRIPTS
from tests.support.environments import made
from tests.support.families import TINY, save_model
from tests.support.towers import WITH_PICTURES

pytestmark = pytest.mark.usefixtures("one_thread")

MAMBA = {"lora_alpha": 6, "r": 3, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
PROJECTIONS = ("in_proj", "out_proj")


@pytest.fixture
def adapter(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """An adapter of the projections of a Mamba2, beside its model, which it names."""
    base = tmp_path / "model"
    shutil.copytree(model_folder("mamba2"), base)
    return write(base, tmp_path / "adapter", {**MAMBA, "base_model_name_or_path": "model"})


def write(base: Path, place: Path, config: dict[str, Any]) -> Path:
    """Write an adapter with random factors of rank 3 for every projection."""
    torch.manual_seed(2)
    found: dict[str, torch.Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(PROJECTIONS):
            found[f"base_model.model.{module}.lora_A.weight"] = torch.randn(3, weight.shape[1])
            found[f"base_model.model.{module}.lora_B.weight"] = torch.randn(weight.shape[0], 3) / 9
    assert len(found) == 8
    place.mkdir()
    save_file(found, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change(adapter: Path, edited: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    edited(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [({}, 2.0), ({"use_rslora": True}, 6 / math.sqrt(3)), ({"fan_in_fan_out": True}, 2.0)],
)
def test_weights_are_the_sum_of_the_formula(
    adapter: Path, settings: dict[str, Any], scale: float
) -> None:
    edit(adapter, **settings)
    own = load_file(adapter.parent / "model" / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    merged = dict(load_model(adapter).module.model.named_parameters())
    for name, weight in own.items():
        expected, place = weight.double(), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{place}.lora_A.weight" in factors:
            a, b = (factors[f"{place}.lora_{side}.weight"].double() for side in "AB")
            expected = expected + scale * b @ a
            assert (expected - weight).abs().max() > 0.1
        torch.testing.assert_close(merged[name].double(), expected, atol=1e-6, rtol=0)


def test_weights_that_are_a_pickle_are_named_so(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pickle \(adapter_model\.bin\), .* any code"):
        load_model(adapter)


def test_the_adapter_changes_the_digest_and_its_tokenizer_goes_first(adapter: Path) -> None:
    (adapter / "tokenizer_config.json").write_text('{"of": "adapter"}')
    loaded, alone = load_model(adapter), load_model(adapter.parent / "model")
    assert loaded.source.sha256 != alone.source.sha256
    assert loaded.source.location == str(adapter)
    assert adapter / "tokenizer_config.json" in loaded.files
    assert [path.name for path in loaded.files].count("tokenizer_config.json") == 1
    before = loaded.source.sha256
    edit(adapter, lora_alpha=7)
    assert load_model(adapter).source.sha256 != before


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"use_dora": True}, "use_dora is 'True', which is not merged"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"alpha_pattern": {"in_proj": 4}}, "alpha_pattern"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow is '3'"),
        ({"task_type": "QUESTION_ANS"}, "task_type is 'QUESTION_ANS'"),
        ({"task_type": ["CAUSAL_LM"]}, "task_type is"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS for .* causal_lm"),
        ({"r": 4}, r"of shapes .*, r 4"),
        ({"r": "3"}, "r '3', lora_alpha 6"),
        ({"lora_alpha": math.inf}, "lora_alpha inf"),
        ({"use_rslora": "no"}, "use_rslora 'no'"),
        (
            {"auto_mapping": {"base_model_class": "Two", "parent_library": "transformers_modules"}},
            "of the class Two in transformers_modules",
        ),
    ],
)
def test_settings_that_are_not_this_sum_are_refused(
    adapter: Path, settings: dict[str, Any], match: str
) -> None:
    edit(adapter, **settings)
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(adapter)


FIRST = "base_model.model.backbone.layers.0.mixer.in_proj"


@pytest.mark.parametrize(
    ("edited", "match"),
    [
        (lambda t: t.pop(f"{FIRST}.lora_B.weight"), "in_proj.lora_A"),
        (lambda t: t.update({"other.lora_A.weight": torch.ones(3, 3)}), "other.lora_A"),
        (lambda t: t.update({f"{FIRST}.lora_magnitude_vector": torch.ones(3)}), "which the model"),
        (lambda t: t.update({"base_model.model.lm_tail.weight": torch.ones(3)}), "lm_tail.weight"),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(3, 7)}), "in_proj.weight of sha"),
        (lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(3, 32).long()}), "torch.int64"),
        (lambda t: t.clear(), "no tensors"),
    ],
)
def test_tensors_of_another_model_are_refused(
    adapter: Path, edited: Callable[[dict[str, torch.Tensor]], object], match: str
) -> None:
    change(adapter, edited)
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(adapter)


def test_weights_that_the_model_shares_are_refused(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    base = model_folder("mamba2", tie_word_embeddings=True)
    config = {**MAMBA, "base_model_name_or_path": str(base)}
    place = write(base, tmp_path / "adapter", config)
    factors = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(3, 32),
        "base_model.model.lm_head.lora_B.weight": torch.ones(64, 3),
    }
    change(place, lambda tensors: tensors.update(factors))
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight, which the model shares with"):
        load_model(place)


@pytest.mark.parametrize("outer", ["model.language_model", "language_model.model", "model"])
@pytest.mark.parametrize("towers", [True, False])
def test_an_adapter_of_the_multimodal_class_is_merged(
    outer: str, towers: bool, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Into the language model of a folder with towers, and into that of a text model alone."""
    base = model_folder("qwen3_5_text")
    if towers:
        base = tmp_path / "base"
        save_model(WITH_PICTURES["qwen3_5"], "qwen3_5", base, "AutoModelForMultimodalLM")
    weights = dict(load_model(base, vision=False).module.model.named_parameters())
    torch.manual_seed(3)
    module = "layers.1.self_attn.q_proj"
    tensors: dict[str, torch.Tensor] = {}
    own = weights[f"model.{module}.weight"].detach().clone()
    a, b = torch.randn(4, own.shape[1]), torch.randn(own.shape[0], 4)
    for side, factor in (("A", a), ("B", b)):
        tensors[f"base_model.model.{outer}.{module}.lora_{side}.weight"] = factor
    place = tmp_path / "adapter"
    place.mkdir()
    save_file(tensors, place / "adapter_model.safetensors")
    config = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (place / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(base)})
    )
    merged = dict(load_model(place).module.model.named_parameters())
    torch.testing.assert_close(merged[f"model.{module}.weight"], own + 2 * b @ a)


def test_an_adapter_of_a_vision_tower_is_refused_by_name(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    base = model_folder("mamba2")
    place = write(base, tmp_path / "adapter", {**MAMBA, "base_model_name_or_path": str(base)})
    name = "base_model.model.model.visual.blocks.0.attn.qkv"
    factors = {f"{name}.lora_A.weight": torch.ones(3, 8), f"{name}.lora_B.weight": torch.ones(8, 3)}
    change(place, lambda tensors: tensors.update(factors))
    with pytest.raises(UnsupportedModelError, match=r"visual.*no module of Mamba2ForCausalLM"):
        load_model(place)


def test_files_that_are_not_there(adapter: Path) -> None:
    edit(adapter, base_model_name_or_path="elsewhere")
    with pytest.raises(UsageError, match="'elsewhere', where no model is"):
        load_model(adapter)
    edit(adapter, base_model_name_or_path=None)
    with pytest.raises(UsageError, match="names no model"):
        load_model(adapter)
    edit(adapter, base_model_name_or_path="model")
    (adapter / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(LinexportError, match="damaged safetensors"):
        load_model(adapter)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"weights as a pickle \(adapter_model.bin\)"):
        load_model(adapter)
    with pytest.raises(UsageError, match="is an adapter without its model"):
        load_model(adapter, whole=True)


@pytest.mark.services
def test_an_adapter_converts_and_is_validated(adapter: Path, tmp_path: Path) -> None:
    manifest = linexport.convert(adapter, tmp_path / "out", bench=False, threads=1)
    assert manifest.status == "ok" and "adapter merged" in manifest.source.description
    ids = np.random.default_rng(0).integers(3, 64, size=(2, 70))
    got = linexport.load(tmp_path / "out", threads=1).run(ids)["logits"]
    alone = load_model(adapter.parent / "model").module
    with torch.no_grad():
        plain = alone(torch.from_numpy(ids), torch.ones(2, 70).long()).numpy()
        merged = load_model(adapter).module(torch.from_numpy(ids), torch.ones(2, 70).long())
    assert np.abs(got - plain).max() > 0.1
    np.testing.assert_allclose(got, merged.numpy(), atol=1e-4)
    assert linexport.validate(tmp_path / "out", threads=1).status == "ok"


LM, CLASSES = "AutoModelForCausalLM", "AutoModelForSequenceClassification"


@pytest.mark.services
@pytest.mark.parametrize(
    ("auto", "settings"),
    [
        pytest.param(
            LM,
            {"target_modules": ["q_proj", "in_proj_qkv"], "task_type": "CAUSAL_LM"},
            marks=pytest.mark.slow,
        ),
        (LM, {"target_modules": "all-linear", "use_rslora": True, "fan_in_fan_out": True}),
        (LM, {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]}),
        pytest.param(
            LM,
            {"target_modules": ["down_proj", "q_proj"], "rank_pattern": {"q_proj": 2}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            CLASSES,
            {"target_modules": ["o_proj"], "task_type": "SEQ_CLS"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_outputs_are_those_of_the_model_that_peft_merges(
    tmp_path: Path, auto: str, settings: dict[str, Any]
) -> None:
    base, place = tmp_path / "model", tmp_path / "adapter"
    save_model({**TINY["qwen3_5_text"], "num_labels": 3}, "qwen3_5_text", base, auto)
    ids = np.random.default_rng(1).integers(3, 64, size=(3, 20))
    np.save(tmp_path / "ids.npy", ids)
    script = SCRIPTS / "peft_merged.py"
    given = (base, auto, place, json.dumps({"r": 4, "lora_alpha": 16, **settings}))
    files = (tmp_path / "ids.npy", tmp_path / "out.npy")
    python = made("peft") / "bin" / "python"
    subprocess.run([python, "-W", "ignore", script, *given, *files], check=True)
    tokens = torch.from_numpy(ids)
    with torch.no_grad():
        got = load_model(place).module(tokens, torch.ones_like(tokens)).numpy()
        original: Any = getattr(transformers, auto).from_pretrained(base).eval()
        plain = original(input_ids=tokens)[0].numpy()
    expected = np.load(tmp_path / "out.npy")
    assert np.abs(expected - plain).max() > 0.1
    np.testing.assert_allclose(got, expected, atol=2e-5)
