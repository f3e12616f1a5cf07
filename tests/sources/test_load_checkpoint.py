"""linexport checkpoints: loading, and every way the file can be wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linexport import models
from linexport.errors import UnsupportedModelError
from linexport.models.feature_maps import kinds
from linexport.sources import load_model

CONFIG = {"dim": 8, "num_heads": 2, "layers": 1, "hidden_dim": 8}


@pytest.fixture(scope="module")
def model() -> models.ReferenceModel:
    torch.manual_seed(0)
    return models.build("language_model", CONFIG).eval()


@pytest.fixture
def checkpoint(model: models.ReferenceModel, tmp_path: Path) -> Callable[..., Path]:
    """`checkpoint(key=value)`: the file with keys of its dict replaced, or left out for None."""

    def write(**changes: Any) -> Path:
        path = tmp_path / "model.pt"
        models.save(model, path)
        if changes:
            content = torch.load(path, weights_only=True) | changes
            torch.save({k: v for k, v in content.items() if v is not None}, path)
        return path

    return write


def test_a_loaded_checkpoint_is_the_saved_model(
    checkpoint: Callable[..., Path], model: models.ReferenceModel
) -> None:
    path = checkpoint()
    loaded = load_model(path, seed=3)
    assert not loaded.module.training
    assert loaded.source.kind == "checkpoint"
    assert loaded.source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.source.description.startswith("language_model, 2.5 k")
    assert loaded.integer_ranges == {0: (0, 256)}
    assert loaded.warnings == ()
    assert loaded.args[0].shape == (2, 100)
    assert len(loaded.dynamic_shapes) == len(loaded.args)
    torch.testing.assert_close(loaded.module(*loaded.args), model(*loaded.args))


def test_attributes_of_the_state_dict_are_not_read(
    checkpoint: Callable[..., Path], model: models.ReferenceModel
) -> None:
    weights = model.state_dict()
    weights._metadata = dict.fromkeys(weights._metadata, (1, 2))  # type: ignore[attr-defined]
    loaded = load_model(checkpoint(state_dict=weights))
    torch.testing.assert_close(loaded.module.state_dict(), model.state_dict())


def test_the_seed_draws_the_examples(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint()
    first, again, other = (load_model(str(path), seed=seed).args[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_it_can_be_exported_as_loaded(checkpoint: Callable[..., Path]) -> None:
    loaded = load_model(checkpoint())
    torch.export.export(loaded.module, loaded.args, dynamic_shapes=loaded.dynamic_shapes)


@pytest.mark.parametrize("name", kinds())
def test_every_feature_map_loads(tmp_path: Path, name: str) -> None:
    config = {"num_heads": 2, "head_dim": 4, "causal": False, "feature_map": name}
    models.save(models.build("linear_attention_layer", config), tmp_path / "m.pt")
    assert load_model(tmp_path / "m.pt").source.kind == "checkpoint"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"version": 2}, "format version 2; this linexport reads up to 1. Update linexport"),
        ({"version": "1"}, "version '1'"),
        ({"version": None}, "version None"),
        ({"version": True}, "version True"),
        ({"model": "nothing"}, r"Unknown model 'nothing'; expected one of .*language_model"),
        ({"model": 7}, "'model' is int, not a str"),
        ({"config": {**CONFIG, "dimm": 8}}, r"unknown key 'dimm'. Did you mean 'dim'"),
        ({"config": {**CONFIG, "dim": "8"}}, "'dim' is '8'"),
        ({"config": [1]}, "'config' is list, not a dict"),
        ({"state_dict": None}, "'state_dict' is nothing, not a dict"),
        ({"state_dict": {"a": 1}}, "not all tensors"),
        ({"state_dict": {}}, r"embedding.weight is missing.*and \d+ more"),
        ({"config": {**CONFIG, "dim": 16}}, r"has shape \(256, 8\), expected \(256, 16\)"),
        ({"config": {**CONFIG, "dim": 2**20}}, r"expected \(256, 1048576\)"),
        ({"format": "other"}, "a training checkpoint"),
        ({"format": None}, "a training checkpoint"),
    ],
)
def test_wrong_content_is_explained(
    checkpoint: Callable[..., Path], changes: dict[str, Any], match: str
) -> None:
    path = checkpoint(**changes)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


def test_extra_weights_are_named(
    checkpoint: Callable[..., Path], model: models.ReferenceModel
) -> None:
    weights = model.state_dict() | {"extra": torch.ones(1)}
    with pytest.raises(UnsupportedModelError, match="extra is not in the model"):
        load_model(checkpoint(state_dict=weights))


def test_weights_that_cannot_be_copied_are_refused(
    checkpoint: Callable[..., Path], model: models.ReferenceModel
) -> None:
    weights = model.state_dict()
    weights["embedding.weight"] = torch.ones(256, 8, device="meta")
    with pytest.raises(UnsupportedModelError, match="cannot be copied"):
        load_model(checkpoint(state_dict=weights))


def test_nan_and_inf_are_counted_and_refused(
    checkpoint: Callable[..., Path], model: models.ReferenceModel
) -> None:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["embedding.weight"][0, :3] = float("nan")
    weights["norm.weight"][0] = float("-inf")
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(checkpoint(state_dict=weights))
    assert "embedding.weight has 3 NaN of 2048 values" in str(refused.value)
    assert "norm.weight has 1 Inf of 8 values" in str(refused.value)


def test_many_nan_weights_are_summed_up(
    checkpoint: Callable[..., Path], model: models.ReferenceModel
) -> None:
    weights = {name: torch.full_like(t, float("nan")) for name, t in model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=f"; {len(weights) - 5} more weights\\."):
        load_model(checkpoint(state_dict=weights))
