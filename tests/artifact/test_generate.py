"""Text from a language model: sampling, tokenizers, ``Artifact.generate`` and the command."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import helper, numpy_helper

import linexport
from linexport.artifact import Artifact
from linexport.artifact.text.continuation import END, Generation, TextRow, continuations
from linexport.artifact.text.encoder import Encoder
from linexport.artifact.text.language_interface import LanguageInterface, language_interface
from linexport.artifact.text.sampling import Sampling, log_probabilities
from linexport.artifact.text.tokenizer import end_tokens, find_tokenizer
from linexport.errors import EnvironmentProblemError, ParityError, UsageError
from linexport.manifest import Manifest, describe_files, digest
from linexport.manifest.records import InputRecord, StateRecord, TensorRecord
from linexport.sources import load_model
from linexport.system.terminal import visible_text

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "def f(x): return "


@pytest.fixture
def copy(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """The language model's artifact, for files to be added to."""
    return Path(shutil.copytree(converted("language_model"), tmp_path / "copy"))


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def add(artifact: Path, name: str, content: Any) -> None:
    """Put a file into an artifact as ``convert`` does, with its size and digest."""
    write(artifact, name, content)
    path = artifact / "manifest.json"
    manifest = json.loads(path.read_text())
    known = {"bytes": (artifact / name).stat().st_size, "sha256": digest(artifact / name)}
    manifest["files"][name] = known
    path.write_text(json.dumps(manifest))


# Choosing tokens ---------------------------------------------------------------------------------


def test_without_temperature_the_argmax_and_of_equals_the_first() -> None:
    choose = Sampling().chooser()
    assert [choose(np.array(x)) for x in ([1.0, 3.0, 2.0], [2.0, 2.0, -np.inf])] == [1, 0]


LOGITS = np.array([0.3, 2.0, 1.0, -1.0, 0.9, 1.5], np.float32)


@pytest.mark.parametrize(
    ("sampling", "left_out"),
    [
        (Sampling(1.0, seed=5), []),
        (Sampling(0.5, seed=5), []),
        (Sampling(2.0, 3, seed=5), [0, 3, 4]),
        (Sampling(1.0, 99, seed=5), []),
        (Sampling(1.0, top_p=0.7, seed=5), [0, 3, 4]),  # 0.41 + 0.25 < 0.7 <= 0.41 + 0.25 + 0.15
        (Sampling(1.0, top_p=0.01, seed=5), [0, 2, 3, 4, 5]),
        (Sampling(1.0, min_p=0.35, seed=5), [0, 3, 4]),  # exp(0.9 - 2) < 0.35 <= exp(1 - 2)
    ],
)
def test_draws_follow_the_softmax(sampling: Sampling, left_out: list[int]) -> None:
    """Chi-squared over 20,000 draws: a right sampler fails once in a million seeds."""
    logits, draws = LOGITS, 20_000
    weights = np.exp(logits.astype(np.float64) / sampling.temperature)
    weights[left_out] = 0
    expected = draws * weights / weights.sum()
    choose = sampling.chooser()
    counts = Counter(choose(logits) for _ in range(draws))
    found = np.array([counts[i] for i in range(6)])
    possible = expected > 0
    assert not found[~possible].any()
    statistic = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    limit = {5: 36.0, 2: 27.7, 0: 1e-9}[possible.sum() - 1]  # 1e-6 quantiles, by degrees of freedom
    assert statistic < limit


def test_no_temperature_overflows() -> None:
    logits = np.array([1e4, 0.0, -1e4], np.float32)
    assert Sampling(1e-30, seed=1).chooser()(logits) == 0
    assert Sampling(1e30, seed=1).chooser()(logits) in (0, 1, 2)


def test_a_seed_fixes_the_draws() -> None:
    def draw(seed: int) -> list[int]:
        choose = Sampling(1.0, seed=seed).chooser()
        return [choose(np.zeros(50)) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)


def test_a_chooser_goes_on_where_another_ended() -> None:
    one, other = Sampling(1.0, seed=3).chooser(), Sampling(1.0, seed=3).chooser(skip=7)
    assert [one(LOGITS) for _ in range(20)][7:] == [other(LOGITS) for _ in range(13)]


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-20, 20, width=32)), st.data())
def test_a_nucleus_is_the_fewest_tokens_of_its_share(logits: np.ndarray, data: Any) -> None:
    share = data.draw(st.floats(0.01, 0.99))
    p = Sampling(1.0).probabilities(logits)
    kept = np.sort(p[Sampling(1.0, top_p=share).probabilities(logits) > 0])
    assert kept.sum() >= share - 1e-12 > kept[1:].sum() - 1e-9
    assert kept[0] >= np.sort(p)[::-1][len(kept) - 1]


def test_log_probabilities_are_those_of_the_softmax() -> None:
    expected = torch.log_softmax(torch.from_numpy(LOGITS).double(), 0).numpy()
    np.testing.assert_allclose(log_probabilities(LOGITS), expected, rtol=1e-12)
    assert np.isfinite(log_probabilities(np.array([1e4, 0.0], np.float32))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_reported(bad: float) -> None:
    with pytest.raises(ParityError, match="not finite"):
        Sampling().chooser()(np.array([0.0, bad]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((-1.0,), "temperature is -1"),
        ((np.nan,), "temperature is nan"),
        ((1.0, -1), "top_k is -1"),
        ((1.0, 0, 0, 0.0), "top_p is 0"),
        ((1.0, 0, 0, 1.0, np.nan), "min_p is nan"),
    ],
)
def test_settings_without_meaning_are_refused(values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Sampling(*values)


def counting(prompts: list[list[int]], how: Generation) -> tuple[list[Any], list[Any]]:
    """What a model that counts writes in a batch, and what it was fed."""
    fed: list[Any] = []

    def after(last: list[int]) -> np.ndarray:
        fed.append(last)
        return np.eye(9)[[token + 1 for token in last]]

    texts = [TextRow(how, np.array(prompt), i) for i, prompt in enumerate(prompts)]
    written = continuations(
        lambda: after([prompt[-1] for prompt in prompts]), lambda t: after(t.tolist()), texts
    )
    return list(written), fed


def test_a_text_ends_by_count_or_by_a_token_that_is_not_part_of_it() -> None:
    three, until_5 = (
        Generation(Sampling(), frozenset(), max_tokens=3),
        Generation(Sampling(), frozenset({5})),
    )
    assert counting([[0, 1]], three) == ([(2,), (3,), (4,)], [[1], [2], [3]])
    assert counting([[0, 1]], until_5)[0] == [(2,), (3,), (4,)]


def test_each_text_of_a_batch_ends_by_itself() -> None:
    written, fed = counting([[1], [3]], Generation(Sampling(), frozenset({5})))
    assert written == [(2, 4), (3, END), (4, END)]
    assert fed == [[1, 3], [2, 4], [3, END], [4, END]]


def test_a_text_has_room_up_to_the_nearest_bound() -> None:
    def room(**bounds: int) -> int | None:
        return Generation(Sampling(), frozenset(), **bounds).room(10)

    assert room() is None
    assert room(max_tokens=7) == room(max_tokens=7, context=99) == 7
    assert room(max_tokens=7, context=12) == room(max_length=12) == 2
    assert room(max_length=4) == room(context=10) == 0
    with pytest.raises(UsageError, match="10 tokens; the model was made for 9"):
        room(context=9)


# Artifacts ---------------------------------------------------------------------------------------


def test_it_writes_what_pytorch_writes(model: Artifact, factories: Any) -> None:
    original: Any = load_model(factories.source("language_model")).module
    prompt = np.frombuffer(PROMPT.encode(), np.uint8)
    expected = original.generate(torch.from_numpy(prompt.astype(np.int64))[None], 128)[0].tolist()
    assert list(model.generate(prompt, max_tokens=128)) == expected
    assert len(set(expected)) > 1
    assert list(itertools.islice(model.generate(prompt.tolist()), 128)) == expected
    first = expected.index(expected[5])
    assert list(model.generate(prompt, stop=[expected[5]])) == expected[:first]


def test_random_text_depends_on_the_seed_alone(model: Artifact) -> None:
    def text(seed: int) -> list[int]:
        return list(model.generate([1, 2], max_tokens=20, temperature=1.0, top_k=50, seed=seed))

    assert text(1) == text(1) != text(2)


def test_rows_of_a_batch_are_what_each_is_alone_without_a_mask(model: Artifact) -> None:
    prompts = [b"import numpy", b"x", b"def f(x): "]
    how: Any = {"max_tokens": 20, "temperature": 0.8, "repetition_penalty": 1.3, "top_p": 0.9}
    batch = zip(*model.generate_batch(prompts, seed=3, **how), strict=True)
    alone = [list(model.generate(p, seed=3 + i, **how)) for i, p in enumerate(prompts)]
    assert [list(row) for row in batch] == alone
    even = zip(*model.generate_batch([b"ab", b"cd"], max_tokens=9), strict=True)
    assert [list(row) for row in even] == [
        list(model.generate(p, max_tokens=9)) for p in (b"ab", b"cd")
    ]
    with pytest.raises(UsageError, match="no prompts"):
        model.generate_batch([])


def test_prompts_that_one_state_cannot_hold_are_refused(model: Artifact) -> None:
    """A state of all rows together, such as the number of tokens before."""

    class Shared(Artifact):
        def shared_states(self) -> list[str]:
            return ["past_length"]

    shared = Shared(model.path, model.manifest, model._session)
    assert len(list(shared.generate_batch([b"ab", b"cd"], max_tokens=3))) == 3
    with pytest.raises(UsageError, match=r"prompts have 2, 1 tokens; expected one .* past_length"):
        shared.generate_batch([b"ab", b"c"], max_tokens=3)


def test_a_text_ends_with_the_token_that_completes_a_stop_string(model: Artifact) -> None:
    text = bytes(model.generate(b"import ", max_tokens=60))
    stop = text[11:13].decode("latin-1")
    assert text[11:13].isascii()
    end = text.index(text[11:13]) + 2
    for draft in (None, linexport.NGramDraft()):
        found = model.generate(b"import ", max_tokens=60, stop_strings=["@@", stop], draft=draft)
        assert bytes(found) == text[:end]
    for bad in (stop, [""]):
        with pytest.raises(UsageError, match="expected a list of texts"):
            model.generate(b"import ", stop_strings=bad)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; expected more than 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
    ],
)
def test_requests_without_meaning_are_refused(
    model: Artifact, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        model.generate([1], **values)


def test_asking_for_a_filter_asks_for_samples(model: Artifact) -> None:
    assert list(model.generate([1], max_tokens=9, top_p=0.9)) == list(
        model.generate([1], max_tokens=9, top_p=0.9, temperature=1.0)
    )


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "no tokens"),
        ([[1, 2]], r"shape \(1, 2\); expected one row"),
        ([[1, 2], [3]], "several rows; expected one .* generate_batch"),
        ([1.5], "dtype float64"),
        ([3, 256], "from 3 to 256; the model's vocabulary is 0 to 255"),
        ([-1], "from -1"),
    ],
)
def test_wrong_prompts_are_refused_at_once(model: Artifact, prompt: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        model.generate(prompt)


def test_it_ends_where_the_context_is_full(copy: Path) -> None:
    add(copy, "config.json", {"max_position_embeddings": 12})
    model = linexport.load(copy, threads=1)
    assert len(list(model.generate(b"import ", max_tokens=50))) == 5
    assert len(list(model.generate(b"import "))) == 5
    assert list(model.generate(b"import numpy")) == []
    with pytest.raises(UsageError, match=r"13 tokens.*made for 12"):
        next(model.generate(b"import numpy "))


def test_the_command_says_that_the_context_is_full(cli: Callable[..., Any], copy: Path) -> None:
    add(copy, "config.json", {"max_position_embeddings": 12})
    done = cli("generate", copy, "--prompt", "import ", "--max-tokens", 50)
    assert done.out.startswith("import ") and "; the context of 12 tokens is full" in done.err
    done = cli("generate", copy, "--prompt", "import ", "--max-tokens", 5)
    assert "context" not in done.err
    done = cli("generate", copy, "--prompt", "import numpy ", "--max-tokens", 5)
    assert done.code == 2 and not done.out and "made for 12" in done.err


def test_other_models_are_refused(converted: Callable[..., Path]) -> None:
    small = linexport.load(converted("small"), threads=1)
    with pytest.raises(UsageError, match=r"not a language model: .* x float32 .* output float32"):
        small.generate([1])


def test_inputs_with_a_default_are_left_to_it(sample_manifest: Manifest) -> None:
    state = ("batch", 2, 4, 4)
    manifest = replace(
        sample_manifest,
        inputs=(
            InputRecord("input_ids", "int64", ("batch", "seq")),
            InputRecord("attention_mask", "int64", ("batch", "seq"), default=1),
            InputRecord("past_state_0", "float32", state),
        ),
        outputs=(
            TensorRecord("logits", "float32", ("batch", "seq", 50)),
            TensorRecord("present_state_0", "float32", state),
        ),
        states=(StateRecord("past_state_0", "present_state_0", "float32", state, "Sum"),),
    )
    assert language_interface(manifest) == LanguageInterface(
        "input_ids", "logits", 50, "attention_mask"
    )
    pixels = InputRecord("pixels", "float32", ("batch", 3, 8, 8))
    manifest = replace(manifest, inputs=(*manifest.inputs, pixels))
    with pytest.raises(UsageError, match="pixels"):
        language_interface(manifest)


# Tokenizers --------------------------------------------------------------------------------------


def test_bytes_become_characters_when_they_are_whole(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(tmp_path, 256)
    ids = tokenizer.encode("é∑\udcff")
    assert ids == [0xC3, 0xA9, 0xE2, 0x88, 0x91, 0xFF]
    decode = tokenizer.decoder()
    assert [decode(i) for i in ids] == ["", "é", "", "", "∑", "\N{REPLACEMENT CHARACTER}"]
    assert decode(0xE2) + decode(0x88) + decode.end() == "\N{REPLACEMENT CHARACTER}"
    assert decode.end() == ""


def test_without_a_tokenizer_other_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer.json, and with a vocabulary of 257"):
        find_tokenizer(tmp_path, 257)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A byte-level tokenizer of 300 tokens, and an end-of-text token; its folder."""
    pytest.importorskip("tokenizers", reason="needs the hf extra")
    from tests.support.tokenizers import save_tokenizer

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_tokenizer(folder, 300, ("<end>",))
    return folder


@pytest.mark.parametrize("text", ["the théorème", "∑ of 日本", " leading", "a  b\n"])
def test_a_copied_tokenizer_goes_there_and_back(tokenizer_file: Path, text: str) -> None:
    tokenizer = find_tokenizer(tokenizer_file, 300)
    decode, ids = tokenizer.decoder(), tokenizer.encode(text)
    assert "".join(decode(i) for i in ids) == text
    assert decode(0) == ""  # the end-of-text token has no text
    assert (decode.end(), tokenizer.token_text(0)) == ("", "<end>")


def test_bytes_that_are_no_character_do_not_hold_the_text_back(tokenizer_file: Path) -> None:
    tokenizer = find_tokenizer(tokenizer_file, 300)
    half, decode = tokenizer.encode("∑")[0], tokenizer.decoder()
    shown = "".join(decode(i) for i in [half] * 9 + tokenizer.encode("then the day"))
    assert shown.strip("\N{REPLACEMENT CHARACTER}") == "then the day"
    decode = tokenizer.decoder()
    assert (decode(half), decode.end()) == ("", "\N{REPLACEMENT CHARACTER}")


@given(st.lists(st.integers(0, 11), max_size=9), st.lists(st.integers(0, 11), max_size=4))
@settings(deadline=None)
def test_words_keep_their_spaces_around_tokens_without_text(
    spaced_tokenizer: Path, ids: list[int], before: list[int]
) -> None:
    """One token at a time as all at once; 0 and 1 are special, and 10 and 11 are no tokens."""
    import tokenizers

    tokenizer = find_tokenizer(spaced_tokenizer, 12)
    inner = tokenizers.Tokenizer.from_file(str(spaced_tokenizer / "tokenizer.json"))
    decode = tokenizer.decoder()
    shown = "".join(decode(i) for i in ids) + decode.end()
    assert shown == inner.decode(ids)
    whole = inner.decode([*before, *ids])
    assert inner.decode(before) + tokenizer.gap(before, ids) + shown == whole
    assert len(whole.split()) == sum(1 < i < 10 for i in [*before, *ids])


@pytest.fixture(scope="module")
def spaced_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="needs the hf extra")
    from tests.support.tokenizers import save_spaced_tokenizer

    folder = tmp_path_factory.mktemp("spaced")
    save_spaced_tokenizer(folder, 10, ("<s>", "</s>"))
    return folder


def test_a_prompt_that_is_no_text_is_refused(tokenizer_file: Path) -> None:
    with pytest.raises(UsageError, match="not valid UTF-8"):
        find_tokenizer(tokenizer_file, 300).encode("\udcff")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the hf extra")
    write(tmp_path, "tokenizer.json", {"model": "none"})
    with pytest.raises(UsageError, match=r"tokenizer.json cannot be read"):
        find_tokenizer(tmp_path, 300)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_files_that_were_replaced_after_opening_are_not_read(copy: Path, name: str) -> None:
    add(copy, name, {"eos_token_id": 3})
    opened, trusting = (linexport.load(copy, threads=1, verify=v) for v in (True, False))
    assert end_tokens(opened.path, opened.verified) == {3}
    write(copy, name, {"eos_token_id": 4})
    with pytest.raises(UsageError, match="not the file that was there when the artifact was open"):
        opened.generate([1, 2, 3])
    assert end_tokens(trusting.path, trusting.verified) == {4}


def test_files_that_are_not_in_the_manifest_are_not_read(
    cli: Callable[..., Any], copy: Path
) -> None:
    """A signature covers the files that the manifest lists, and no others."""
    write(copy, "generation_config.json", {"eos_token_id": 3})
    done = cli("generate", copy, "--prompt", "x")
    assert done.code == 2
    assert "generation_config.json is not among the files of the artifact" in done.err


@pytest.mark.parametrize("added", [5, [1], [{"content": "end"}], ["end"]])
def test_a_tokenizer_whose_added_tokens_are_none_names_no_end(tmp_path: Path, added: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"eos_token": "end"})
    write(tmp_path, "tokenizer.json", {"added_tokens": added})
    assert end_tokens(tmp_path) == frozenset()


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "WordLevel", "vocab": {"q": 0}, "unk_token": "absent"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a|a|b)+$c"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["unknown token", "regular expression"],
)
def test_a_tokenizer_that_fails_on_a_prompt_is_an_error(
    tokenizer_file: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """The second one is a panic of the library, which is not an ``Exception``."""
    content = json.loads((tokenizer_file / "tokenizer.json").read_text())
    write(tmp_path, "tokenizer.json", {**content, **change})
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot encode the prompt"):
        find_tokenizer(tmp_path, 300).encode("a" * 60 + "!")


def doubled(step: str) -> dict[str, Any]:
    """Return a sequence of replacements that makes 2^40 characters of one."""
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", step: [replace] * 40}


@pytest.mark.parametrize("limit", [{"seconds": 1}, {"memory": 2**27}], ids=["time", "memory"])
def test_a_tokenizer_that_never_ends_is_an_error_and_the_next_prompt_is_encoded(
    tokenizer_file: Path, limit: dict[str, int]
) -> None:
    content = json.loads((tokenizer_file / "tokenizer.json").read_text())
    content["normalizer"] = doubled("normalizers")
    encoder = Encoder(tokenizer_file / "tokenizer.json", json.dumps(content).encode(), **limit)
    with pytest.raises(UsageError, match=r"tokenizer\.json takes more than (1 s|0\.125 GiB) of"):
        encoder.encode("a", special=True)
    assert encoder.encode("the theory", special=True)


def test_a_tokenizer_is_read_within_the_limits(tokenizer_file: Path) -> None:
    content = json.loads((tokenizer_file / "tokenizer.json").read_text())
    content["normalizer"] = doubled("normalizers")
    token = {"id": 300, "content": "aaa", "special": False, "normalized": True}
    content["added_tokens"].append(
        {**token, **dict.fromkeys(("lstrip", "rstrip", "single_word"), False)}
    )
    with pytest.raises(UsageError, match=r"tokenizer\.json takes more than 1 s of processor time"):
        Encoder(tokenizer_file / "tokenizer.json", json.dumps(content).encode(), seconds=1)


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (doubled("decoders"), r"make 1\.1e\+12 characters of one; at most 1024"),
        (
            {"type": "Replace", "pattern": {"Regex": "(a|a)+$"}, "content": "a"},
            "replaces what a regular expression finds",
        ),
    ],
)
def test_a_decoder_without_bound_is_refused(
    tokenizer_file: Path, decoder: dict[str, Any], words: str
) -> None:
    content = json.loads((tokenizer_file / "tokenizer.json").read_text())
    write(tokenizer_file, "tokenizer.json", {**content, "decoder": decoder})
    with pytest.raises(UsageError, match=words):
        find_tokenizer(tokenizer_file, 300)


def test_a_tokenizer_neither_pads_nor_cuts_a_prompt(tokenizer_file: Path, tmp_path: Path) -> None:
    """Padding to 2^30 tokens, as a file may ask for, takes all memory."""
    content = json.loads((tokenizer_file / "tokenizer.json").read_text())
    side = {"direction": "Right", "strategy": {"Fixed": 2**30}, "pad_to_multiple_of": None}
    content["padding"] = {**side, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    write(tmp_path, "tokenizer.json", {**content, "truncation": cut})
    expected = find_tokenizer(tokenizer_file, 300).encode("the théorème")
    assert find_tokenizer(tmp_path, 300).encode("the théorème") == expected


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "tokenizer.json", {})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentProblemError, match=r"pip install '\.\[hf\]'"):
        find_tokenizer(tmp_path, 300)


def test_the_files_of_a_model_name_its_end(tmp_path: Path) -> None:
    assert end_tokens(tmp_path) == frozenset()
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 4, "content": "<end>"}]})
    assert end_tokens(tmp_path) == frozenset()
    for word in ("<end>", {"content": "<end>"}):
        write(tmp_path, "tokenizer_config.json", {"eos_token": word})
        assert end_tokens(tmp_path) == {4}
    write(tmp_path, "config.json", {"eos_token_id": 5})
    assert end_tokens(tmp_path) == {5}
    write(tmp_path, "config.json", {"eos_token_id": 5, "text_config": {"eos_token_id": 6}})
    assert end_tokens(tmp_path) == {6}
    for ids, expected in ((7, {7}), ([7, 8], {7, 8})):
        write(tmp_path, "generation_config.json", {"eos_token_id": ids})
        assert end_tokens(tmp_path) == expected
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UsageError, match=r"generation_config.json cannot be read"):
        end_tokens(tmp_path)


# The command -------------------------------------------------------------------------------------


def test_the_command_streams_prompt_and_continuation(
    cli: Callable[..., Any], converted: Callable[..., Path], model: Artifact
) -> None:
    written = list(model.generate(PROMPT.encode(), max_tokens=12))
    done = cli("generate", model.path, "--prompt", PROMPT, "--max-tokens", 12, "--threads", 1)
    text = visible_text(bytes(written).decode(errors="replace"))
    assert (done.code, done.out) == (0, f"{PROMPT}{text}\n")
    assert "12 tokens after 17 of the prompt" in done.err


def test_the_command_in_json(cli: Callable[..., Any], model: Artifact) -> None:
    settings: Any = {"max_tokens": 9, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "seed": 4}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    found = cli("generate", model.path, "--prompt", PROMPT, *options, "--json").json()
    written = model.generate(PROMPT.encode(), **settings)
    assert found["tokens"] == list(written)
    assert (found["status"], found["stopped"], found["prompt_tokens"]) == ("ok", "length", 17)


def test_the_command_uses_the_copied_tokenizer_and_stops_at_the_end_it_names(
    cli: Callable[..., Any], copy: Path, tokenizer_file: Path, model: Artifact
) -> None:
    import tokenizers

    add(copy, "tokenizer.json", json.loads((tokenizer_file / "tokenizer.json").read_text()))
    inner = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    ids = inner.encode("bad").ids
    assert max(ids) < 256
    written = list(model.generate(ids, max_tokens=40))
    found = cli("generate", copy, "--prompt", "bad", "--max-tokens", 40, "--json").json()
    assert (found["tokens"], found["stopped"]) == (written, "length")
    assert len(found["text"]) > 20
    assert inner.decode(written).startswith(found["text"])
    add(copy, "generation_config.json", {"eos_token_id": [written[7], 299]})
    found = cli("generate", copy, "--prompt", "bad", "--max-tokens", 40, "--json").json()
    assert found["stopped"] == "end"
    assert found["tokens"] == written[: written.index(written[7])]


def test_the_command_writes_the_space_between_prompt_and_text(
    cli: Callable[..., Any], copy: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tokenizers", reason="needs the hf extra")
    from tests.support.tokenizers import save_spaced_tokenizer

    save_spaced_tokenizer(tmp_path, 256, ("<s>", "</s>"))
    add(copy, "tokenizer.json", json.loads((tmp_path / "tokenizer.json").read_text()))
    asked = ["generate", copy, "--prompt", "w105 w109", "--max-tokens", 5]
    found = cli(*asked, "--json").json()
    assert found["text"] == "".join(f" w{token}" for token in found["tokens"])
    assert cli(*asked).out == f"w105 w109{found['text']}\n"


def test_the_command_continues_several_texts_at_once(
    cli: Callable[..., Any], model: Artifact
) -> None:
    prompts = ["import ", "def f(x): return x", "a"]
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    asked += ["--max-tokens", 12, "--repetition-penalty", 1.2]
    found = cli("generate", model.path, *asked, "--json").json()
    for text, prompt in zip(found["texts"], prompts, strict=True):
        alone = model.generate(prompt.encode(), max_tokens=12, repetition_penalty=1.2)
        assert text["tokens"] == list(alone)
        assert (text["prompt"], text["stopped"]) == (prompt, "length")
    done = cli("generate", model.path, *asked)
    texts = "".join(f"{t['prompt']}{t['text']}\n" for t in found["texts"])
    assert done.out == visible_text(texts)
    assert "36 tokens after 26 of 3 prompts" in done.err


def test_the_command_ends_before_a_stop_string(cli: Callable[..., Any], model: Artifact) -> None:
    asked = ["generate", model.path, "--prompt", PROMPT, "--max-tokens", 40]
    text = cli(*asked, "--json").json()["text"]
    stop = text[9:11]
    found = cli(*asked, "--stop", stop, "--stop", "@@", "--json").json()
    assert (found["text"], found["stopped"]) == (text[: text.index(stop)], "stop")
    assert cli(*asked, "--stop", stop).out == f"{PROMPT}{visible_text(text[: text.index(stop)])}\n"


def test_control_characters_of_a_text_are_escapes_on_a_terminal(
    model: Artifact,
) -> None:
    """Of the prompt as of what is written after it; ``--raw`` gives the bytes of both."""
    prompt = b"\x1b]0;owned\x07\x9b2J \xe2\x80\xae\xff\r\n\ta"
    written = bytes(model.generate(prompt, max_tokens=40))
    asked = ("generate", str(model.path), "--max-tokens", "40", "--prompt", os.fsdecode(prompt))
    shown, raw = (_bytes_of(asked + more) for more in ((), ("--raw",)))
    assert raw == prompt + written + b"\n"
    assert shown.startswith(rb"\x1b]0;owned\x07")
    assert not set(shown) & ({*range(32), 127} - set(b"\n\t"))
    assert all(unicodedata.category(c) != "Cc" or c in "\n\t" for c in shown.decode())
    assert "\u202e" not in shown.decode()


def _bytes_of(arguments: tuple[str, ...]) -> bytes:
    command = [sys.executable, "-m", "linexport", *arguments, "--threads", "1"]
    return subprocess.run(command, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--prompt", ""], 2, "no tokens"),
        (["--prompt", "x", "--temperature", "inf"], 2, "temperature is inf"),
        (["--prompt", "x", "--max-tokens", "0"], 2, "max-tokens"),
        (["--prompt", "x", "--stop", ""], 2, "expected a list of texts"),
        (["--prompt", "x", "--repetition-penalty", "0"], 2, "repetition_penalty is 0.0"),
        (["--prompt", "x", "--chat"], 2, "has no chat template: expected chat_template.jinja"),
        (["--prompt", "x", "--system", "y"], 2, "give --chat too"),
        (["--prompt", "x", "--prompt", "y", "--draft", "ngram"], 2, "--draft takes one prompt"),
        ([], 2, "--prompt"),
    ],
)
def test_bad_requests(
    cli: Callable[..., Any], model: Artifact, options: list[str], code: int, words: str
) -> None:
    done = cli("generate", model.path, *options)
    assert done.code == code and words in done.err and "Traceback" not in done.err


def test_a_model_that_cannot_be_run_is_no_fault_of_the_program(
    cli: Callable[..., Any], copy: Path
) -> None:
    """More bytes than any machine has addresses for."""
    model = onnx.load(copy / "model.onnx")
    graph, logits = model.graph, model.graph.output[0].name
    [node] = [n for n in graph.node if logits in n.output]
    node.output[list(node.output).index(logits)] = "right"
    graph.initializer.append(numpy_helper.from_array(np.array([2**50]), "size"))
    graph.node.append(helper.make_node("ConstantOfShape", ["size"], ["much"]))
    graph.node.append(helper.make_node("ReduceSum", ["much"], ["sum"], keepdims=0))
    graph.node.append(helper.make_node("Add", ["right", "sum"], [logits]))
    onnx.save(model, copy / "model.onnx")
    files = describe_files(copy)
    content = json.loads((copy / "manifest.json").read_text())
    content["files"]["model.onnx"] = vars(files["model.onnx"])
    content["model_sha256"] = files["model.onnx"].sha256
    (copy / "manifest.json").write_text(json.dumps(content))
    done = cli("generate", copy, "--prompt", "x")
    assert done.code == 5, done.err
    assert "ONNX Runtime cannot run the model" in done.err and "fault" not in done.err


def test_a_reader_that_has_had_enough_ends_it_quietly(
    start: Callable[..., Any], model: Artifact
) -> None:
    process = start("generate", model.path, "--prompt", "x", "--max-tokens", 10**9)
    assert process.stdout.read(5)
    process.stdout.close()
    assert (process.wait(timeout=60), process.stderr.read()) == (0, "")


def test_a_prompt_longer_than_a_call_is_fed_in_pieces(
    converted: Callable[..., Path], model: Artifact
) -> None:
    """The text, also of several prompts with padding or without, is that of one call."""
    short = linexport.load(converted("language_model", dims=("seq=1:8:16",)), threads=1)
    assert short.longest == 16 and model.longest is None
    prompts = [bytes(range(40)), bytes(range(16, 33)), b"ab"]
    for prompt in prompts:
        wanted = list(model.generate(prompt, max_tokens=4))
        assert list(short.generate(prompt, max_tokens=4)) == wanted
    assert list(short.generate_batch(prompts, max_tokens=4)) == list(
        model.generate_batch(prompts, max_tokens=4)
    )
    with pytest.raises(UsageError, match="at most 16"):
        short.stream().step(np.zeros((1, 17), np.int64))
