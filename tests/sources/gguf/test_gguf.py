"""GGUF files that llama.cpp's conversion wrote, compared with the models that they were made of.

``recorded/NAME.gguf`` has random weights of half precision, written by ``convert_hf_to_gguf.py``
(llama.cpp as vendored by llama-cpp-python 0.3.36) from a folder of transformers; ``NAME.npy`` are
the logits of that folder's model, in float32, for the tokens of ``IDS``. ``rwkv7`` is made of what
``tests/flash_linear_attention/recorded`` has of that library.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import linexport
from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.graph import external_data
from linexport.sources import load_model
from tests.support import ROOT

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.usefixtures("one_thread")

RECORDED = Path(__file__).parent / "recorded"
TYPES = sorted(path.stem for path in RECORDED.glob("*.gguf"))
IDS = torch.arange(18).reshape(2, 9) % 64


@pytest.mark.parametrize("name", TYPES)
def test_a_model_computes_what_its_published_folder_computes(name: str) -> None:
    loaded = load_model(RECORDED / f"{name}.gguf")
    assert "read from weights in GGUF" in loaded.source.description
    with torch.no_grad():
        found = loaded.module(IDS, torch.ones_like(IDS)).numpy()
    expected = np.load(RECORDED / f"{name}.npy")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_rwkv7_computes_what_flash_linear_attention_computes() -> None:
    loaded = load_model(RECORDED / "rwkv7.gguf")
    with np.load(ROOT / "tests/flash_linear_attention/recorded/rwkv7.npz") as file:
        ids, expected = torch.from_numpy(file["ids"]), file["whole"]
    with torch.no_grad():
        found = loaded.module(ids, torch.ones_like(ids)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_every_layout_has_a_recorded_file() -> None:
    from linexport.sources.gguf.file import GgufFile
    from linexport.sources.gguf.recipes import registered

    found = {GgufFile(RECORDED / f"{name}.gguf").architecture for name in TYPES}
    assert registered().keys() - found == {"nemotron_h"}  # nemotron_h_moe has its layers and more


def test_a_file_converts_and_its_artifact_equals_the_published_model(tmp_path: Path) -> None:
    manifest = linexport.convert(RECORDED / "lfm2.gguf", tmp_path / "out", bench=False, threads=1)
    assert any("takes token ids" in warning for warning in manifest.warnings)
    found = linexport.load(tmp_path / "out", threads=1).run(IDS.numpy())["logits"]
    np.testing.assert_allclose(found, np.load(RECORDED / "lfm2.npy"), rtol=1e-4, atol=1e-4)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "lfm2.gguf", tmp_path / "model-f16.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    loaded = load_model(tmp_path)
    assert {path.name for path in loaded.files} == {"config.json", "tokenizer.json"}
    assert not any("takes token ids" in warning for warning in loaded.warnings)


def test_a_folder_with_several_files_names_them(tmp_path: Path) -> None:
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf"):
        shutil.copy(RECORDED / "lfm2.gguf", tmp_path / name)
    with pytest.raises(UsageError, match=r"2 GGUF files: a-Q4_K_M\.gguf, a-Q8_0\.gguf\. Give one"):
        load_model(tmp_path)


def rewritten(place: Path, change: Callable[[Any, str, Any, Any], None], **fields: Any) -> Path:
    """Copy a recorded file with other settings or tensors.

    Args:
        place: of the copy.
        change: takes the writer, and a tensor's name, data and type.
        **fields: settings of lfm2; None leaves one out.
    """
    reader = gguf.GGUFReader(RECORDED / "lfm2.gguf")
    writer = gguf.GGUFWriter(place, fields.pop("architecture", "lfm2"))
    for key, field in reader.fields.items():
        short = key.removeprefix("lfm2.").replace(".", "_")
        if key.startswith(("GGUF", "general.")) or fields.get(short, 0) is None:
            continue
        kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], kind)
    for name, value in fields.items():
        if value is not None:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        change(writer, tensor.name, tensor.data, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return place


def kept(writer: Any, name: str, data: np.ndarray, kind: Any) -> None:
    """Write a tensor as it was."""
    writer.add_tensor(name, data, raw_dtype=kind)


def meant(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw blocks of 32 values as llama.cpp stores them, and their values in float64."""
    generator = np.random.default_rng(0)
    count = data.size // 32
    scales = generator.uniform(0.001, 0.002, (count, 1)).astype(np.float16)
    if kind == "Q8_0":
        codes = generator.integers(-127, 128, (count, 32))
        stored = [scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)]
        return np.hstack(stored), codes * scales.astype(np.float64)
    codes = generator.integers(0, 16, (count, 32))
    halves = (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)
    if kind == "Q4_0":
        return np.hstack([scales.view(np.uint8), halves]), (codes - 8.0) * scales
    lowest = generator.uniform(-0.02, 0, (count, 1)).astype(np.float16)
    stored = [scales.view(np.uint8), lowest.view(np.uint8), halves]
    return np.hstack(stored), codes * scales.astype(np.float64) + lowest


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_32_have_the_values_of_their_definition(kind: str, tmp_path: Path) -> None:
    drawn: dict[str, np.ndarray] = {}

    def change(writer: Any, name: str, data: np.ndarray, kept_as: Any) -> None:
        if not name.endswith("ffn_up.weight"):
            return kept(writer, name, data, kept_as)
        stored, values = meant(data, kind)
        drawn[name] = values.reshape(data.shape)
        stored = stored.reshape(data.shape[0], -1)
        return kept(writer, name, stored, gguf.GGMLQuantizationType[kind])

    weights = load_model(rewritten(tmp_path / "m.gguf", change)).module.state_dict()
    assert len(drawn) == 2
    for name, values in drawn.items():
        found = weights[f"model.model.layers.{name.split('.')[1]}.feed_forward.w3.weight"]
        np.testing.assert_allclose(found.numpy(), values, rtol=2.0**-23, atol=1e-9)


def without(lost: str) -> Callable[[Any, str, Any, Any], None]:
    """Leave out a tensor."""
    return lambda writer, name, *rest: None if name == lost else kept(writer, name, *rest)


def doubled(writer: Any, name: str, *rest: Any) -> None:
    """Write an embedding under a second name, which no layout has."""
    kept(writer, name, *rest)
    if name == "token_embd.weight":
        kept(writer, "per_layer_token_embd.weight", *rest)


@pytest.mark.parametrize(
    ("change", "fields", "match"),
    [
        (kept, {"architecture": "llama"}, r"type 'llama'; read are falcon-h1, .*qwen3next"),
        (kept, {"shortconv_l_cache": None}, r"no setting lfm2\.shortconv\.l_cache in it"),
        (kept, {"lfm2.rope.scaling.type": "longrope"}, "positions scaled by 'longrope'; read are"),
        (kept, {"split.count": 3}, "one of 3 parts of a model.*llama-gguf-split --merge"),
        (without("token_embd.weight"), {}, r"no tensor token_embd\.weight in it"),
        (without("blk.1.attn_q.weight"), {}, "layers.1.self_attn.q_proj.weight is missing"),
        (doubled, {}, "no place for: per_layer_token_embd.weight"),
    ],
)
def test_what_is_not_understood_is_said_in_one_sentence(
    change: Any, fields: dict[str, Any], match: str, tmp_path: Path
) -> None:
    place = rewritten(tmp_path / "m.gguf", change, **fields)
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        load_model(place)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{place}: ")


def test_scaled_positions_are_those_of_the_file(tmp_path: Path) -> None:
    scaled = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}
    fields = {f"lfm2.rope.scaling.{key}": value for key, value in scaled.items()}
    config = load_model(rewritten(tmp_path / "m.gguf", kept, **fields)).module.model.config
    assert {k: config.rope_parameters[k] for k in ("rope_type", "rope_theta", "factor")} == {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
    }
    assert config.rope_parameters["original_max_position_embeddings"] == 1024


@pytest.mark.parametrize("kept_bytes", [5, 30, 400, 3000, -200])
def test_a_file_that_is_cut_off_is_refused(kept_bytes: int, tmp_path: Path) -> None:
    place = tmp_path / "m.gguf"
    place.write_bytes((RECORDED / "lfm2.gguf").read_bytes()[:kept_bytes])
    with pytest.raises(UnsupportedModelError, match="a damaged GGUF file"):
        load_model(place)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    content = bytearray((RECORDED / "lfm2.gguf").read_bytes())
    content[4] = 9
    place = tmp_path / "m.gguf"
    place.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"damaged GGUF file.*version 9"):
        load_model(place)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(EnvironmentProblemError, match=r"needs gguf: pip install '\.\[gguf\]'"):
        load_model(RECORDED / "lfm2.gguf")


def test_integers_of_a_file_are_kept(tmp_path: Path) -> None:
    """Byte for byte: 128 is added to those of Q8_0, and halves of Q4_0 are put side by side."""
    drawn: dict[str, tuple[str, np.ndarray]] = {}
    kinds = {"ffn_up": "Q8_0", "ffn_gate": "Q4_0", "in_proj": "Q4_1", "token_embd": "Q8_0"}

    def change(writer: Any, name: str, data: np.ndarray, kept_as: Any) -> None:
        kind = next((k for part, k in kinds.items() if part in name), None)
        if kind is None or data.ndim < 2 or data.shape[1] % 32:
            return kept(writer, name, data, kept_as)
        stored = meant(data, kind)[0].reshape(data.shape[0], -1)
        drawn[name] = kind, stored
        return kept(writer, name, stored, gguf.GGMLQuantizationType[kind])

    path = rewritten(tmp_path / "m.gguf", change)
    manifest = linexport.convert(path, tmp_path / "out", weights="keep", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.quantisation is not None
    model, external = external_data.read_mapped(tmp_path / "out" / "model.onnx")
    own = {t.name: t for t in model.graph.initializer}
    found = {n: external[n] if n in external else onnx.numpy_helper.to_array(own[n]) for n in own}
    modules = {"w3": "ffn_up", "w1": "ffn_gate", "lm_head": "token_embd"}
    names = [tensor.name for tensor in manifest.quantisation.tensors]
    for name in names:
        module, layer = name.split(".weight")[0].split(".")[-1], name.split(".layers.")[1:]
        place = f"blk.{layer[0][0]}." if layer else ""
        kind, stored = drawn[f"{place}{modules[module]}.weight"]
        blocks = stored.reshape(len(stored), -1, 34 if kind == "Q8_0" else 18)
        scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
        np.testing.assert_array_equal(found[f"{name}/scales"], scales)
        codes = blocks[..., 2:]
        if kind == "Q8_0":
            expected = codes ^ 0x80
        else:
            both = np.concatenate([codes & 15, codes >> 4], -1)
            expected = both[..., 0::2] | both[..., 1::2] << 4
        assert found[f"{name}/values"].tobytes() == expected.tobytes()
    assert len(names) == 5 and manifest.quantisation.checkpoint is not None
    reasons = [one.reason for one in manifest.quantisation.kept]
    assert sum("not an integer times their scale" in reason for reason in reasons) == 1
