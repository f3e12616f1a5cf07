"""Modules of sentence-transformers: beside their formulas, and beside that library."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import linexport
from linexport import manifest as manifests
from linexport.artifact.text.embedding import TextVectors
from linexport.errors import LinexportError, UsageError
from linexport.manifest.folder import describe_files
from linexport.sources import load_model
from tests.support import SCRIPTS
from tests.support.environments import made
from tests.support.families import TINY
from tests.support.sentence_folder import (
    LONGEST,
    NORMALIZE,
    Module,
    dense,
    pooling,
    save_sentence_model,
    write_modules,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 32
MEAN = pooling(WIDTH, "pooling_mode_mean_tokens")
TEXTS = ["a cat", "a dog", "x", "the bonds and stocks of the day", *("word " * n for n in (3, 30))]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sentence") / "base"
    assert TINY["mamba2"]["hidden_size"] == WIDTH
    return save_sentence_model("mamba2", place, [])


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """``folder(modules, library)``: the base model with modules behind it."""

    def copied(*modules: Module, library: str = "sentence_transformers") -> Path:
        place = Path(shutil.copytree(base, tmp_path / f"model{len(list(tmp_path.iterdir()))}"))
        write_modules(place, modules, library)
        return place

    return copied


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """An artifact with a mean, a projection and a norm."""
    place = tmp_path_factory.mktemp("embedder")
    model = Path(shutil.copytree(base, place / "model"))
    write_modules(model, [MEAN, dense(WIDTH, 24), NORMALIZE], "sentence_transformers")
    manifest = linexport.convert(model, place / "out", bench=False, threads=1)
    assert (manifest.status, manifest.head) == ("ok", "pooled") and not manifest.warnings
    return place / "out"


def hidden_states(place: Path, ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """What the library's model gives for each row alone, in float64; NaN where padding is."""
    model = transformers.AutoModel.from_pretrained(place, dtype=torch.float64).eval()
    found = np.full((*ids.shape, WIDTH), np.nan)
    for row, kept in enumerate(mask.bool()):
        with torch.no_grad():
            states = model(input_ids=ids[row : row + 1, kept]).last_hidden_state
        found[row, kept] = states[0].numpy()
    return found


def pooled(mode: str, states: np.ndarray) -> np.ndarray:
    """A pooling of the tokens of one text, from its definition."""
    states = states[~np.isnan(states[:, 0])]
    weights = np.arange(1, len(states) + 1)
    return {
        "cls_token": states[0],
        "lasttoken": states[-1],
        "max_tokens": states.max(0),
        "mean_tokens": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean_tokens": (states * weights[:, None]).sum(0) / weights.sum(),
    }[mode]


@pytest.mark.parametrize("side", ["left", "right"])
def test_poolings_projections_and_norms_are_their_formulas(
    folder: Callable[..., Path], side: str
) -> None:
    modes = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
    modes += ("weightedmean_tokens", "lasttoken")
    wide = WIDTH * len(modes)
    identity = "torch.nn.modules.linear.Identity"
    norm: Module = ("LayerNorm", {"dimension": 24}, {})
    norm[2].update({"norm.weight": torch.rand(24) + 0.5, "norm.bias": torch.randn(24)})
    projection = dense(wide, 24, use_residual=True, activation_function=identity)
    projection[2]["residual.weight"] = torch.randn(24, wide) / 9
    place = folder(
        pooling(WIDTH, *(f"pooling_mode_{m}" for m in modes)), projection, norm, NORMALIZE
    )
    ids = torch.randint(3, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 9).long()
    for row, length in enumerate((9, 4, 1)):
        mask[row, slice(0, 9 - length) if side == "left" else slice(length, 9)] = 0
    with torch.no_grad():
        found = load_model(place).module(ids, mask).numpy()
    states = hidden_states(place, ids, mask)
    x = np.stack([np.concatenate([pooled(m, row) for m in modes]) for row in states])
    weights = {name: w.double().numpy() for name, w in (projection[2] | norm[2]).items()}
    x = x @ (weights["linear.weight"] + weights["residual.weight"]).T + weights["linear.bias"]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * weights["norm.weight"] + weights["norm.bias"]
    np.testing.assert_allclose(found, x / np.linalg.norm(x, axis=-1, keepdims=True), atol=3e-6)


def test_texts_become_vectors_that_do_not_depend_on_others(embedder: Path) -> None:
    model = linexport.load(embedder, threads=1)
    found = model.embed(TEXTS, prompt="query")
    assert isinstance(found, np.ndarray) and found.shape == (len(TEXTS), 24)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    for text, vector in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(model.embed(text, prompt="query"), vector, atol=1e-6)
    assert abs(model.embed(TEXTS[0]) - found[0]).max() > 0.01  # a prompt changes it
    np.testing.assert_array_equal(model.embed(TEXTS, prompt="query", size=5), found[:, :5])
    assert model.embed([]).shape == (0, 24)
    # The longest texts are cut, the token at the end is kept.
    np.testing.assert_array_equal(model.embed("word " * 30), model.embed("word " * 300))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "passage"}, "Found prompt 'passage'; this model has query, document."),
        ({"size": 25}, "Found size 25; vectors of this model have 24 numbers."),
    ],
)
def test_what_a_model_does_not_have_is_said(
    embedder: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        linexport.load(embedder, threads=1).embed("a cat", **given)


@pytest.mark.services
def test_a_model_of_texts_is_no_embedding_model(converted: Callable[..., Path]) -> None:
    model = linexport.load(converted("language_model"), threads=1)
    with pytest.raises(UsageError, match=r"not an embedding model: .* sentence-transformers"):
        model.embed("a cat")


@pytest.mark.services
def test_vectors_are_those_of_sentence_transformers(embedder: Path, tmp_path: Path) -> None:
    place, output = embedder.parent / "model", tmp_path / "vectors.npy"
    python = made("sentence") / "bin" / "python"
    script = SCRIPTS / "sentence_vectors.py"
    command = [python, "-W", "ignore", script, place, json.dumps(TEXTS), "query", output]
    subprocess.run(command, check=True)
    found = linexport.load(embedder, threads=1).embed(TEXTS, prompt="query")
    np.testing.assert_allclose(found, np.load(output), atol=2e-6)


MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
WITHOUT_PROMPT: Module = (
    "Pooling",
    {"embedding_dimension": WIDTH, "pooling_mode": MODES, "include_prompt": False},
    {},
)


@pytest.fixture(scope="session")
def without_prompt(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """An artifact of all poolings, none of which counts tokens of the prompt."""
    place = tmp_path_factory.mktemp("without_prompt")
    model = Path(shutil.copytree(base, place / "model"))
    write_modules(model, [WITHOUT_PROMPT, NORMALIZE], "sentence_transformers")
    manifest = linexport.convert(model, place / "out", bench=False, threads=1)
    assert (manifest.status, manifest.head) == ("ok", "pooled") and not manifest.warnings
    assert {"prompts that are not pooled, left padding"} < {c.name for c in manifest.parity.cases}
    return place / "out"


def behind_prompt(states: np.ndarray, prompt: int) -> np.ndarray:
    """The poolings of one text, from their definition, in which its prompt only counts places."""
    kept, weights = states[prompt:], np.arange(prompt + 1, len(states) + 1)[:, None]
    found = [kept[0], kept.max(0), kept.mean(0), kept.sum(0) / len(kept) ** 0.5]
    return np.concatenate([*found, (kept * weights).sum(0) / weights.sum(), kept[-1]])


def test_tokens_of_a_prompt_are_not_pooled(without_prompt: Path) -> None:
    model, place = linexport.load(without_prompt, threads=1), without_prompt.parent / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    for prompt in ("query", "document", ""):
        before = f"{prompt}: " if prompt else ""
        count = len(tokenizer.encode(before).ids) - 1 if before else 0  # the last is </s>
        found = model.embed(TEXTS, prompt=prompt)
        for text, vector in zip(TEXTS, found, strict=True):
            ids = tokenizer.encode(before + text).ids
            ids = ids if len(ids) <= LONGEST else [*ids[: LONGEST - 1], ids[-1]]
            tokens = torch.tensor([ids])
            [states] = hidden_states(place, tokens, torch.ones_like(tokens))
            x = behind_prompt(states, count)
            np.testing.assert_allclose(vector, x / np.linalg.norm(x), atol=3e-6)
    plain = np.stack([model.embed(text, prompt="query") for text in TEXTS])
    np.testing.assert_allclose(plain, model.embed(TEXTS, prompt="query"), atol=1e-6)


def test_a_prompt_that_leaves_nothing_to_pool_is_refused(
    without_prompt: Path, tmp_path: Path
) -> None:
    """Where no token of the tokenizer's own is behind a text that is cut within its prompt."""
    place = Path(shutil.copytree(without_prompt, tmp_path / "out"))
    names = ("config_sentence_transformers.json", "tokenizer.json")
    settings, tokenizer = (json.loads((place / name).read_text()) for name in names)
    settings["prompts"]["query"] = "word " * (LONGEST + 3)
    tokenizer["post_processor"] = None
    for name, content in zip(names, (settings, tokenizer), strict=True):
        (place / name).write_text(json.dumps(content))
    manifest = manifests.read(place)
    files = manifest.files | {name: describe_files(place)[name] for name in names}
    vectors = TextVectors(manifest, place, files)
    with pytest.raises(UsageError, match="has 20 tokens, of 20 that the text has with it: none"):
        vectors.tokens("a cat", "query")
    assert len(vectors.tokens("a cat")) < LONGEST


def test_a_prompt_that_is_pooled_is_a_failure(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases without a prompt pass: what fails is seen with one alone."""
    monkeypatch.setattr(
        "linexport.sources.hugging_face.streaming_model.WholeSequence.forward", pools_all
    )
    place = folder(WITHOUT_PROMPT, NORMALIZE)
    manifest = linexport.convert(place, tmp_path / "out", bench=False, threads=1)
    assert manifest.status == "parity_failed"
    failed = {case.name for case in manifest.parity.cases if not case.passed}
    assert failed == {f"prompts that are not pooled, {side} padding" for side in ("left", "right")}


def pools_all(
    self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, pooling_mask: torch.Tensor
) -> torch.Tensor:
    given = self.streaming.tokens(input_ids, attention_mask)
    ones = torch.ones_like(pooling_mask) + 0 * pooling_mask
    output, _ = self.streaming.advance(given, attention_mask, {}, pooling_mask=ones)
    found: torch.Tensor = output
    return found


@pytest.mark.services
def test_vectors_behind_prompts_are_those_of_sentence_transformers(
    without_prompt: Path, tmp_path: Path
) -> None:
    place, output = without_prompt.parent / "model", tmp_path / "vectors.npy"
    python = made("sentence") / "bin" / "python"
    script = SCRIPTS / "sentence_vectors.py"
    for prompt in ("query", "document"):
        command = [python, "-W", "ignore", script, place, json.dumps(TEXTS), prompt, output]
        subprocess.run(command, check=True)
        found = linexport.load(without_prompt, threads=1).embed(TEXTS, prompt=prompt)
        np.testing.assert_allclose(found, np.load(output), atol=3e-6)


@pytest.mark.services
def test_late_interaction_has_a_vector_of_each_token(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    projection = dense(WIDTH, 16, activation_function="torch.nn.modules.linear.Identity")
    place = folder(projection, library="pylate")
    manifest = linexport.convert(place, tmp_path / "out", bench=False, threads=1)
    assert (manifest.status, manifest.head) == ("ok", "hidden_states")
    model = linexport.load(tmp_path / "out", threads=1)
    found = model.embed(TEXTS)
    assert isinstance(found, list) and len(found[-1]) == LONGEST
    for text, vectors in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(model.embed(text), vectors, atol=1e-6)


PYLATE = {
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 12,
    "document_length": 18,
    "attend_to_expansion_tokens": True,
    "skiplist_words": ["a", "."],
}


@pytest.fixture(scope="session")
def late(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A folder of PyLate with its artifact, whose settings may be changed."""
    place = tmp_path_factory.mktemp("late")
    model = Path(shutil.copytree(base, place / "model"))
    path = str(model / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.add_tokens([PYLATE["query_prefix"], PYLATE["document_prefix"]])
    tokenizer.save(path)
    identity = "torch.nn.modules.linear.Identity"
    write_modules(model, [dense(WIDTH, 16, activation_function=identity)], "pylate")
    settings = json.loads((model / "config_sentence_transformers.json").read_text())
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings | PYLATE))
    manifest = linexport.convert(model, place / "out", bench=False, threads=1)
    assert (manifest.status, manifest.head) == ("ok", "hidden_states")
    return place


def test_queries_and_documents_are_those_of_pylate(late: Path) -> None:
    """Compared with PyLate 1.6 itself, both are equal to 4e-7."""
    tokenizer = tokenizers.Tokenizer.from_file(str(late / "model" / "tokenizer.json"))
    ids = {word: tokenizer.token_to_id(word) for word in ("[Q] ", "[D] ", "</s>", "a", ".")}
    projection = dense(WIDTH, 16)[2]
    weight, bias = (projection[f"linear.{name}"].double().numpy() for name in ("weight", "bias"))
    model = linexport.load(late / "out", threads=1)
    for prompt, prefix, length in (("query", "[Q] ", 12), ("document", "[D] ", 18)):
        found = model.embed(TEXTS, prompt=prompt)
        for text, vectors in zip(TEXTS, found, strict=True):
            row = tokenizer.encode(text).ids
            row = row if len(row) < length else [*row[: length - 2], row[-1]]
            row.insert(1, ids[prefix])
            row += [ids["</s>"]] * (length - len(row) if prompt == "query" else 0)
            tokens = torch.tensor([row])
            [x] = hidden_states(late / "model", tokens, torch.ones_like(tokens)) @ weight.T + bias
            shown = [
                p for p, t in enumerate(row) if prompt == "query" or t not in (ids["a"], ids["."])
            ]
            expected = (x / np.linalg.norm(x, axis=-1, keepdims=True))[shown]
            np.testing.assert_allclose(vectors, expected, atol=3e-6)
    plain, documents = model.embed(TEXTS), model.embed(TEXTS, prompt="document")
    assert all(np.array_equal(x, y) for x, y in zip(plain, documents, strict=True))
    with pytest.raises(UsageError, match="Found prompt 'passage'; this model has query, document"):
        model.embed("a cat", prompt="passage")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attend_to_expansion_tokens": False}, "filled up with tokens that others do not look"),
        ({"query_prefix": "[X] "}, r"query_prefix '\[X\] ', which is not a token"),
        ({"query_length": "8"}, "query_length '8'; expected 4 tokens or more"),
        ({"skiplist_words": "a"}, "skiplist_words that are not a list of words"),
    ],
)
def test_settings_of_pylate_that_do_not_fit_are_said(
    late: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    place = Path(shutil.copytree(late / "out", tmp_path / "out"))
    name = "config_sentence_transformers.json"
    settings = json.loads((place / name).read_text())
    (place / name).write_text(json.dumps(settings | change))
    manifest = manifests.read(place)
    files = manifest.files | {name: describe_files(place)[name]}
    with pytest.raises(UsageError, match=message):
        TextVectors(manifest, place, files).tokens("a cat", "query")


def test_a_pooling_of_the_user_takes_the_place_of_modules(folder: Callable[..., Path]) -> None:
    loaded = load_model(folder(MEAN, dense(WIDTH, 24), NORMALIZE), pooling="last")
    assert "Dense, Normalize. Leave out --pooling" in loaded.warnings[0]
    with torch.no_grad():
        assert loaded.module(*loaded.args).shape[-1] == WIDTH


BAD: dict[str, tuple[list[Module], str]] = {
    "an unknown module": ([MEAN, ("CNN", {}, {})], "a module CNN; known are Pooling"),
    "an activation of its own": (
        [MEAN, dense(WIDTH, 8, activation_function="os.system")],
        "an activation 'os.system'; known are",
    ),
    "weights of another size": (
        [MEAN, ("Dense", dense(WIDTH, 8)[1], dense(WIDTH, 9)[2])],
        r"linear\.weight",
    ),
    "no weights": ([MEAN, ("Dense", dense(WIDTH, 8)[1], {})], "no model.safetensors"),
    "no size": ([MEAN, dense(WIDTH, 8, in_features="8")], "in_features '8'; expected a size"),
    "an unknown pooling": (
        [("Pooling", {"pooling_mode": "median"}, {})],
        "a pooling 'median'; known are",
    ),
    "a pooling at the end": ([dense(WIDTH, 8), MEAN], "a Pooling behind another module"),
}


@pytest.mark.parametrize("name", BAD)
def test_modules_that_are_not_converted_are_named(folder: Callable[..., Path], name: str) -> None:
    modules, message = BAD[name]
    with pytest.raises(LinexportError, match=message):
        load_model(folder(*modules))


@pytest.mark.parametrize(
    "content", ["{}", "[]", "[1]", '[{"type": "a.Transformer", "path": "../x"}]', "[", "[{}]"]
)
def test_a_damaged_list_of_modules_is_refused(folder: Callable[..., Path], content: str) -> None:
    place = folder()
    (place / "modules.json").write_text(content)
    with pytest.raises(LinexportError, match=r"modules\.json"):
        load_model(place)


def in_a_folder_of_its_own(place: Path) -> Path:
    """Move the model of a folder as releases before 3 saved it."""
    inner = place / "0_Transformer"
    inner.mkdir()
    kept = ("modules.json", "config_sentence_transformers.json")
    for path in [p for p in place.iterdir() if p.is_file() and p.name not in kept]:
        path.rename(inner / path.name)
    listed = json.loads((place / "modules.json").read_text())
    listed[0]["path"] = inner.name
    (place / "modules.json").write_text(json.dumps(listed))
    (place / "config.json").write_text('{"__version__": "0.2.5.1"}')
    return place


def test_a_model_in_a_folder_of_its_own_gives_the_same_vectors(
    folder: Callable[..., Path], embedder: Path, tmp_path: Path
) -> None:
    place = in_a_folder_of_its_own(folder(MEAN, dense(WIDTH, 24), NORMALIZE))
    manifest = linexport.convert(place, tmp_path / "out", bench=False, threads=1)
    assert (manifest.status, manifest.head) == ("ok", "pooled")
    assert manifest.source.location == str(place)
    found = linexport.load(tmp_path / "out", threads=1)
    assert found.vectors.settings.longest == LONGEST
    expected = linexport.load(embedder, threads=1).embed(TEXTS, prompt="query")
    np.testing.assert_array_equal(found.embed(TEXTS, prompt="query"), expected)
    (place / "config.json").unlink()
    assert load_model(place).source.sha256 == manifest.source.sha256
    (place / "0_Transformer" / "config.json").unlink()
    with pytest.raises(LinexportError, match="a first module in '0_Transformer' without"):
        load_model(place)


def test_modules_of_a_snapshot_are_links_to_blobs(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The cache of the Hugging Face hub holds files by their digests."""
    place = in_a_folder_of_its_own(folder(MEAN, dense(WIDTH, 24), NORMALIZE))
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123"
    for number, path in enumerate(p for p in place.rglob("*") if p.is_file()):
        link = snapshot / path.relative_to(place)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(cache / "blobs" / str(number))
        link.symlink_to(cache / "blobs" / str(number))
    assert load_model(snapshot).language is not None


def test_a_module_outside_of_the_folder_is_not_read(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    place = folder(MEAN, dense(WIDTH, 8))
    inside = place / "2_Dense" / "model.safetensors"
    (tmp_path / "elsewhere").mkdir()
    inside.rename(tmp_path / "elsewhere" / "model.safetensors")
    inside.symlink_to(tmp_path / "elsewhere" / "model.safetensors")
    with pytest.raises(LinexportError, match="link"):
        load_model(place)
