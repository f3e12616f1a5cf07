"""Checkpoints of flash-linear-attention: our modules against what the library itself computed.

``recorded/`` holds weights and logits of that library, written by ``reference.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.models.flash_linear_attention import OTHERS, build, layouts
from linexport.sources import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent
LABELS = list(json.loads((HERE / "configurations.json").read_text()))
TOLERANCE = 1e-5
"""Share of the largest logit: both sides compute in float32."""


def recorded(label: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Configuration, weights and arrays."""
    with np.load(HERE / "recorded" / f"{label}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    weights = {
        name.removeprefix("weight:"): torch.from_numpy(arrays.pop(name))
        for name in list(arrays)
        if name.startswith("weight:")
    }
    return json.loads(str(arrays.pop("config"))), weights, arrays


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(label, **settings)``: a model folder as the library would have saved it."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the hf extra")

    def write(label: str, drop: tuple[str, ...] = (), **settings: Any) -> Path:
        config, weights, _ = recorded(label)
        (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
        kept = {n: w.contiguous().clone() for n, w in weights.items() if n not in drop}
        safetensors.save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return write


def test_widths_that_cannot_be_computed_are_refused(folder: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="no model can be built"):
        load_model(folder("gla", vocab_size=2**63))
    with pytest.raises(UnsupportedModelError, match=r"more than .* parameters"):
        load_model(folder("gla", vocab_size=2**40))


def test_every_layout_is_recorded() -> None:
    assert {recorded(label)[0]["model_type"] for label in LABELS} == set(layouts())


@pytest.mark.parametrize("label", LABELS)
def test_logits_are_those_of_the_library(label: str) -> None:
    config, weights, arrays = recorded(label)
    model = build(config).eval()
    model.load_state_dict(weights)
    ids, mask = torch.from_numpy(arrays["ids"]), torch.from_numpy(arrays["mask"])
    keep = arrays["mask"].astype(bool)
    with torch.no_grad():
        whole = model(ids, torch.ones_like(mask)).numpy()
        padded = model(ids, mask).numpy()
    assert error(whole, arrays["whole"]) < TOLERANCE
    assert error(padded[keep], arrays["padded"][keep]) < TOLERANCE
    # Padding in front moves the first token; behind, it changes nothing.
    assert error(padded[1, 4:], arrays["whole"][1, 4:]) > 1e-3
    assert error(padded[2, :9], arrays["whole"][2, :9]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fla", "mamba_ssm", "triton")),
    reason="needs flash-linear-attention, mamba-ssm and triton, see reference.py",
)
def test_recorded_is_what_the_library_computes(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "reference.py"), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    for label in LABELS:
        _, _, arrays = recorded(label)
        with np.load(tmp_path / f"{label}.npz") as again:
            for name in ("whole", "padded"):
                np.testing.assert_allclose(again[name], arrays[name], rtol=1e-4, atol=1e-5)


SHORT = ["seq=1:8:32"]


def check_artifact(source: Path, place: Path, label: str) -> linexport.Manifest:
    """Convert a folder and compare the artifact with the library, whole and in pieces."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    manifest = linexport.convert(source, place, bench=False, threads=1, dims=SHORT)
    assert manifest.status == "ok" and manifest.streaming.passed
    _, _, arrays = recorded(label)
    artifact, keep = linexport.load(place, threads=1), arrays["mask"].astype(bool)
    assert error(artifact.run(arrays["ids"])["logits"], arrays["whole"]) < TOLERANCE
    padded = artifact.run(arrays["ids"], arrays["mask"])["logits"]
    assert error(padded[keep], arrays["padded"][keep]) < TOLERANCE
    stream = artifact.stream()
    parts = [stream.step(arrays["ids"][:, p]) for p in (slice(5), slice(5, 6), slice(6, 12))]
    pieces = np.concatenate([part["logits"] for part in parts], 1)
    assert error(pieces, arrays["whole"]) < TOLERANCE
    return manifest


@pytest.mark.services
def test_a_folder_becomes_an_artifact_that_streams(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Of the retention network: its positions are a state too."""
    manifest = check_artifact(folder("retnet"), tmp_path / "artifact", "retnet")
    assert manifest.fused == {"LinearAttention": 3}
    assert manifest.source.kind == "hugging_face"
    assert [s.shape[1:] for s in manifest.states] == [(1, 1, 1), (2, 8, 16), (2, 8, 16)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "fused"),
    [
        ("gla", {"LinearAttention": 2}),
        (
            "gla-shared-heads",
            {"LinearAttention": 2, "CausalConvWithState": 6},
        ),
        ("delta_net", {"LinearAttention": 2, "CausalConvWithState": 6}),
        ("gated_deltanet", {"LinearAttention": 2, "CausalConvWithState": 6}),
        ("gated_deltanet-shared-keys", {"LinearAttention": 2}),
        ("rwkv6", {"LinearAttention": 2, "CausalConvWithState": 6}),
        ("rwkv7", {"GeneralizedDeltaRule": 2, "CausalConvWithState": 4}),
        ("kda", {"LinearAttention": 2, "CausalConvWithState": 6}),
        ("kda-bounded", {"LinearAttention": 2}),
        ("comba", {"GeneralizedDeltaRule": 2, "CausalConvWithState": 6}),
        ("gated_deltaproduct", {"LinearAttention": 2, "CausalConvWithState": 6}),
        ("hgrn", {"LinearAttention": 2}),
        ("hgrn-conv", {"LinearAttention": 2, "CausalConvWithState": 4}),
        ("hgrn2", {"LinearAttention": 2}),
        ("hgrn2-conv", {"LinearAttention": 2, "CausalConvWithState": 6}),
        ("linear_attn", {"LinearAttention": 2}),
        ("linear_attn-shared-heads", {"LinearAttention": 2}),
        ("gdn2", {"GeneralizedDeltaRule": 2, "CausalConvWithState": 6}),
        ("gdn2-shared-keys", {"GeneralizedDeltaRule": 2}),
        ("mamba3", {"LinearAttention": 2, "CausalConvWithState": 2}),
        ("mamba3-groups", {"LinearAttention": 2, "CausalConvWithState": 2}),
        ("gsa", {"LinearAttention": 4}),
        ("gsa-shared-heads", {"LinearAttention": 4, "CausalConvWithState": 6}),
        ("lightnet", {"LinearAttention": 4, "StabilizedExp": 2}),
        (
            "lightnet-conv",
            {"LinearAttention": 4, "StabilizedExp": 2, "CausalConvWithState": 6},
        ),
    ],
)
def test_folders_become_artifacts(
    folder: Callable[..., Path], tmp_path: Path, label: str, fused: dict[str, int]
) -> None:
    assert check_artifact(folder(label), tmp_path / "artifact", label).fused == fused


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "settings", "words"),
    [
        ("gla", {"attn": {"layers": [1]}}, r"gla with attn = \{'layers': \[1\]\} is not"),
        (
            "gla",
            {"hidden_act": "powlu"},
            "hidden_act = 'powlu' is not implemented; expected 'swish",
        ),
        ("gla", {"feature_map": "relu"}, "feature_map = 'relu'"),
        ("retnet", {"attnres_block_size": 2}, "attnres_block_size = 2"),
        ("delta_net", {"qk_activation": "gelu"}, "expected 'silu' or 'relu' or 'elu'"),
        ("delta_net", {"qk_norm": "max"}, "expected 'l2' or 'sum'"),
        ("gated_deltanet", {"output_gate_activation": "relu"}, "'swish' or 'silu' or 'sigmoid'"),
        ("kda", {"hidden_act": "powlu"}, "expected 'swish'"),
        ("gsa", {"feature_map": "t2r"}, "feature_map = 't2r' is not implemented"),
        ("gdn2", {"conv_bias": True}, "conv_bias = True is not implemented; expected False"),
        ("rwkv6", {"hidden_act": "gelu"}, "expected 'sqrelu'"),
        ("rwkv7", {"head_dim": None, "num_heads": None}, "without head_dim and num_heads"),
        ("linear_attn", {"feature_map": "hedgehog"}, "feature_map = 'hedgehog'"),
        ("linear_attn", {"norm_feature_map": True}, "norm_feature_map = True"),
        ("linear_attn", {"tie_feature_map_qk": True}, "tie_feature_map_qk = True"),
    ],
)
def test_settings_that_are_not_implemented_are_named(
    label: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        build({**recorded(label)[0], **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_heads": "two"}, "'num_heads' is 'two'; expected int"),
        ({"hidden_size": 0}, "'hidden_size' is 0; expected int >= 1"),
        ({"expand_k": 0.3}, "key width = 2.4; expected a positive integer"),
        ({"model_type": "hgrn2", "expand_ratio": None, "num_heads": None}, "neither expand_ratio"),
        (
            {"model_type": "hgrn2", "expand_ratio": None, "num_heads": 5},
            "5 heads for a width of 16",
        ),
        (
            {"model_type": "lightnet", "expand_ratio": None, "num_heads": None},
            "neither expand_ratio",
        ),
        ({"model_type": "lightnet", "num_heads": 5}, "5 heads for a width of 16"),
        ({"model_type": "hgrn", "expand_ratio": 0.3}, "width of a layer = 4.8"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build({**recorded("gla")[0], **settings})


@pytest.mark.parametrize("model_type", OTHERS)
def test_layouts_without_a_module_are_refused_by_name(
    folder: Callable[..., Path], model_type: str
) -> None:
    place = folder("gla", model_type=model_type)
    words = f"model_type '{model_type}' of flash-linear-attention, .*converted are comba, delta_net"
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(place)


def test_a_layout_is_converted_or_refused() -> None:
    assert not layouts().keys() & set(OTHERS)


def test_weights_that_do_not_fit_are_refused(folder: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight is missing"):
        load_model(folder("gla", drop=("lm_head.weight",)))
    with pytest.raises(UnsupportedModelError, match=r"shape \(32, 16\), expected \(48, 16\)"):
        load_model(folder("gla", intermediate_size=48))
    with pytest.raises(UnsupportedModelError, match=r"layers.1.attn.g_norm.weight is not in"):
        load_model(folder("gla-separate-gate", num_hidden_layers=1))


def test_large_exponents_do_not_overflow() -> None:
    """lightnet's keys are exponents: exp(200) is no float32."""
    config, weights, _ = recorded("lightnet")
    weights = {n: w * 2000 if "k_proj" in n else w for n, w in weights.items()}
    model = build(config).eval()
    model.load_state_dict(weights)
    ids = torch.arange(18)[None]
    with torch.no_grad():
        logits = model(ids, torch.ones_like(ids))
        exact = model.double()(ids, torch.ones_like(ids))
    assert error(logits.numpy(), exact.numpy()) < 1e-4


def test_tied_weights_may_be_stored_once(folder: Callable[..., Path]) -> None:
    label = "gla-separate-gate"
    loaded = load_model(folder(label, drop=("lm_head.weight",)))
    _, _, arrays = recorded(label)
    with torch.no_grad():
        ids = torch.from_numpy(arrays["ids"])
        logits = loaded.module(ids, torch.ones_like(ids)).numpy()
    assert error(logits, arrays["whole"]) < TOLERANCE
