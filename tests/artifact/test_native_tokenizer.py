"""Tokenizers described for a program in C++: compiled, beside the tokenizers package and NumPy."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from linexport.artifact.text.native_tokenizer import NotNativeError, described
from linexport.artifact.text.sampling import Sampling
from linexport.errors import UsageError
from tests.support.native_text import COMPILER, probe

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler, PCRE2 or utf8proc")

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEXTS = [
    "",
    "a",
    "It's 12345 o'clock; WE'LL see, isn'T it?",
    "  two  spaces\n\n\n and\r\nlines \t tabs \n",
    "naïve café, cafe\u0301, Ångström, 日本語のテキスト, Привет мир, مرحبا",
    "emoji 👩‍👩‍👧 and ½ ² Ⅷ ٣",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "<|im_start|<|im_end|>>",
    "x" * 3000,
    " " * 1000,
    "def f(a, b):\n    return a[0] ** 2 != b\n",
]


def split(pattern: str) -> object:
    return tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def byte_level(regex: bool) -> object:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)


KINDS: dict[str, list[object]] = {
    "gpt2": [byte_level(True)],
    "qwen": [split(QWEN), byte_level(False)],
    "llama": [split(LLAMA), byte_level(False)],
    "digits": [tokenizers.pre_tokenizers.Digits(True), byte_level(True)],
    "starcoder": [tokenizers.pre_tokenizers.Digits(False), byte_level(True)],
}


def trained(kind: str, folder: Path) -> Path:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=kind == "llama"))
    inner.normalizer = tokenizers.normalizers.NFC() if kind == "qwen" else None
    steps = KINDS[kind]
    inner.pre_tokenizer = steps[0] if len(steps) == 1 else tokenizers.pre_tokenizers.Sequence(steps)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [*TEXTS, " the then there these 12 123 1234 It's", "日本 日本語"] * 3
    inner.train_from_iterator(words, trainer)
    if kind == "llama":
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[object, Callable[[Sequence[str]], list[tuple[list[int], str]]]]:
    """The package's tokenizer, and the program's tokens and text of each of some texts."""
    folder = trained(request.param, tmp_path_factory.mktemp("native") / "model")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    file, program = folder / "linexport_text.bin", probe()
    file.write_bytes(described(folder, inner.get_vocab_size()))

    def encoded(texts: Sequence[str]) -> list[tuple[list[int], str]]:
        content = "".join(text + "\0" for text in texts).encode()
        command = [str(program), "encode", str(file)]
        done = subprocess.run(command, input=content, capture_output=True, check=True)
        found = [part.decode().split("\n", 1) for part in done.stdout.split(b"\0")[:-1]]
        return [([int(n) for n in ids.split()], back) for ids, back in found]

    return inner, encoded


def same(inner, encoded, texts: Sequence[str]) -> None:
    for text, (ids, back) in zip(texts, encoded(texts), strict=True):
        expected = inner.encode(text).ids
        assert ids == expected, text
        assert back == inner.decode(expected)


def test_texts_have_the_tokens_of_the_package(pair) -> None:
    same(*pair, TEXTS)


def test_pieces_of_all_texts_do(pair) -> None:
    draw = random.Random(0)
    pieces = [c for text in TEXTS for c in (*text[:60], *text.split())] + SPECIAL
    texts = ["".join(draw.choices(pieces, k=draw.randrange(1, 40))) for _ in range(400)]
    same(*pair, texts)


# U+0085 is white space of Unicode, and not of PCRE2; U+180E was until Unicode 6.3.
CHARACTERS = st.characters(
    codec="utf-8", exclude_characters="\0\x85\u180e", exclude_categories=["Cn"]
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(CHARACTERS, max_size=40), min_size=20, max_size=20))
def test_any_text_does(pair, texts: list[str]) -> None:
    same(*pair, texts)


def test_a_long_word_takes_no_time_squared(pair) -> None:
    inner, encoded = pair
    text = "ab" * 200_000
    assert encoded([text])[0][0] == inner.encode(text).ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram"}}, "its model is Unigram"),
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer is Lowercase"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre-tokenizer has .*Metaspace"),
        ({"pre_tokenizer": None}, "pre-tokenizer has"),
        ({"decoder": {"type": "Metaspace"}}, "decoder is not ByteLevel"),
        ({"post_processor": {"type": "BertProcessing"}}, "post-processor is BertProcessing"),
    ],
)
def test_other_tokenizers_are_named(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = trained("gpt2", tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(NotNativeError, match=message):
        described(folder, 700)


def test_a_damaged_file_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        described(tmp_path, 700)


@pytest.mark.parametrize("damage", [b"", b"LXT1", b"LXT1" + b"\xff" * 64])
def test_a_damaged_description_is_a_sentence(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "linexport_text.bin").write_bytes(damage)
    command = [str(probe()), "encode", str(tmp_path / "linexport_text.bin")]
    done = subprocess.run(command, input=b"a\0", capture_output=True)
    assert done.returncode == 1 and b"linexport_text.bin" in done.stderr


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 0, 1.0, 0.0), (1.3, 5, 1.0, 0.0), (0.9, 0, 0.8, 0.0), (0.7, 20, 0.8, 0.05)],
)
def test_draws_have_the_probabilities_of_sampling(
    temperature: float, top_k: int, top_p: float, min_p: float, tmp_path: Path
) -> None:
    """Chi-square of 20,000 draws; a right program fails once in 10^6 times (the seed is fixed)."""
    (tmp_path / "linexport_text.bin").write_bytes(described(tmp_path, 256))
    logits = np.random.default_rng(1).normal(0, 2, 40).astype(np.float32)
    options = map(str, (20_000, temperature, top_k, top_p, min_p, *logits))
    command = [str(probe()), "choose", str(tmp_path / "linexport_text.bin"), *options]
    found = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = sampling.probabilities(logits)
    counts = np.bincount([int(n) for n in found], minlength=len(p))
    assert not counts[p == 0].any()
    kept = p > 0
    assert stats.chisquare(counts[kept], p[kept] * counts.sum()).pvalue > 1e-6


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["ab", "cST", "OPd"], "ab|c||"),
        (["ab", "cST", "d"], "ab|c|STd|"),
        (["caf\xc3", "\xa9!"], "caf|é!|"),
        (["aSTO"], "a|STO"),
    ],
)
def test_stop_strings_and_characters_are_held_back(
    pieces: list[str], expected: str, tmp_path: Path
) -> None:
    raw = [piece.encode("latin-1") for piece in pieces]
    command = [str(probe()).encode(), b"shown", b"STOP", *raw]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode() == expected + "\n"
