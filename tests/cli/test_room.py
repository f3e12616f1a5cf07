"""Room in memory and on disk: what is there, what is asked for, and the refusal between them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from linexport.errors import EnvironmentProblemError
from linexport.quantization import forecast
from linexport.sources.sizes import float32_bytes, vocabulary
from linexport.system import control_groups, room
from linexport.system.progress import Silent


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_the_size_in_float32_is_that_of_all_tensors(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 5), np.float16)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(7, np.float32)}, tmp_path / "model-2.safetensors")
    assert float32_bytes(tmp_path) == 4 * (15 + 7)
    (tmp_path / "model-2.safetensors").write_bytes(b"no header")
    assert float32_bytes(tmp_path) is None
    (tmp_path / "other").write_bytes(bytes(9))
    assert float32_bytes(tmp_path / "other") == 9
    assert float32_bytes("package.module:function") is None


def test_the_size_of_weights_in_few_bits_is_that_of_what_they_mean(tmp_path: Path) -> None:
    save_file({"a.qweight": np.zeros((3, 5), np.int32)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert float32_bytes(tmp_path) == 4 * 15 * 8
    groups = {"group_0": {"weights": {"num_bits": 8}}, "group_1": {"weights": None}}
    config = {"quantization_config": {"config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert float32_bytes(tmp_path) == 4 * 15 * 4
    save_file({"a.weight": np.zeros((3, 5), np.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"load_in_4bit": true}}')
    assert float32_bytes(tmp_path) == 4 * 15 * 2


def test_the_vocabulary_is_that_of_the_text_model(tmp_path: Path) -> None:
    assert vocabulary(tmp_path) == vocabulary("package.module:function") == 0
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert vocabulary(tmp_path) == 7
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 9}}')
    assert vocabulary(tmp_path) == 9
    (tmp_path / "config.json").write_text('[1, "vocab_size"]')
    assert vocabulary(tmp_path) == 0


def test_what_a_process_holds_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 100)
    monkeypatch.setattr(room, "held_memory", lambda: 50)
    assert room.fits(150) and not room.fits(151)
    monkeypatch.setattr(room, "available_memory", lambda: None)
    assert room.fits(2**60)


def test_small_models_are_not_announced(tmp_path: Path) -> None:
    shown = Notes()
    for size in (None, forecast.SMALL - 1):
        forecast.announce(forecast.WHOLE, forecast.ModelSize(size), tmp_path / "q", shown)
    assert not shown.texts


def test_what_does_not_fit_is_refused_with_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 2 * room.GIB)
    monkeypatch.setattr(room, "held_memory", lambda: 0)
    shown = Notes()
    with pytest.raises(EnvironmentProblemError, match=r"There are 2.0 GiB of memory left"):
        forecast.announce(forecast.WHOLE, forecast.ModelSize(4 * room.GIB), tmp_path / "q", shown)
    assert len(shown.texts) == 1 and "of memory, and of disk" in shown.texts[0]
    with pytest.raises(EnvironmentProblemError, match=r"GiB free\. Make room"):
        room.check(room.Needs(0, {tmp_path: 2**60}))
    room.check(room.Needs(room.GIB, {tmp_path: 1}))


def test_a_control_group_leaves_what_its_limit_and_its_use_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, mount = tmp_path / "cgroup", tmp_path / "mount"
    (mount / "box").mkdir(parents=True)
    own.write_text("0::/box\n")
    monkeypatch.setattr(control_groups, "OWN", own)
    monkeypatch.setattr(control_groups, "MOUNT", mount)
    assert control_groups.memory_left() is None
    (mount / "box" / "memory.max").write_text("max\n")
    (mount / "box" / "memory.current").write_text("300\n")
    (mount / "box" / "memory.stat").write_text("anon 200\ninactive_file 50\n")
    assert control_groups.memory_left() is None
    (mount / "box" / "memory.max").write_text("1000\n")
    assert control_groups.memory_left() == 750
    assert room.available_memory() == 750


def test_this_machine_has_memory() -> None:
    found = room.available_memory()
    assert found is None or found > 2**20


def test_logits_of_many_words_are_never_those_of_a_whole_prompt() -> None:
    few, many = (forecast.ModelSize(2**31, words) for words in (16_383, 248_320))
    weights = forecast.memory(forecast.WHOLE, forecast.ModelSize(2**31))
    assert forecast.memory(forecast.WHOLE, few) - weights >= 4 * 3000 * 16_383
    assert forecast.memory(forecast.WHOLE, many) - weights < 4 * 1500 * 248_320
