"""Model folders that are damaged, incomplete, unsafe or not understood: refused with advice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.sources import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    place = tmp_path / "model"
    shutil.copytree(model_folder("lfm2"), place)
    return place


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "no_such_model"}, "'no_such_model'.*lfm2.*qwen3_5"),
        ({"model_type": "vit"}, "'vit'.*converted and checked"),
        ({"model_type": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantised by aqlm.*checkpoint"),
        ({"hidden_size": 64}, r"has shape \(64, 32\), expected \(64, 64\)"),
        ({"num_hidden_layers": 3, "layer_types": ["conv"] * 3}, "is missing"),
        ({"layer_types": ["conv", "no_such_kind"]}, "not accept|cannot load"),
        (
            {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4, "factor": 2.0}},
            r"rope_parameters\.rope_type is 'su', which transformers 5.* does not know",
        ),
        ({"hidden_size": "many"}, "not accept.*expected int"),
        ({"architectures": {"a": "Lfm2ForCausalLM"}}, "architectures is .*expected a list"),
        ({"architectures": 7}, "architectures is 7; expected a list"),
        ({"architectures": "Lfm2ForCausalLM"}, "expected a list"),
        ({"architectures": [None]}, r"architectures is \[null\]"),
        ({"transformers_weights": "other.safetensors"}, "another file of weights; expected"),
        ({"text_config": [{"transformers_weights": None}]}, "another file of weights"),
        ({"num_hidden_layers": 2**32}, "num_hidden_layers is 4,294,967,296; expected at most"),
        ({"vocab_size": 2**40}, "more than .* parameters, which the weights beside it cannot"),
        ({"auto_map": "modeling.Own"}, r"code is in the folder \(modeling.Own\)"),
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}}, r"code is in the folder \(own.Own\)"),
    ],
)
def test_a_configuration_that_is_not_that_of_the_weights(
    folder: Path, changes: dict[str, Any], match: str
) -> None:
    edit(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(folder)


def test_tables_that_the_weights_could_not_fill_are_refused_before_memory_is_taken(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A factor of rotary positions that asks for 68 GB."""
    place = tmp_path / "model"
    shutil.copytree(model_folder("qwen3_5_text"), place)
    rope = json.loads((place / "config.json").read_text())["rope_parameters"]
    edit(place, rope_parameters={**rope, "partial_rotary_factor": 2**31 - 1})
    with pytest.raises(UnsupportedModelError, match=r"more than .* values of buffers, which the"):
        load_model(place)


def test_a_configuration_that_only_running_shows_to_be_wrong(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = tmp_path / "model"
    shutil.copytree(model_folder("mamba2"), place)
    edit(place, time_step_limit=[0.0])
    with pytest.raises(UnsupportedModelError, match=r"cannot be run on an example.*\(ValueError"):
        load_model(place)


def test_values_nested_without_end_are_refused(folder: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    edit(folder, extra=deep)
    with pytest.raises(UsageError, match="nested more than 50 deep"):
        load_model(folder)


def test_custom_code_is_not_run_unless_asked_for(folder: Path) -> None:
    marker = folder / "was_run"
    (folder / "modeling_own.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import Lfm2Config as OwnConfig, Lfm2ForCausalLM as OwnModel\n"
    )
    mapping = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    edit(folder, auto_map=mapping, model_type="own")
    with pytest.raises(UnsupportedModelError, match=r"modeling_own.*trust_remote_code=True"):
        load_model(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda f: (f / "config.json").write_text("{"), UsageError, "not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), UsageError, "not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), UnsupportedModelError, "without weights"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            UnsupportedModelError,
            "pickles",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-100]
            ),
            UnsupportedModelError,
            "damaged safetensors",
        ),
    ],
)
def test_files_that_are_missing_or_damaged(
    folder: Path, spoil: Callable[[Path], Any], error: type[Exception], match: str
) -> None:
    spoil(folder)
    with pytest.raises(error, match=match):
        load_model(folder)


def test_quantised_weights_are_known_by_their_dtype(folder: Path) -> None:
    """Where the configuration does not say so."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.feed_forward.w1.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"w1\.weight of dtype F8_E4M3.*quantised"):
        load_model(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match=r"1 of 2.*model-2-of-2"):
        load_model(folder)


def test_shards_may_not_leave_the_folder(folder: Path) -> None:
    index = {"weight_map": {"a": "../model.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match="outside the folder"):
        load_model(folder)


def test_the_files_that_were_hashed_are_those_that_transformers_loads(folder: Path) -> None:
    """An index beside one file of weights is read by neither."""
    from safetensors.torch import load_file, save_file

    before = load_model(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: w + 1 for name, w in weights.items()}, folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    beside = load_model(folder)
    assert beside.source.sha256 == before.source.sha256
    assert torch.equal(first_weight(beside), first_weight(before))
    (folder / "model.safetensors").unlink()
    sharded = load_model(folder)
    assert sharded.source.sha256 != before.source.sha256
    assert torch.equal(first_weight(sharded), first_weight(before) + 1)


def first_weight(loaded: Any) -> torch.Tensor:
    return next(loaded.module.parameters()).detach()


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"an adapter.*merge"):
        load_model(folder)


def test_a_folder_with_weights_as_gguf_beside_a_configuration_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"weights as GGUF; .*Give the GGUF file itself"
    ):
        load_model(folder)


def test_a_copied_file_that_is_a_link_out_of_the_folder_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    private = tmp_path / "id_ed25519"
    private.write_text("a secret")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer.json").symlink_to(private)
    with pytest.raises(UsageError, match=r"symbolic link to .*id_ed25519, outside its folder"):
        load_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "inside.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("inside.json")
    assert folder / "tokenizer.json" in load_model(folder).files


def test_links_of_a_snapshot_in_the_cache_may_lead_to_its_blobs(
    folder: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "models--name"
    snapshot, blobs = repository / "snapshots" / "revision", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        shutil.move(file, blobs / f"digest-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/digest-{file.name}")
    assert snapshot / "config.json" in load_model(snapshot).files
    (repository / "secret").write_text("{}")
    (snapshot / "tokenizer.json").unlink(missing_ok=True)
    (snapshot / "tokenizer.json").symlink_to("../../secret")
    with pytest.raises(UsageError, match="outside its folder"):
        load_model(snapshot)


def test_a_model_without_linear_attention_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no layer of linear attention"):
        load_model(tmp_path)


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import socket

    def connect(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(
        UsageError, match="Nothing is fetched unless you say so: pass download=True"
    ):
        load_model("nobody/no-such-model")


@pytest.mark.parametrize("version", ["4.57.1", "5.2.0"])
def test_an_older_transformers_is_named_with_what_updates_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(
        EnvironmentProblemError, match=rf"transformers {version} .*5\.18\.0 or newer"
    ):
        load_model(str(folder))
