"""Artifacts in onnxruntime-genai: it writes the tokens that the artifact itself writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import linexport
from linexport.artifact.genai import CONFIG, write_genai
from linexport.artifact.io_adapter import ROWS
from linexport.errors import UsageError
from linexport.plugins.ops.body import MICROSOFT

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

TOKENS = 40


def check(artifact: Path, folder: Path, prompt: list[int], batch: int = 1) -> None:
    """Greedy decoding there: the logits of every step, and so every token, are the artifact's."""
    genai = pytest.importorskip("onnxruntime_genai", reason="needs the genai extra")
    write_genai(artifact, folder)
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(
        max_length=len(prompt) + TOKENS, do_sample=False, batch_size=batch
    )
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([prompt] * batch, np.int32))
    stream, tokens, steps = linexport.load(artifact, threads=1).stream(), np.array([prompt]), 0
    name = linexport.load(artifact).manifest.outputs[0].name
    while not generator.is_done():
        expected = stream.step(tokens)[name][:, -1]
        for row in generator.get_logits()[:, -1]:
            assert np.abs(row - expected[0]).max() < 1e-5 * np.abs(expected).max()
        generator.generate_next_token()
        tokens, steps = expected.argmax(-1)[:, None], steps + 1
        if not generator.is_done():  # the token that ends a text is not part of it
            written = [generator.get_sequence(i)[-1] for i in range(batch)]
            assert written == [tokens[0, 0]] * batch
    assert steps > 3


def test_weights_in_four_bits_are_run_as_they_are(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    """Only inputs and outputs have other names there; products and tables stay in integers."""
    artifact = tmp_path / "int4"
    linexport.quantize(converted("language_model"), artifact, weights="int4", threads=1)
    check(artifact, tmp_path / "genai", list(b"import "))
    both = (onnx.load(str(tmp_path / n / "model.onnx")).graph for n in ("int4", "genai"))
    kinds = [Counter(n.op_type for n in graph.node if n.domain == MICROSOFT) for graph in both]
    assert kinds[0] == kinds[1] and kinds[0]["MatMulNBits"] > 2


def inputs(folder: Path) -> set[str]:
    return {i.name for i in onnx.load(str(folder / "model.onnx")).graph.input}


def test_states_without_a_place_of_their_own_are_packed(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    """The byte-level model has normalisers beside its states."""
    folder = tmp_path / "genai"
    check(converted("language_model"), folder, list(b"def f(x): return "), batch=2)
    packed = {f"past_key_values.0.{part}_state" for part in ("conv", "recurrent")}
    assert inputs(folder) == {"tokens", *packed}


def test_a_window_is_a_state_and_its_mask_is_read_from_that_of_all_tokens(
    converted_family: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """The prompt and the text end beyond the window of 24 tokens."""
    prompt = np.random.default_rng(0).integers(3, 64, size=17).tolist()
    check(converted_family("recurrent_gemma")[0], tmp_path / "genai", prompt, batch=2)


def test_a_hybrid_keeps_its_states_and_its_keys_and_values(
    converted_family: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "genai"
    check(converted_family("qwen3_5_text")[0], folder, [11, 5, 42, 7, 40])
    assert inputs(folder) == {
        "input_ids",
        "attention_mask",
        "past_key_values.0.conv_state",
        "past_key_values.0.recurrent_state",
        "past_key_values.1.key",
        "past_key_values.1.value",
    }
    config = json.loads((folder / CONFIG).read_text())["model"]
    assert config["eos_token_id"] == [2]
    assert config["decoder"]["num_key_value_heads"] == 2


def test_what_cannot_be_written_is_refused(
    converted: Callable[..., Path], tmp_path: Path, cli: Callable[..., Any]
) -> None:
    with pytest.raises(UsageError, match="not a language model"):
        write_genai(converted("small"), tmp_path / "a")
    with pytest.raises(UsageError, match="is an artifact"):
        write_genai(converted("language_model"), converted("small"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    command = ("package", converted("language_model"), "--for", "genai", "--output")
    done = cli(*command, tmp_path / "full")
    assert done.code == 2 and "other things in it" in done.err
    assert cli(*command, tmp_path / "new", "--json").json()["status"] == "ok"
    assert (tmp_path / "new" / CONFIG).is_file()


def test_key_value_rows_of_two_widths_are_refused(
    converted_family: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """Latent attention keeps such."""
    artifact, _ = converted_family("kimi_linear")
    with pytest.raises(UsageError, match=r"1 of 12.*1 of 8.*onnxruntime-genai has one for all"):
        write_genai(artifact, tmp_path / "genai")
    assert not (tmp_path / "genai").exists()


@pytest.mark.parametrize("name", ["past_key", "past_key_x", "past_key_00", "past_value_", "past_0"])
def test_states_of_other_names_are_not_rows_of_attention(name: str) -> None:
    assert ROWS.fullmatch(name) is None
