"""Every family of transformers: one graph for prefill and decode that equals eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import linexport
from linexport.inspection import inspect
from linexport.manifest.inspected import SourceInspection
from linexport.sources import load_model
from tests.support.families import LINEAR_LAYERS

pytestmark = pytest.mark.usefixtures("one_thread")

Converted = Callable[[str], tuple[Path, dict[str, Any]]]

TIERS = {"mamba2": (), "qwen3_5_text": (pytest.mark.services,)}
"""Of what is not slow: no attention layer, and the delta rule beside attention."""

PARAMETERS = [pytest.param(name, marks=TIERS.get(name, pytest.mark.slow)) for name in LINEAR_LAYERS]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_family_equals_its_original(converted_family: Converted, name: str) -> None:
    _, manifest = converted_family(name)
    assert manifest.status == "ok"
    assert manifest.fused.get("LinearAttention", 0) == LINEAR_LAYERS[name]
    parity = manifest.parity
    # Beyond it only by what the original itself loses in float32, which differs by processor.
    beyond = [case for case in parity.cases if case.max_relative_error > 5e-5]
    assert all(case.max_absolute_error <= 4 * case.rounding for case in beyond)
    assert parity.lengths == (1, 7, 63, 64, 65, 100, 150, 1000)
    names = {case.name for case in parity.cases}
    assert {"no padding", "left padding", "right padding"} <= names
    assert "6 pieces, then 64 tokens, left padding" in names
    assert parity.greedy.passed and parity.greedy.steps == 128
    assert manifest.streaming.passed is True


@pytest.mark.parametrize("name", PARAMETERS)
def test_rows_do_not_depend_on_padding_or_on_each_other(
    converted_family: Converted, name: str
) -> None:
    """Not compared with the original: a row alone, and the same row padded beside another."""
    artifact = linexport.load(converted_family(name)[0], threads=1)
    choose = np.random.default_rng(1)
    short, long = choose.integers(3, 64, size=(1, 30)), choose.integers(3, 64, size=(1, 75))
    alone = artifact.run(short)["logits"][0]
    for padded, rows in (([45, 0], slice(45, 75)), ([0, 45], slice(0, 30))):
        row = np.pad(short, [(0, 0), padded])
        mask = np.pad(np.ones_like(short), [(0, 0), padded])
        both = artifact.run(
            np.concatenate([row, long]), np.concatenate([mask, np.ones_like(long)])
        )["logits"][0, rows]
        assert np.abs(both - alone).max() <= 5e-5 * np.abs(alone).max()


@pytest.mark.services
def test_decoding_continues_a_padded_prefill(converted_family: Converted) -> None:
    artifact = linexport.load(converted_family("qwen3_5_text")[0], threads=1)
    tokens = np.random.default_rng(2).integers(3, 64, size=(1, 40))
    whole = artifact.run(tokens)["logits"][0]
    stream = artifact.stream()
    left = np.pad(tokens[:, :30], [(0, 0), (10, 0)])
    mask = np.pad(np.ones((1, 30), np.int64), [(0, 0), (10, 0)])
    stream.step(left, mask)
    steps = [stream.step(tokens[:, t : t + 1])["logits"][0, 0] for t in range(30, 40)]
    assert np.abs(np.stack(steps) - whole[30:]).max() <= 5e-5 * np.abs(whole).max()


@pytest.mark.services
def test_the_graph_of_a_small_model_is_small_and_says_what_its_states_are(
    converted_family: Converted,
) -> None:
    folder, manifest = converted_family("qwen3_5_text")
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    assert len(model.graph.node) <= 330
    assert {s.past: (s.shape, s.grows) for s in manifest.states} == {
        "past_mask": (("batch", "past"), 1),
        "past_conv_0": (("batch", 96, 3), None),
        "past_state_0": (("batch", 4, 8, 16), None),
        "past_key_1": (("batch", 2, "past", 16), 2),
        "past_value_1": (("batch", 2, "past", 16), 2),
    }
    outputs = {o.name: o.shape for o in manifest.outputs}
    assert outputs["logits"] == ("batch", "seq", 64)
    assert outputs["present_key_1"] == ("batch", 2, "past + seq", 16)
    assert set(manifest.dims) == {"batch", "seq"}


@pytest.mark.services
def test_inspect_says_beforehand_that_a_model_streams(
    model_folder: Callable[..., Path], converted_family: Converted
) -> None:
    found = inspect(model_folder("qwen3_5_text"))
    assert isinstance(found, SourceInspection)
    assert found.token_flow.mixing == 0
    assert found.states == converted_family("qwen3_5_text")[1].states


@pytest.mark.services
def test_states_are_saved_and_restored_at_any_length(
    converted_family: Converted, tmp_path: Path
) -> None:
    artifact = linexport.load(converted_family("qwen3_5_text")[0], threads=1)
    tokens = np.random.default_rng(3).integers(3, 64, size=(2, 12))
    stream = artifact.stream()
    stream.step(tokens[:, :11])
    stream.save(tmp_path / "state.npz")
    expected = stream.step(tokens[:, 11:])["logits"]
    other = artifact.stream()
    other.restore(tmp_path / "state.npz")
    np.testing.assert_array_equal(other.step(tokens[:, 11:])["logits"], expected)


@pytest.mark.services
def test_one_row_of_a_hybrid_begins_anew_and_the_others_go_on(
    converted_family: Converted,
) -> None:
    """Rows of keys and values have one length: what a row had before is padding for it now."""
    artifact = linexport.load(converted_family("qwen3_5_text")[0], threads=1)
    ids = np.random.default_rng(0).integers(3, 64, size=(3, 14))
    stream = artifact.stream()
    stream.step(ids[:, :6])
    stream.reset(rows=[1])
    got = stream.step(ids[:, 6:])["logits"]
    whole, fresh = artifact.run(ids)["logits"], artifact.run(ids[1:2, 6:])["logits"]
    limit = 1e-4 * np.abs(whole).max()
    assert np.abs(got[[0, 2]] - whole[[0, 2], 6:]).max() < limit
    assert np.abs(got[1] - fresh[0]).max() < limit


@pytest.mark.services
def test_validate_reads_the_folder_again(converted_family: Converted) -> None:
    folder, _ = converted_family("lfm2")
    manifest = linexport.validate(folder, threads=1, seed=7)
    assert manifest.status == "ok" and manifest.seed == 7


@pytest.mark.services
def test_a_failure_names_the_token_and_the_layer(
    model_folder: Callable[..., Path],
    miscompile: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from dataclasses import replace

    from linexport.parity.reference.plain_export import PlainExport

    miscompile("onnx", lambda n: replace(n, attributes={**n.attributes, "scale": 0.3}))
    monkeypatch.setattr(
        "linexport.parity.language.layers.run_plain_export", lambda *_: PlainExport(0.25)
    )
    manifest = linexport.convert(
        model_folder("qwen3_5_text"), tmp_path / "out", target="onnx", bench=False, threads=1
    )
    assert manifest.status == "parity_failed"
    first = manifest.parity.first_divergence
    assert first.layer.endswith("layers.0")
    assert (first.row, first.position, first.plain_relative_error) == (0, 0, 0.25)


def test_the_original_is_left_as_it_was(model_folder: Callable[..., Path]) -> None:
    """Loading and tracing swap functions of the library; afterwards it computes what it did."""
    from transformers.models.mamba2 import modeling_mamba2 as library

    from linexport.trace import trace

    before = dict(vars(library))
    loaded = load_model(model_folder("mamba2"))
    trace(loaded)
    assert vars(library) == before
    tokens = torch.ones(1, 5, dtype=torch.int64)
    loaded.module(tokens, tokens)
    assert vars(library) == before


@pytest.mark.services
def test_tokenizer_files_come_along(converted_family: Converted) -> None:
    folder, manifest = converted_family("lfm2")
    assert (folder / "tokenizer_config.json").read_text() == "{}"
    copied = {"tokenizer_config.json", "config.json", "generation_config.json"}
    assert copied <= set(manifest.files)


@pytest.mark.services
def test_a_factory_may_return_such_a_model(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder("lfm2"))
    made, read = load_model("saved_language_model:make"), load_model(model_folder("lfm2"))
    assert made.source.kind == "factory" and made.decode_module is not None
    assert made.decode_module.states == read.decode_module.states  # type: ignore[union-attr]
    tokens = torch.randint(64, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            made.module(tokens, torch.ones_like(tokens)),
            read.module(tokens, torch.ones_like(tokens)),
        )


@pytest.mark.services
def test_the_plain_export_beside_a_failure_is_of_the_original_module(
    model_folder: Callable[..., Path],
) -> None:
    """PyTorch exports this one, and rightly; of the module traced in its place it has no export."""
    from types import SimpleNamespace

    from linexport.parity.reference.plain_export import run_plain_export
    from linexport.parity.tolerances import TOLERANCES
    from linexport.trace import trace

    loaded = load_model(model_folder("lfm2"))
    tested: Any = SimpleNamespace(loaded=loaded, tolerance=TOLERANCES["float32"])
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    found = run_plain_export(tested, trace(loaded), ((ids, torch.ones_like(ids)), {}))
    assert found.failure is None and found.relative_error < 1e-5
