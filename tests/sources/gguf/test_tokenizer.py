"""Tokenizers of GGUF files, beside the ``tokenizer.json`` that their fields were taken of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import linexport
from linexport.artifact.text.tokenizer import find_tokenizer
from linexport.sources.gguf.file import GgufFile
from linexport.sources.gguf.tokenizer import tokenizer_files
from tests.sources.gguf.test_gguf import kept, rewritten
from tests.support.command_line import Result

gguf = pytest.importorskip("gguf")

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = ("<|end|>", "<|begin|>", "<|user|>")
CUTS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "lfm2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Patterns as tokenizers of these models are published with."""

TEXTS = (
    "It's DON'T we'Ll 1234567 and 12 345",
    "  two   spaces\n\n\ttab \r\n line\n",
    "cafe\u0301 caf\u00e9 \u0939\u093f\u0928\u094d\u0926\u0940 \u65e5\u672c\u8a9e \U0001f600!?...",
    "<|user|>hello<|end|> x<|begin|>",
    "",
)


def published(pre: str) -> tokenizers.Tokenizer:
    """A tokenizer with the cut of a model, trained on a few words."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "lfm2"))
    made.normalizer = normalizers.NFC() if "qwen" in pre else None
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(CUTS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, "it's hello and the spaces 123 1234 "] * 30, trainer)
    if pre == "lfm2":
        begin = SPECIAL[1]
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, made.token_to_id(begin))]
        )
    return made


def written(place: Path, made: tokenizers.Tokenizer, pre: str, **changes: Any) -> Path:
    """A file of a tokenizer's fields, with two fillers, and of an embedding."""
    content = json.loads(made.to_str())
    vocabulary = content["model"]["vocab"]
    words = [*sorted(vocabulary, key=lambda word: vocabulary[word]), "[PAD0]", "[PAD1]"]
    kinds = [3 if w in SPECIAL else 5 if w.startswith("[PAD") else 1 for w in words]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": words,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "bos_token_id": vocabulary[SPECIAL[1]],
        "eos_token_id": vocabulary[SPECIAL[0]],
    }
    writer = gguf.GGUFWriter(place, "lfm2")
    for name, value in {**fields, **changes}.items():
        add = {str: writer.add_string, list: writer.add_array, bool: writer.add_bool}
        add.get(type(value), writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((len(words), 4), np.float32))
    for write in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{write}")()
    writer.close()
    return place


@pytest.fixture(params=CUTS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """A published tokenizer, and that of a file with its fields."""
    made = published(request.param)
    files = tokenizer_files(GgufFile(written(tmp_path / "a.gguf", made, request.param)))
    return made, tokenizers.Tokenizer.from_str(files["tokenizer.json"])


def test_tokens_are_those_of_the_published_tokenizer(both: tuple[Any, Any]) -> None:
    made, found = both

    @settings(max_examples=60, deadline=None)
    @given(st.text(max_size=40) | st.text("aehlo'sS \n1\u0301.", max_size=40))
    def check(text: str) -> None:
        expected = made.encode(text)
        assert found.encode(text).ids == expected.ids
        assert found.decode(expected.ids) == made.decode(expected.ids)

    check()
    for text in TEXTS:
        assert found.encode(text).ids == made.encode(text).ids
    assert found.token_to_id("[PAD0]") is None


def test_settings_name_special_tokens_and_the_template(tmp_path: Path) -> None:
    made = published("lfm2")
    files = tokenizer_files(GgufFile(written(tmp_path / "a.gguf", made, "lfm2")))
    found = json.loads(files["tokenizer_config.json"])
    assert (found["bos_token"], found["eos_token"]) == (SPECIAL[1], SPECIAL[0])
    assert found["chat_template"] == "{{ messages }}"
    changed = written(tmp_path / "b.gguf", made, "lfm2", add_bos_token=False, add_eos_token=True)
    found = tokenizers.Tokenizer.from_str(tokenizer_files(GgufFile(changed))["tokenizer.json"])
    assert found.encode("x").tokens == ["x", SPECIAL[0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"pre": "kimi-k2"},
        {"model": "llama"},
        {"merges": ["a"]},
        {"merges": ["q z"]},
        {"token_type": [1, 1]},
    ],
    ids=[
        "another cut",
        "another model",
        "damaged merges",
        "merges of no token",
        "types of other tokens",
    ],
)
def test_a_tokenizer_of_another_kind_is_not_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    place = written(tmp_path / "a.gguf", published("lfm2"), changes.pop("pre", "lfm2"), **changes)
    assert tokenizer_files(GgufFile(place)) == {}


def test_an_artifact_of_a_file_alone_takes_text(tmp_path: Path, cli: Callable[..., Result]) -> None:
    words = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz.", "\u0120", "\u0120a", "ca"]

    def with_words(writer: Any, name: str, data: Any, kind: Any) -> None:
        if name == "token_embd.weight":
            for field, value in (("model", "gpt2"), ("pre", "qwen2")):
                writer.add_string(f"tokenizer.ggml.{field}", value)
            writer.add_array("tokenizer.ggml.tokens", words)
            writer.add_array("tokenizer.ggml.token_type", [3, 3, 3, *[1] * (len(words) - 3)])
            writer.add_array("tokenizer.ggml.merges", ["\u0120 a", "c a"])
        kept(writer, name, data, kind)

    place = rewritten(tmp_path / "model.gguf", with_words)
    manifest = linexport.convert(place, tmp_path / "out", bench=False, threads=1)
    assert not any("takes token ids" in warning for warning in manifest.warnings)
    assert {"tokenizer.json", "tokenizer_config.json"} <= manifest.files.keys()
    found = find_tokenizer(tmp_path / "out", 64, manifest.files).encode("a cat")
    assert [words[i] for i in found] == ["a", "\u0120", "ca", "t"]
    result = cli("generate", str(tmp_path / "out"), "--prompt", "a cat", "--max-tokens", "3")
    assert result.code == 0, result.err
