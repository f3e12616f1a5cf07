"""Classifiers and base models of transformers, beside the library itself on padded rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.sources import load_model
from linexport.timing.peak_memory import peak_megabytes
from tests.support.families import TINY, save_model

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

Folder = Callable[..., Path]
SEQUENCES, TOKENS, BASE = (
    f"AutoModel{end}" for end in ("ForSequenceClassification", "ForTokenClassification", "")
)
CLASSIFIERS = [
    (kind, auto)
    for auto in (SEQUENCES, TOKENS)
    for kind in ("qwen3_5_text", "qwen3_next", "minimax", "jamba", "zamba", "zamba2")
    if auto == SEQUENCES or kind in ("qwen3_next", "minimax")
]
BASES = [
    *("mamba2", "recurrent_gemma"),
    *(pytest.param(kind, marks=pytest.mark.services) for kind in ("lfm2", "qwen3_5_text")),
]


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """``head_folder(model_type, auto class)``: a folder of such a model, made once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(kind: str, auto: str) -> Path:
        if (kind, auto) not in made:
            made[kind, auto] = tmp_path_factory.mktemp(kind)
            save_model({**TINY[kind], "num_labels": 3}, kind, made[kind, auto], auto)
        return made[kind, auto]

    return folder


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 9, 4 and 1 tokens, one of which is the id of padding and in the middle."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 64, (3, 9), generator=generator), torch.ones(3, 9).long()
    ids[0, 3] = 0
    for row, length in enumerate((9, 4, 1)):
        away = slice(0, 9 - length) if side == "left" else slice(length, 9)
        ids[row, away] = mask[row, away] = 0
    return ids, mask


def library(folder: Path, auto: str, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """What transformers gives, called as its users do."""
    model: Any = getattr(transformers, auto).from_pretrained(folder).eval()
    with torch.no_grad():
        result: np.ndarray = model(input_ids=ids, attention_mask=mask)[0].numpy()
    return result


def both(folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The original, and the module that is traced in its place, at the start of sequences."""
    loaded = load_model(folder)
    step = loaded.decode_module
    assert step is not None
    past = ({s.past.removeprefix("past_"): torch.from_numpy(s.start(3)) for s in step.states},)
    with torch.no_grad(), step.patched():
        traced = step.module(ids, mask, *(past if step.states else ()))
    with torch.no_grad():
        original = loaded.module(ids, mask)
    return original.numpy(), (traced[0] if step.states else traced).numpy()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("kind", "auto"), CLASSIFIERS)
def test_a_classifier_gives_what_transformers_gives(
    head_folder: Folder, kind: str, auto: str, side: str
) -> None:
    ids, mask = padded(side)
    expected = library(head_folder(kind, auto), auto, ids, mask)
    kept = slice(None) if auto == SEQUENCES else mask.bool().numpy()
    for values in both(head_folder(kind, auto), ids, mask):
        assert values.shape == expected.shape
        np.testing.assert_allclose(values[kept], expected[kept], atol=2e-5, rtol=0)


def test_the_mask_tells_padding_whatever_token_it_is(head_folder: Folder) -> None:
    """transformers itself would take the class of a padded position here."""
    folder = head_folder("jamba", SEQUENCES)
    for side in ("left", "right"):
        ids, mask = padded(side)
        expected = library(folder, SEQUENCES, ids, mask)
        others = torch.where(mask.bool(), ids, 7)
        for values in both(folder, others, mask):
            np.testing.assert_allclose(values, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", BASES)
def test_pooling_takes_the_tokens_that_are_not_padding(head_folder: Folder, kind: str) -> None:
    folder = head_folder(kind, BASE)
    for side, pooling in (("left", "mean"), ("right", "last"), ("left", "last"), ("left", "cls")):
        loaded = load_model(folder, pooling=pooling)
        assert loaded.decode_module is not None and not loaded.decode_module.states
        ids, mask = padded(side)
        with torch.no_grad(), loaded.decode_module.patched():
            got = loaded.decode_module.module(ids, mask).numpy()
        for row, real in enumerate(mask.bool()):
            alone = ids[row, real][None]
            [hidden] = library(folder, BASE, alone, torch.ones_like(alone))
            expected = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
            np.testing.assert_allclose(got[row], expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("auto", [SEQUENCES, TOKENS, BASE])
def test_of_a_model_with_a_vision_tower_text_is_taken(tmp_path: Path, auto: str) -> None:
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16}
    places = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = {
        **{"text_config": TINY["qwen3_5_text"], "vision_config": vision, "pad_token_id": 0},
        **dict(zip(places, range(60, 64), strict=True)),
    }
    save_model(config, "qwen3_5", tmp_path / "model", auto)
    assert "takes text alone" in load_model(tmp_path / "model").warnings[0]
    ids, mask = padded("left")
    expected = library(tmp_path / "model", auto, ids % 60, mask)
    kept = slice(None) if auto == SEQUENCES else mask.bool().numpy()
    for values in both(tmp_path / "model", ids % 60, mask):
        np.testing.assert_allclose(values[kept], expected[kept], atol=2e-5, rtol=0)


def test_a_base_model_streams_its_hidden_states(head_folder: Folder, tmp_path: Path) -> None:
    folder = head_folder("mamba2", BASE)
    manifest = linexport.convert(folder, tmp_path / "out", bench=False, threads=1)
    assert (manifest.status, manifest.head) == ("ok", "hidden_states")
    assert manifest.parity.greedy is None and manifest.streaming.passed
    artifact = linexport.load(tmp_path / "out", threads=1)
    ids = np.random.default_rng(0).integers(3, 64, size=(2, 131))
    expected = library(folder, BASE, torch.from_numpy(ids), torch.ones(2, 131).long())
    np.testing.assert_allclose(artifact.run(ids)["last_hidden_state"], expected, atol=1e-4)
    stream = artifact.stream()
    parts = [stream.step(ids[:, :70]), *(stream.step(ids[:, t : t + 1]) for t in range(70, 131))]
    joined = np.concatenate([part["last_hidden_state"] for part in parts], 1)
    np.testing.assert_allclose(joined, expected, atol=1e-4)
    with pytest.raises(UsageError, match=r"not a language model.*hidden_states"):
        artifact.generate([5])
    assert linexport.validate(tmp_path / "out", threads=1).status == "ok"


@pytest.mark.services
@pytest.mark.parametrize(
    ("kind", "auto", "pooling"), [("jamba", SEQUENCES, None), ("mamba2", BASE, "mean")]
)
def test_one_output_of_a_sequence_in_plain_onnxruntime(
    head_folder: Folder, tmp_path: Path, kind: str, auto: str, pooling: str | None
) -> None:
    folder = head_folder(kind, auto)
    place = tmp_path / "out"
    manifest = linexport.convert(folder, place, bench=False, threads=1, pooling=pooling)
    assert manifest.status == "ok" and manifest.states == ()
    assert "whole sequence" in manifest.why_stateless
    session = onnxruntime.InferenceSession(place / "model.onnx")
    for side in ("left", "right"):
        ids, mask = padded(side)
        [got] = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        for row, real in enumerate(mask.bool()):
            alone = ids[row, real][None]
            [expected] = library(folder, auto, alone, torch.ones_like(alone))
            expected = expected.mean(0) if pooling else expected
            np.testing.assert_allclose(got[row], expected, atol=5e-5, rtol=0)
    with pytest.raises(UsageError, match=r"does not stream: its output .* whole sequence"):
        linexport.load(place).stream()
    assert linexport.validate(place, threads=1).status == "ok"


@pytest.mark.services
@pytest.mark.parametrize(
    ("kind", "auto", "pooling"),
    [
        ("qwen3_next", TOKENS, None),
        pytest.param("qwen3_next", SEQUENCES, None, marks=pytest.mark.slow),
        pytest.param("mamba2", BASE, "mean", marks=pytest.mark.slow),
    ],
)
def test_weights_in_fewer_bits_are_chosen_and_compared_on_text(
    head_folder: Folder, tmp_path: Path, kind: str, auto: str, pooling: str | None
) -> None:
    folder, place = head_folder(kind, auto), tmp_path / "out"
    manifest = linexport.convert(
        folder, place, weights="int8", bench=False, threads=1, pooling=pooling
    )
    record = manifest.quantisation
    assert (manifest.status, record.divergence) == ("ok", None)
    assert "token ids" in record.data and 0 < record.output_error < 0.2
    again = linexport.validate(place, threads=1).quantisation
    assert again.output_error == pytest.approx(record.output_error, rel=1e-2)


def test_automatic_weights_are_refused_before_anything_is_converted(
    head_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linexport.conversion.pipeline.announced", lambda *a: pytest.fail("late"))
    folder = head_folder("qwen3_next", TOKENS)
    with pytest.raises(UsageError, match=r"for language models; .* token_classification"):
        linexport.convert(folder, tmp_path / "out", weights="auto")
    with pytest.raises(UsageError, match=r"for language models; .* pooled"):
        linexport.convert(
            head_folder("mamba2", BASE), tmp_path / "out", weights="auto", pooling="mean"
        )


@pytest.mark.services
def test_the_memory_probe_loads_the_original_with_its_pooling(
    head_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []

    def probe(
        baseline: str, model: str, inputs: Path, small: Path, target: str, *rest: Any
    ) -> tuple[None, str]:
        loading, _ = rest
        requested.append((baseline, loading["pooling"]))
        return None, "not run"

    monkeypatch.setattr("linexport.timing.baselines.peak_megabytes", probe)
    folder = head_folder("mamba2", BASE)
    linexport.convert(
        folder, tmp_path / "out", pooling="mean", lengths=(8,), threads=1, bench="full"
    )
    assert ("pytorch", "mean") in requested
    np.savez(tmp_path / "inputs.npz", np.ones((1, 8), np.int64), np.ones((1, 8), np.int64))
    files = [tmp_path / "inputs.npz"] * 2
    assert "'max'" in peak_megabytes("pytorch", str(folder), *files, loading={"pooling": "max"})[1]


def edited(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    place = tmp_path / "edited"
    shutil.copytree(folder, place)
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return place


def test_other_heads_are_refused_by_name(head_folder: Folder, tmp_path: Path) -> None:
    folder = head_folder("qwen3_next", TOKENS)
    place = edited(folder, tmp_path, architectures=["Qwen3NextForQuestionAnswering"])
    with pytest.raises(UnsupportedModelError, match="Qwen3NextForQuestionAnswering; converted are"):
        load_model(place)


def test_a_head_that_the_library_does_not_have_is_refused(
    model_folder: Folder, tmp_path: Path
) -> None:
    place = edited(model_folder("lfm2"), tmp_path, architectures=["Lfm2ForTokenClassification"])
    with pytest.raises(UnsupportedModelError, match=r"'lfm2'.*AutoModelForTokenClassification"):
        load_model(place)


def test_a_classifier_without_a_token_of_padding_is_refused(
    head_folder: Folder, tmp_path: Path
) -> None:
    place = edited(head_folder("jamba", SEQUENCES), tmp_path, pad_token_id=None)
    with pytest.raises(UnsupportedModelError, match="without a pad_token_id"):
        load_model(place)


def test_pooling_is_for_base_models(model_folder: Folder, head_folder: Folder) -> None:
    with pytest.raises(UsageError, match=r"base model.*Lfm2ForCausalLM.*AutoModel"):
        load_model(model_folder("lfm2"), pooling="mean")
    with pytest.raises(UsageError, match="'max'; expected one of mean, last, cls"):
        load_model(head_folder("mamba2", BASE), pooling="max")
    with pytest.raises(UsageError, match="for a base model in a Hugging Face folder"):
        load_model("small_models:causal", pooling="mean")
