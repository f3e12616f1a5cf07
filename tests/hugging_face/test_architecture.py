"""The class that config.json names is the one that is built, or the folder is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linexport.errors import UnsupportedModelError
from linexport.models.flash_linear_attention import layouts
from linexport.sources import load_model
from linexport.sources.hugging_face import supported
from linexport.sources.hugging_face.architecture import (
    CAUSAL,
    WITH_TOWER,
    builder,
    check_class,
    classes,
    is_native,
)
from linexport.sources.hugging_face.choose_head import head_of
from linexport.sources.hugging_face.heads import BASE, HEADS
from linexport.sources.hugging_face.vision import has_tower
from tests.support.families import TINY, WITH_TOWERS

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path("config.json")
KNOWN = {*transformers.CONFIG_MAPPING, *layouts()}
KINDS = sorted({*supported(), *TINY, *WITH_TOWERS} & KNOWN)
AUTOS = sorted({CAUSAL, BASE.auto, WITH_TOWER, *(head.auto for head in HEADS.values())})


def named(kind: str, architecture: str) -> tuple[dict[str, Any], str]:
    """A configuration and the class of transformers that builds its head."""
    config = {"model_type": kind, "architectures": [architecture]}
    auto = WITH_TOWER if has_tower(config) else head_of(HERE, config, None).auto
    return config, builder(kind, auto)


def edited(folder: Path, place: Path, **changes: Any) -> Path:
    shutil.copytree(folder, place)
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return place


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_that_the_library_has_for_a_type_is_taken(kind: str) -> None:
    found = {name for auto in AUTOS for name in classes(kind, auto)}
    assert found
    for architecture in found:
        config, auto = named(kind, architecture)
        check_class(HERE, config, auto, code=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_that_no_mapping_has_is_refused_for_every_type(kind: str) -> None:
    for architecture in ("SomeBidirectionalModel", "SomeForCausalLM", "SomeEncoder"):
        config, auto = named(kind, architecture)
        built = classes(kind, auto)
        if built:
            with pytest.raises(UnsupportedModelError, match=rf"{architecture}.*{built[0]}"):
                check_class(HERE, config, auto, code=False)
            assert not is_native({**config, "auto_map": {}}, auto)


def test_a_re_upload_of_a_model_of_another_class_is_refused_by_both_names(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = edited(model_folder("lfm2"), tmp_path / "model", architectures=["Lfm2TwoWayModel"])
    with pytest.raises(
        UnsupportedModelError,
        match=r"(?s)Lfm2TwoWayModel.*would be built is Lfm2Model.*factory, package",
    ):
        load_model(place, pooling="cls")


def test_a_class_of_another_type_is_refused(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = edited(model_folder("mamba2"), tmp_path / "model", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*built is Mamba2ForCausal"):
        load_model(place)


@pytest.mark.parametrize("auto", [None, "AutoModel"])
def test_auto_map_is_not_advised_to_be_deleted_where_another_class_is_built_then(
    auto: str | None, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """By the name in architectures, and by the one in auto_map where that says another."""
    own = {"AutoModel": "modeling.Lfm2TwoWayModel"}
    place = edited(
        model_folder("lfm2"),
        tmp_path / "model",
        architectures=["Lfm2Model" if auto else "Lfm2TwoWayModel"],
        auto_map=own if auto else {"AutoTokenizer": ["own.Own", None]},
    )
    with pytest.raises(UnsupportedModelError, match=r"trust_remote_code=True.*factory") as refused:
        load_model(place)
    assert "elete auto_map" not in str(refused.value)


def test_auto_map_is_advised_to_be_deleted_where_the_same_class_is_built(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    own = {"AutoModelForCausalLM": "modeling_lfm2.Lfm2ForCausalLM"}
    place = edited(model_folder("lfm2"), tmp_path / "model", auto_map=own)
    with pytest.raises(UnsupportedModelError, match=r"elete auto_map from config\.json"):
        load_model(place)
    config = json.loads((place / "config.json").read_text())
    del config["auto_map"]
    (place / "config.json").write_text(json.dumps(config))
    assert load_model(place).language is not None


def test_a_language_model_is_taken_from_the_class_with_towers(tmp_path: Path) -> None:
    config, auto = named("qwen3_5", "Qwen3_5ForConditionalGeneration")
    assert auto == WITH_TOWER
    check_class(HERE, config, CAUSAL, code=False)  # with --no-vision
    assert is_native({**config, "auto_map": {}}, CAUSAL)


def test_a_class_in_the_folder_is_compared_too() -> None:
    own = {"AutoModelForCausalLM": "modeling.OwnForCausalLM"}
    config = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": own}
    check_class(HERE, config, CAUSAL, code=True)
    with pytest.raises(UnsupportedModelError, match=r"OwnBidirectional.*built is OwnForCausalLM"):
        check_class(HERE, {**config, "architectures": ["OwnBidirectional"]}, CAUSAL, code=True)


def test_layouts_of_flash_linear_attention_are_compared_by_their_own_names() -> None:
    names = [layout.causal for layout in layouts().values()]
    assert len(set(names)) == len(names) and "GatedDeltaNetForCausalLM" in names
    config = {"model_type": "gla", "architectures": ["GLABidirectionalForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"built is GLAForCausalLM"):
        check_class(HERE, config, CAUSAL, code=False)


def test_linearize_refuses_a_class_of_another_type(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    place = edited(tmp_path / "model", tmp_path / "other", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM, .*model_type 'gpt2'"):
        load_model(place, whole=True)
