"""Texts beside those of transformers' ``generate``, and rows of batches beside the same alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import linexport
from linexport.artifact import Artifact
from linexport.artifact.text.generation_config import NEUTRAL
from linexport.artifact.text.restrictions import NGrams, Restrictions
from linexport.artifact.text.sampling import Sampling
from linexport.errors import UsageError
from linexport.manifest import digest
from tests.support.tokenizers import save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

Converted = Callable[[str], tuple[Path, Any]]

FAMILIES = ["mamba2", "qwen3_5_text"]
PROMPTS = [[5, 7, 11], [3, 9, 4, 60, 22, 8, 17], [44]]


@pytest.fixture
def pair(
    converted_family: Converted, model_folder: Callable[..., Path], request: Any
) -> tuple[Artifact, Any]:
    """The artifact of a family, and the model of transformers."""
    from transformers import AutoModelForCausalLM

    family = request.param
    original = AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32)
    original.generation_config.eos_token_id = None  # random weights end a text at once
    return linexport.load(converted_family(family)[0], threads=1), original.eval()


def transformers_ids(original: Any, prompt: list[int], **how: Any) -> list[int]:
    ids = torch.tensor([prompt])
    made = original.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)
    return made[0, len(prompt) :].tolist()


@pytest.mark.services
@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_greedy_texts_are_those_of_transformers(pair: Any, penalty: float) -> None:
    artifact, original = pair
    how: dict[str, Any] = {"repetition_penalty": penalty}
    for prompt in PROMPTS:
        expected = transformers_ids(original, prompt, do_sample=False, max_new_tokens=40, **how)
        found = list(artifact.generate(prompt, max_tokens=40, stop=[], **how))
        assert found == expected
    if penalty > 1:  # it does something: without it, other tokens come
        assert expected != list(artifact.generate(prompt, max_tokens=40, stop=[]))


@pytest.mark.services
@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.2},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": 4},
    ],
    ids=["argmax", "samples"],
)
def test_rows_of_a_batch_are_what_each_is_alone(pair: Any, how: dict[str, Any]) -> None:
    """Prompts of three lengths: two begin with padding. The second row ends before the others."""
    artifact, original = pair
    written = list(artifact.generate_batch(PROMPTS, max_tokens=30, stop=[], **how))
    ended = written[6][1]
    seed = how.get("seed", 0)
    alone = [
        list(artifact.generate(p, max_tokens=30, stop=[ended], **{**how, "seed": seed + i}))
        for i, p in enumerate(PROMPTS)
    ]
    batch = list(artifact.generate_batch(PROMPTS, max_tokens=30, stop=[ended], **how))
    rows = [[token for token in row if token is not None] for row in zip(*batch, strict=True)]
    assert rows == alone
    assert len(alone[1]) <= 6 and len({len(row) for row in alone}) > 1
    if "temperature" not in how:
        # transformers penalises the token of the padding too, so that its rows depend on it.
        for row, prompt in zip(rows, PROMPTS, strict=True):
            expected = transformers_ids(
                original, prompt, do_sample=False, max_new_tokens=30, eos_token_id=ended, **how
            )
            assert row == [token for token in expected if token != ended]


@pytest.mark.services
@pytest.mark.parametrize("pair", ["mamba2"], indirect=True)
def test_texts_end_where_those_of_transformers_do(pair: Any) -> None:
    artifact, original = pair
    prompt = PROMPTS[1]
    text = list(artifact.generate(prompt, max_tokens=40, stop=[]))
    ends = [text[9], text[5], 63]
    expected = transformers_ids(original, prompt, do_sample=False, eos_token_id=ends)
    assert [*artifact.generate(prompt, stop=ends), expected[-1]] == expected


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., Path]) -> Any:
    """A model with a tokenizer and a chat template, as the hub has them; its folder."""
    from transformers import PreTrainedTokenizerFast

    source = model_folder("mamba2", vocab_size=300)
    folder = Path(shutil.copytree(source, tmp_path_factory.mktemp("words") / "model"))
    save_tokenizer(folder, 300, ("<pad>", "<s>", "</s>", "<|turn|>"))
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|turn|>"],
    )
    made.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}"
        "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words_artifact(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("words") / "artifact"
    assert linexport.convert(words, place, bench=False, threads=1).status == "ok"
    return place


@pytest.mark.services
def test_stop_strings_and_conversations_are_those_of_transformers(
    words: Path, words_artifact: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    artifact, reader = (
        linexport.load(words_artifact, threads=1),
        AutoTokenizer.from_pretrained(words),
    )
    original = AutoModelForCausalLM.from_pretrained(words, dtype=torch.float32).eval()
    messages = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Where is the théorème?"},
    ]
    prompt = artifact.encode_chat(messages)
    assert prompt == reader.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    text = list(artifact.generate(prompt, max_tokens=60, stop=[]))
    shown = reader.decode(text, skip_special_tokens=True)
    stop = next(shown[i : i + 3] for i in range(20, 60) if shown[i : i + 3].isascii())
    found = list(artifact.generate(prompt, max_tokens=60, stop=[], stop_strings=[stop, "absent"]))
    expected = transformers_ids(
        original,
        prompt,
        **{"do_sample": False, "max_new_tokens": 60, "eos_token_id": []},
        **{"stop_strings": [stop, "absent"], "tokenizer": reader},
    )
    assert found == expected and len(found) < 60
    special = list(artifact.generate(prompt, max_tokens=9, stop=[], stop_strings=["</s>"]))
    assert special == list(artifact.generate(prompt, max_tokens=9, stop=[2]))


@pytest.mark.services
def test_the_command_answers_a_conversation_and_ends_before_a_stop_string(
    words_artifact: Path, cli: Callable[..., Any]
) -> None:
    artifact = linexport.load(words_artifact, threads=1)
    prompt = artifact.encode_chat(
        [{"role": "system", "content": "Brief."}, {"role": "user", "content": "the day"}]
    )
    asked = ["--prompt", "the day", "--chat", "--system", "Brief.", "--max-tokens", 60]
    found = cli("generate", words_artifact, *asked, "--json").json()
    assert found["tokens"] == list(artifact.generate(prompt, max_tokens=60))
    assert found["prompt_tokens"] == len(prompt)
    stop = next(found["text"][i : i + 2] for i in range(10, 60) if found["text"][i].isascii())
    short = cli("generate", words_artifact, *asked, "--stop", stop, "--json").json()
    assert short["stopped"] == "stop"
    assert short["text"] == found["text"][: found["text"].index(stop)]
    done = cli("generate", words_artifact, *asked, "--stop", stop)
    assert done.out == short["text"] + "\n"


# generation_config.json --------------------------------------------------------------------------


@pytest.fixture
def configured(words_artifact: Path, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Return the artifact with another ``generation_config.json``, as ``convert`` would make it."""

    def make(content: dict[str, Any]) -> Path:
        place = Path(shutil.copytree(words_artifact, tmp_path / str(len(list(tmp_path.iterdir())))))
        (place / "generation_config.json").write_text(json.dumps(content))
        manifest = json.loads((place / "manifest.json").read_text())
        path = place / "generation_config.json"
        known = {"bytes": path.stat().st_size, "sha256": digest(path)}
        manifest["files"]["generation_config.json"] = known
        (place / "manifest.json").write_text(json.dumps(manifest))
        return place

    return make


@pytest.mark.services
def test_the_model_s_own_settings_are_taken_where_nothing_is_asked(
    configured: Callable[..., Path], cli: Callable[..., Any]
) -> None:
    own = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    place = configured({**own, "max_new_tokens": 20, "eos_token_id": [2, 0]})
    artifact = linexport.load(place, threads=1)
    asked: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
    asked |= {"repetition_penalty": 1.1, "max_tokens": 20}
    for seed in (0, 5):
        assert list(artifact.generate([9, 8], seed=seed)) == list(
            artifact.generate([9, 8], seed=seed, **asked, stop=[2, 0])
        )
    found = cli("generate", place, "--prompt", "the", "--json").json()
    assert len(found["tokens"]) <= 20
    greedy = list(artifact.generate([9, 8], temperature=0, repetition_penalty=1, max_tokens=9))
    plain = linexport.load(configured({}), threads=1)
    assert greedy == list(plain.generate([9, 8], max_tokens=9, stop=[2, 0]))
    shown = cli("generate", configured({}), "--prompt", "the", "--max-tokens", 40, "--json").json()
    stop = shown["text"][10:12]
    place = configured({"stop_strings": [stop], "max_length": 30})
    found = cli("generate", place, "--prompt", "the", "--json").json()
    assert found["text"] == shown["text"][: shown["text"].index(stop)]
    assert len(list(linexport.load(place, threads=1).generate([9] * 5, stop_strings=[]))) == 25


RESTRICTED: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 0.7},
    {"min_new_tokens": 12},
    {"min_length": 12, "suppress_tokens": [4, 9_999, -1]},
    {"min_length": 30, "min_new_tokens": 7},
]


@pytest.mark.services
def test_tokens_that_may_not_come_are_those_of_transformers(
    configured: Callable[..., Path], words: Path
) -> None:
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(words, dtype=torch.float32).eval()
    plain = list(linexport.load(configured({}), threads=1).generate([9, 8], max_tokens=20, stop=[]))
    first, ends = plain[0], [plain[3], plain[6]]
    cases = [*RESTRICTED, {"begin_suppress_tokens": [first]}, {"suppress_tokens": [first]}]
    others = 0
    for how in cases:
        own = {"eos_token_id": ends, "pad_token_id": 0, **how}
        artifact = linexport.load(configured(own), threads=1)
        for prompt in ([9, 8], [9, 8, *plain[:4]]):
            given = {**own, "suppress_tokens": [t for t in own.get("suppress_tokens", []) if t > 0]}
            made = transformers_ids(
                original, prompt, max_new_tokens=20, **drop(given, "pad_token_id")
            )
            expected = made[:-1] if made[-1] in ends else made
            assert list(artifact.generate(prompt, max_tokens=20)) == expected, how
            free = artifact.generate(prompt, max_tokens=20, draft=linexport.NGramDraft())
            assert list(free) == expected, how
            usual = transformers_ids(original, prompt, max_new_tokens=20, eos_token_id=ends)
            others += usual != made
    assert others >= len(cases)  # the settings do something


def drop(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def test_a_sequence_that_may_not_come_again_is_found() -> None:
    """Beside all n-grams looked up anew after every token."""
    tokens = np.random.default_rng(0).integers(4, size=200).tolist()
    for size in (1, 2, 3):
        grams = NGrams(size, tokens[:7])
        for end in range(7, len(tokens)):
            past = [tuple(tokens[i : i + size]) for i in range(end - size + 1)]
            last = tuple(tokens[end - size + 1 : end])
            assert set(grams.repeated()) == {gram[-1] for gram in past if gram[:-1] == last}
            grams.add(tokens[end])


def test_where_no_token_may_come_nothing_is_chosen() -> None:
    restrictions = Restrictions(suppressed=(0, 1, 2))
    with pytest.raises(UsageError, match="leaves no token that may come next"):
        restrictions.allowed(np.zeros(3, np.float32), 1, 0, ())


@pytest.mark.services
def test_settings_that_are_not_implemented_are_said(
    configured: Callable[..., Path], cli: Callable[..., Any]
) -> None:
    neutral = {name: values[0] if values else None for name, values in NEUTRAL.items()}
    asked = ["--prompt", "the", "--max-tokens", 4]
    done = cli("generate", configured(neutral), *asked)
    assert done.code == 0 and "not implemented" not in done.err
    done = cli("generate", configured({"num_beams": 4, "typical_p": 0.5}), *asked)
    assert done.code == 0
    assert "asks for num_beams: 4, typical_p: 0.5, which is not implemented" in done.err
    for bad, words in (
        ({"do_sample": True, "top_p": 2}, "top_p is 2.0; expected more than 0"),
        ({"repetition_penalty": "much"}, 'repetition_penalty is "much"; expected a number'),
        ({"max_new_tokens": True}, "max_new_tokens is true; expected a whole number"),
        ({"stop_strings": 5}, "stop_strings is 5; expected a list of texts"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens is [1.5]; expected a list of token ids"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1; expected 0 or more"),
    ):
        done = cli("generate", configured(bad), *asked)
        assert done.code == 2 and words in done.err and "generation_config.json" in done.err


# Distributions -----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(-400, 400), min_size=2, max_size=40, unique=True),
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0.2, 3),
            "top_k": st.integers(0, 45),
            "top_p": st.floats(0.05, 1),
            "min_p": st.floats(0, 0.9),
            "repetition_penalty": st.floats(0.5, 2),
        }
    ),
    st.data(),
)
def test_tokens_are_kept_and_weighed_as_transformers_does(
    sizes: list[int], how: dict[str, Any], data: Any
) -> None:
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as library

    logits = np.array(sizes) / 97
    text = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=5))
    sampling = Sampling(**how)
    found = sampling.probabilities(
        sampling.penalised(logits, np.unique(np.asarray(text, np.int64)))
    )
    processors = LogitsProcessorList(
        [library.RepetitionPenaltyLogitsProcessor(how["repetition_penalty"])]
        + [library.TemperatureLogitsWarper(how["temperature"])]
        + ([library.TopKLogitsWarper(how["top_k"])] if how["top_k"] else [])
        + ([library.TopPLogitsWarper(how["top_p"])] if how["top_p"] < 1 else [])
        + [library.MinPLogitsWarper(how["min_p"])]
    )
    ids = torch.tensor([text], dtype=torch.int64)
    scores = processors(ids, torch.from_numpy(logits)[None].clone())
    expected = torch.softmax(scores, -1)[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)
