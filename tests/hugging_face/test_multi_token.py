"""Heads for multi-token prediction (``mtp.*``): as published, as drafts, and where they are not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import linexport
from linexport.artifact import write
from linexport.artifact.genai import write_genai
from linexport.conversion.revalidate import validate
from linexport.errors import UsageError
from linexport.graph.external_data import files_beside
from linexport.manifest.folder import file_record
from linexport.manifest.placement import ORT_CPU
from linexport.package import find_destination, package
from linexport.report.verdict import predictor_check, verdict
from linexport.sources import load_model
from linexport.targets.runtime import providers
from linexport.targets.runtime.providers import Provider
from tests.support.families import TINY, save_model
from tests.support.multi_token import Oracle, add_head
from tests.support.towers import WITH_PICTURES

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

KINDS = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
EACH = [
    KINDS[0],
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:]),
]
CERTAIN = "certain"
EXPERT = "layers.0.mlp.experts.3.up_proj.weight"
PROMPT = np.arange(20) * 7 % 61


def certain(folder: Path) -> None:
    """Make a model whose every next token follows from the last, and a head that knows it.

    No layer adds anything, and fc takes the embedding: both are the norm of an embedding.
    """
    save_model({**TINY["qwen3_5_text"], "vocab_size": 256}, "qwen3_5_text", folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, path, {"format": "pt"})
    width = TINY["qwen3_5_text"]["hidden_size"]
    add_head(
        folder,
        **{
            "layers.0.self_attn.o_proj.weight": torch.zeros(width, 64),
            "layers.0.mlp.down_proj.weight": torch.zeros(width, 48),
            "fc.weight": torch.eye(width, 2 * width),
            "pre_fc_norm_embedding.weight": torch.zeros(width),
            "norm.weight": weights["model.norm.weight"],
        },
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folder(kind)``: a checkpoint with a head, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            if kind == CERTAIN:
                certain(made[kind])
            else:
                save_model(TINY[kind], kind, made[kind])
                add_head(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def converted(
    folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """``converted(kind)``: its artifact, made once."""
    made: dict[str, Path] = {}

    def convert(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("artifacts") / kind
            manifest = linexport.convert(folder(kind), made[kind], bench=False, threads=1)
            # How much float32 loses differs by processor.
            said = [w for w in manifest.warnings if not w.startswith("The original itself loses")]
            assert manifest.status == "ok" and not said
        return made[kind]

    return convert


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def draw(kind: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(length)
    hidden = random.normal(size=(length, TINY[kind]["hidden_size"]))
    return random.integers(64, size=length), hidden.astype(np.float32)


@pytest.mark.parametrize("kind", EACH)
def test_the_head_is_the_published_one_in_any_runtime(
    folder: Callable[[str], Path], converted: Callable[[str], Path], kind: str
) -> None:
    """Lengths that were never traced, whole, in pieces and token by token; rows with padding."""
    oracle = Oracle(folder(kind))
    session = onnxruntime.InferenceSession(converted(kind) / "mtp.onnx")
    names = [o.name for o in session.get_outputs()]
    states = {i.name: i.shape for i in session.get_inputs() if i.name.startswith("past_")}

    def run(tokens: Any, hidden: Any, mask: Any, state: dict[str, Any]) -> dict[str, Any]:
        given = {"input_ids": tokens, "attention_mask": mask, "hidden_states": hidden}
        return dict(zip(names, session.run(None, {**given, **state}), strict=True))

    def begin(rows: int) -> dict[str, Any]:
        sizes = {"batch": rows, "past": 0}
        found = {n: [sizes.get(s, s) for s in shape] for n, shape in states.items()}
        types = {n: np.int64 if n == "past_mask" else np.float32 for n in states}
        return {n: np.zeros(shape, types[n]) for n, shape in found.items()}

    for length, pieces in ((1, [1]), (2, [2]), (77, [77]), (77, [30, 1, 46]), (19, [1] * 19)):
        tokens, hidden = draw(kind, length)
        state, start, found = begin(1), 0, []
        for size in pieces:
            part = slice(start, start + size)
            ones = np.ones((1, size), np.int64)
            found.append(run(tokens[None, part], hidden[None, part], ones, state))
            state = {n: found[-1][n.replace("past", "present")] for n in states}
            start += size
        for name, expected in zip(names[:2], oracle(tokens, hidden), strict=True):
            same(np.concatenate([f[name][0] for f in found]), expected)
    tokens, hidden = draw(kind, 40)
    mask = np.stack([np.ones(40, np.int64), np.arange(40) >= 13])
    both = run(np.stack([tokens] * 2), np.stack([hidden] * 2), mask, begin(2))
    same(both["logits"][0], oracle(tokens, hidden)[0])
    same(both["logits"][1, 13:], oracle(tokens[13:], hidden[13:])[0])


def test_the_layer_is_that_of_the_library(folder: Callable[[str], Path]) -> None:
    """transformers has such a layer for other families, with other names."""
    from transformers.modeling_layers import MtpLayer
    from transformers.models.qwen3_5 import modeling_qwen3_5 as library

    loaded = load_model(folder("qwen3_5_text")).predictor
    assert loaded is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("qwen3_5_text")).eval()
    config = model.config
    config.layer_types = ["full_attention"]
    layer = MtpLayer(config, library.Qwen3_5DecoderLayer, library.Qwen3_5RMSNorm, 0).eval()
    names = {
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "layers.0": "mtp_block",
        "norm": "post_norm",
    }
    state = {}
    for name, weight in load_file(folder("qwen3_5_text") / "model.safetensors").items():
        for ours, theirs in names.items():
            if name.startswith(f"mtp.{ours}."):
                state[name.replace(f"mtp.{ours}", theirs)] = weight
    layer.load_state_dict(state)
    tokens, hidden = (torch.from_numpy(x)[None] for x in draw("qwen3_5_text", 33))
    places = torch.arange(33)[None]
    with torch.no_grad():
        rotary = model.model.rotary_emb(hidden, places.expand(3, 1, -1))
        block = torch.full((33, 33), -torch.inf).triu(1)[None, None]
        g = layer(model.model.embed_tokens(tokens), hidden, rotary, block, places, None)
        logits, own = loaded.module(tokens, torch.ones_like(tokens), hidden)
    same(own.numpy(), g.numpy())
    same(logits.numpy(), model.lm_head(g).detach().numpy())


def hidden_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The library's last hidden states, (T, width)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model.model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
    return np.asarray(found)


@pytest.mark.parametrize("kind", EACH)
def test_the_model_gives_the_hidden_states_of_the_library(
    folder: Callable[[str], Path], converted: Callable[[str], Path], kind: str
) -> None:
    model = linexport.load(converted(kind), threads=1)
    tokens = draw(kind, 83)[0]
    expected = hidden_of(folder(kind), tokens)
    same(model.run(tokens[None])["last_hidden_state"][0], expected)
    stream = model.stream()
    parts = [stream.step(part[None])["last_hidden_state"][0] for part in np.split(tokens, [50, 51])]
    same(np.concatenate(parts), expected)


@pytest.mark.parametrize("kind", EACH)
def test_what_is_verified_comes_with_its_hidden_states(
    folder: Callable[[str], Path], converted: Callable[[str], Path], kind: str
) -> None:
    """Also where the state inside of a call was gone back to and is computed again."""
    model = linexport.load(converted(kind), threads=1)
    text, found = PROMPT.tolist(), []
    written = list(model.generate(PROMPT, max_tokens=30))
    stream, known = model.stream(), PROMPT
    for right in (0, 3, 1, 0, 2):
        place = len(text) - len(PROMPT)
        after = written[place : place + right]
        wrong = [(written[place + right] + 1) % 64] * 2
        verified = stream.verify(np.array([*known, *after, *wrong]), known=len(known))
        assert verified.hidden is not None
        found.append(verified.hidden)
        text += verified.tokens
        known = np.array(text[-1:])
    same(np.concatenate(found), hidden_of(folder(kind), np.array(text[:-1])))


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_proposed_is_what_the_published_head_proposes(
    folder: Callable[[str], Path],
    converted: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    count: int,
) -> None:
    """From the text alone, computed from scratch: nothing of what was rejected is left."""
    model, oracle = linexport.load(converted(kind), threads=1), Oracle(folder(kind))
    draft, proposed = model.mtp_draft(count), []
    propose = draft.propose

    def watched(text: Any) -> list[int]:
        proposed.append((np.array(text), propose(text)))
        return proposed[-1][1]

    monkeypatch.setattr(draft, "propose", watched)
    for settings in ({}, {"temperature": 0.9, "seed": 5}):
        proposed.clear()
        expected = list(model.generate(PROMPT, max_tokens=24, **settings))
        assert list(model.generate(PROMPT, max_tokens=24, draft=draft, **settings)) == expected
        hidden = hidden_of(folder(kind), np.array([*PROMPT, *expected]))
        for text, tokens in proposed:
            assert tokens == oracle.proposed(text[1:], hidden[: len(text) - 1], count)
        assert len(proposed) > 3


@pytest.mark.services
def test_where_the_head_is_right_every_token_is_accepted(converted: Callable[[str], Path]) -> None:
    model = linexport.load(converted(CERTAIN), threads=1)
    for settings in ({}, {"repetition_penalty": 1.0, "max_tokens": 41}):
        draft = model.mtp_draft(3)
        given = {"max_tokens": 41, "stop": [], **settings}
        expected = list(model.generate(PROMPT, **given))
        assert list(model.generate(PROMPT, draft=draft, **given)) == expected
        assert draft.proposed == draft.accepted == 30 and draft.calls == 10


def test_a_draft_is_used_for_one_text_after_another(converted: Callable[[str], Path]) -> None:
    model = linexport.load(converted(KINDS[0]), threads=1)
    draft = model.mtp_draft()
    for length in (1, 9, 30):
        prompt = PROMPT.repeat(2)[:length]
        expected = list(model.generate(prompt, max_tokens=20, stop=[]))
        assert list(model.generate(prompt, max_tokens=20, stop=[], draft=draft)) == expected


@pytest.mark.services
def test_a_head_of_another_model_is_refused(converted: Callable[[str], Path]) -> None:
    first, second = (linexport.load(converted(kind), threads=1) for kind in (KINDS[0], CERTAIN))
    with pytest.raises(UsageError, match=r"the head of another model.*mtp_draft"):
        first.generate(PROMPT, draft=second.mtp_draft())


@pytest.mark.services
def test_the_command_takes_it_by_name(
    cli: Callable[..., Any], converted: Callable[[str], Path]
) -> None:
    place = converted(CERTAIN)
    shown = cli("inspect", place)
    assert "head for multi-token prediction: passed, mtp.onnx" in shown.out
    given = ("generate", place, "--prompt", "some text", "--max-tokens", 22)
    plain, done = cli(*given), cli(*given, "--draft", "mtp")
    assert (done.code, done.out) == (0, plain.out)
    assert "14 of 14 proposed tokens were accepted, in 7 calls" in done.err


def test_the_manifest_and_the_reports_say_what_was_proven(converted: Callable[[str], Path]) -> None:
    manifest = linexport.load(converted(KINDS[0])).manifest
    head = manifest.mtp
    assert head is not None and head.passed and head.hidden == "last_hidden_state"
    assert head.parity is not None and head.parity.max_relative_error < 1e-5
    assert [s.past for s in head.states] == ["past_mask", "past_key_0", "past_value_0"]
    assert "MTP head" in (converted(KINDS[0]) / "report.html").read_text()


def test_a_head_that_differs_fails_the_artifact(
    folder: Callable[[str], Path], converted: Callable[[str], Path], tmp_path: Path
) -> None:
    place = shutil.copytree(converted(KINDS[0]), tmp_path / "artifact")
    spoil(place)
    manifest = validate(place, threads=1, record=True)
    assert manifest.status == "parity_failed" and manifest.parity.passed
    assert manifest.mtp is not None and not manifest.mtp.passed
    assert manifest.mtp.placement is None  # of the CPU's provider there is nothing to say
    assert "its head for multi-token prediction does not" in (place / "report.html").read_text()


def spoil(place: Path) -> None:
    """Make the head of an artifact another one, in its manifest too."""
    graph = onnx.load(place / "mtp.onnx")
    for weight in graph.graph.initializer:
        values = onnx.numpy_helper.to_array(weight)
        if values.shape in ((64, 32), (32, 64)) and "fc" in weight.name:
            weight.CopyFrom(onnx.numpy_helper.from_array(values * 1.01, weight.name))
            break
    else:
        raise AssertionError([w.name for w in graph.graph.initializer])
    onnx.save(graph, place / "mtp.onnx")
    record = file_record(place / "mtp.onnx")
    text = json.loads((place / "manifest.json").read_text())
    text["files"]["mtp.onnx"] = {"bytes": record.bytes, "sha256": record.sha256}
    (place / "manifest.json").write_text(json.dumps(text))


@pytest.mark.services
def test_quantised_weights_keep_the_head(converted: Callable[[str], Path], tmp_path: Path) -> None:
    manifest = linexport.quantize(converted(KINDS[0]), tmp_path / "small", weights="int8")
    assert manifest.status == "ok" and manifest.mtp is not None
    model = linexport.load(tmp_path / "small", threads=1)
    expected = list(model.generate(PROMPT, max_tokens=20))
    draft = model.mtp_draft()
    assert list(model.generate(PROMPT, max_tokens=20, draft=draft)) == expected
    assert draft.proposed
    spoil(tmp_path / "small")
    manifest = validate(tmp_path / "small", threads=1)
    assert manifest.status == "parity_failed" and not manifest.mtp.passed
    assert "its head for multi-token prediction does not" in verdict(manifest).sentence


def test_the_manifest_says_on_what_the_head_was_compared(
    converted: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "NAMES", (*providers.NAMES, "host"))
    monkeypatch.setitem(providers.PROVIDERS, "host", Provider(ORT_CPU, "onnxruntime"))
    place = shutil.copytree(converted(KINDS[0]), tmp_path / "artifact")
    manifest = validate(place, threads=1, provider="host")
    assert manifest.status == "ok" and manifest.mtp is not None and manifest.placement is not None
    placed = manifest.mtp.placement
    assert placed is not None and placed.provider == "host"
    assert placed.nodes != manifest.placement.nodes and sum(placed.nodes.values())
    assert placed.described() in predictor_check(manifest.mtp).detail


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_large_weights_are_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """Embeddings and output layer are stored once; quantised weights leave the head its own."""
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 100_000)
    source, place, small = (tmp_path / name for name in ("model", "artifact", "small"))
    config = {**TINY["qwen3_5_text"], "vocab_size": 1200, "tie_word_embeddings": tied}
    save_model(config, "qwen3_5_text", source)
    add_head(source)
    manifest = linexport.convert(source, place, bench=False, threads=1)
    assert manifest.status == "ok"
    head, table = onnx.load(place / "mtp.onnx", load_external_data=False), 4 * 1200 * 32
    assert files_beside(head) == {"model.onnx.data"}
    assert sum(manifest.files[n].bytes for n in manifest.files if n.startswith("mtp")) < table
    assert manifest.files["model.onnx.data"].bytes > (1 if tied else 2) * table
    linexport.quantize(place, small, weights="int8", threads=1)
    assert "model.onnx.data" not in files_beside(
        onnx.load(small / "mtp.onnx", load_external_data=False)
    )
    oracle = Oracle(source)
    for folder in (place, small):
        model = linexport.load(folder, threads=1)
        hidden = model.run(PROMPT[None])["last_hidden_state"][0]
        draft = model.mtp_draft()
        draft.read(hidden)
        text = [*PROMPT, 1199]
        assert draft.propose(text) == oracle.proposed(np.array(text[1:]), hidden, 2)
        expected = list(model.generate(PROMPT, max_tokens=20))
        assert list(model.generate(PROMPT, max_tokens=20, draft=draft)) == expected
    assert validate(place, threads=1).status == "ok"


def test_systems_that_do_not_run_it_are_refused(
    converted: Callable[[str], Path], tmp_path: Path
) -> None:
    place = converted(KINDS[0])
    with pytest.raises(UsageError, match=r"onnx does not run.*mtp=False"):
        package(place, find_destination("onnx"), tmp_path / "one")
    with pytest.raises(UsageError, match=r"onnxruntime-genai does not run.*mtp=False"):
        write_genai(place, tmp_path / "two")
    package(place, find_destination("ray"), tmp_path / "three")


def test_a_pool_and_a_saved_state_are_as_without_it(
    converted: Callable[[str], Path], tmp_path: Path
) -> None:
    model = linexport.load(converted(KINDS[0]), threads=1)
    texts, names = [PROMPT[:9], PROMPT], ("logits", "last_hidden_state")
    with model.pool(slots=2, chunk=8, cache=model.prefix_cache(budget_mb=10)) as pool:
        sessions = [pool.open() for _ in texts]
        for session, text in zip(sessions, texts, strict=True):
            session.push(text[None])
        found: dict[Any, list[Any]] = {session: [] for session in sessions}
        while any(session.queued for session in pool):
            for session, outputs in pool.advance().items():
                found[session].append(outputs)
        for (session, parts), text in zip(found.items(), texts, strict=True):
            for name in names:
                expected = model.run(text[None])[name][:, session.cached :]
                same(np.concatenate([part[name] for part in parts], 1), expected)
    stream = model.stream()
    stream.step(PROMPT[None, :11])
    stream.save(tmp_path / "state.npz")
    again = model.stream()
    again.restore(tmp_path / "state.npz")
    same(again.step(PROMPT[None, 11:])["logits"], model.run(PROMPT[None])["logits"][:, 11:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mtp.layers.1.input_layernorm.weight": torch.ones(32)}, "is not in the model"),
        ({"mtp.embed_tokens.weight": torch.ones(64, 32)}, "is not in the model"),
        ({"mtp.fc.weight": torch.ones(32, 32)}, r"mtp.fc.weight has shape \(32, 32\)"),
        ({"mtp.norm.weight": None}, "mtp.norm.weight is missing"),
        ({"mtp.layers.0.mlp.experts.3.up_proj.weight": None}, "gate_up_proj is missing"),
        (
            {"mtp.layers.0.mlp.experts.3.up_proj.weight": torch.ones(3, 3)},
            "gate_up_proj is missing",
        ),
    ],
)
def test_other_layouts_are_left_out_with_the_reason(
    folder: Callable[[str], Path], tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    place = shutil.copytree(folder("qwen3_next"), tmp_path / "model")
    weights = {**load_file(place / "model.safetensors"), **change}
    kept = {n: w for n, w in weights.items() if w is not None}
    save_file(kept, place / "model.safetensors", {"format": "pt"})
    loaded = load_model(place)
    [warning] = loaded.warnings
    assert loaded.predictor is None and loaded.decode_module is not None
    assert "last_hidden_state" not in loaded.decode_module.outputs
    assert re.search(reason, warning), warning


@pytest.mark.slow
def test_a_model_with_a_vision_tower_has_its_head_too(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the head beside both, for texts."""
    source = tmp_path / "model"
    save_model(WITH_PICTURES["qwen3_5"], "qwen3_5", source, "AutoModelForImageTextToText")
    add_head(source)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.vision is not None and manifest.mtp is not None
    model, oracle = linexport.load(tmp_path / "artifact", threads=1), Oracle(source)
    library = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    with torch.no_grad():
        hidden = library.model(torch.from_numpy(PROMPT)[None]).last_hidden_state[0].numpy()
    same(model.run(PROMPT[None])["last_hidden_state"][0], hidden)
    draft = model.mtp_draft()
    draft.read(hidden)
    assert draft.propose([*PROMPT, 7]) == oracle.proposed(np.append(PROMPT[1:], 7), hidden, 2)
    expected = list(model.generate(PROMPT, max_tokens=20))
    assert list(model.generate(PROMPT, max_tokens=20, draft=draft)) == expected


def test_weights_that_are_not_finite_are_named(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    place = shutil.copytree(folder(KINDS[0]), tmp_path / "model")
    weights = load_file(place / "model.safetensors")
    weights["mtp.layers.0.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    assert "mtp.layers.0.mlp.up_proj.weight has 1 Inf of" in load_model(place).warnings[0]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("mtp", "file"), "elsewhere.onnx", r"\$.mtp.file is not one of"),
        (("mtp", "hidden"), "nothing", r"\$.mtp.hidden is 'nothing'"),
        (("mtp", "outputs"), [], r"\$.mtp.outputs has no 'last_hidden_state'"),
        (("mtp",), None, "is not a language model: it has .* last_hidden_state"),
    ],
)
def test_a_manifest_that_contradicts_the_head_is_refused(
    converted: Callable[[str], Path], tmp_path: Path, path: tuple[str, ...], value: Any, said: str
) -> None:
    place = shutil.copytree(converted(KINDS[0]), tmp_path / "artifact")
    content = inner = json.loads((place / "manifest.json").read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (place / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=said):
        linexport.load(place).generate(PROMPT)


def test_it_is_left_out_where_it_was_not_asked_for(folder: Callable[[str], Path]) -> None:
    loaded = load_model(folder(KINDS[0]), mtp=False)
    assert loaded.predictor is None and "is left out: --no-mtp" in loaded.warnings[0]
