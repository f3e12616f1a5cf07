"""Packages for Transformers.js, loaded by it in node and in a browser: texts are Python's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
from pages import blocks

import linexport
from linexport.artifact import Artifact
from linexport.package import find_destination, package
from tests.runtimes.runtimes import PROGRAMS, SECONDS, need_node, run_process, served
from tests.support import ROOT
from tests.support.browser import browser
from tests.support.families import TINY, save_model
from tests.support.runtimes import session
from tests.support.tokenizers import save_tokenizer

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

TEXT, COUNT = "the day of the", 24
IDS = [3, 17, 60, 4, 33, 33, 8]
FAMILIES = ("falcon_h1", "mamba2")
"""A layer with both kinds of states; no attention, so that no row counts the tokens."""


def convert(family: str, place: Path, **changes: Any) -> Path:
    source = place / f"{family}-checkpoint"
    source.mkdir()
    save_model({**TINY[family], **changes}, family, source)
    if changes:
        save_tokenizer(source, changes["vocab_size"])
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
    linexport.convert(str(source), place / family, bench=False, threads=1)
    return place / family


def convert_recipe(place: Path) -> Path:
    """The module of the page that takes one to six places."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    (code,) = [block.text for block in blocks.tested_blocks(page) if block.file]
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, "recipes.md", "exec"), names)
    linexport.convert(names["build"](), place / "recipe", bench=False, threads=1)
    return place / "recipe"


@pytest.fixture(scope="module")
def artifacts(
    converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Artifact]:
    """Models with a tokenizer, with int4 weights, and with states of no usual kind."""
    place = tmp_path_factory.mktemp("models")
    found = {family: convert(family, place) for family in FAMILIES}
    found["qwen3_5_text"] = convert("qwen3_5_text", place, vocab_size=280)
    found["quantised"] = place / "quantised"
    linexport.quantize(found["qwen3_5_text"], found["quantised"], weights="int4", threads=1)
    found["normalisers"] = converted("language_model")
    found["recipe"] = convert_recipe(place)
    return {name: linexport.load(path, threads=1) for name, path in found.items()}


@pytest.fixture(scope="module")
def packages(artifacts: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for name, model in artifacts.items():
        package(model.path, find_destination("transformers.js"), folder / name)
    return folder


def asked(name: str, model: Artifact) -> dict[str, Any]:
    has_text = model.manifest.files.get("tokenizer.json") is not None
    prompt = {"text": TEXT} if has_text else {"ids": IDS}
    return {"name": name, "count": COUNT, **prompt}


def expected(model: Artifact) -> dict[str, Any]:
    """What Python gives for the prompt that ``asked`` has."""
    if "tokenizer.json" not in model.manifest.files:
        return {"ids": list(model.generate(IDS, max_tokens=COUNT))}
    encoder = tokenizers.Tokenizer.from_file(str(model.path / "tokenizer.json"))
    written = model.generate(encoder.encode(TEXT).ids, max_tokens=COUNT)
    return {"text": encoder.decode(list(written))}


def test_in_node(
    artifacts: dict[str, Artifact], packages: Path, environment: Path, tmp_path: Path
) -> None:
    need_node(environment)
    jobs = [
        {
            "folder": f"{packages}/",
            "asked": asked(name, model),
            "result": str(tmp_path / f"{name}.json"),
        }
        for name, model in artifacts.items()
    ]
    run_process(["node", PROGRAMS / "generate_node.mjs", environment], jobs)
    for name, model in artifacts.items():
        assert json.loads((tmp_path / f"{name}.json").read_text()) == expected(model), name


def test_in_a_browser(artifacts: dict[str, Artifact], packages: Path, environment: Path) -> None:
    need_node(environment)
    library = environment / "node_modules" / "@huggingface" / "transformers"
    places = {
        "packages": environment / "node_modules",
        "wasm": library / "node_modules" / "onnxruntime-web" / "dist",
        "programs": PROGRAMS,
        "files": packages,
    }
    with served(places) as address, browser() as page:
        page.set_script_timeout(SECONDS)
        page.get(f"{address}/programs/generate.html")
        script = "generate(arguments[0]).then(arguments[1])"
        for name, model in artifacts.items():
            if name != "quantised":
                found = page.execute_async_script(script, asked(name, model))
                assert found == expected(model), name
        found = page.execute_async_script(script, {"name": "quantised", "ids": IDS})
    wanted = unrounded_logits(packages / "quantised" / "onnx" / "model_q4.onnx")
    error = np.abs(np.reshape(found["logits"], wanted.shape) - wanted).max()
    assert error < 1e-4 * np.abs(wanted).max()


def unrounded_logits(path: Path) -> np.ndarray:
    """Logits after ``IDS`` where products of quantised weights do not round activations to 8 bits.

    WebAssembly's do not, whatever ``accuracy_level`` says.
    """
    graph = onnx.load(path)
    for node in graph.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    opened = session(graph)
    ids = np.array([IDS])
    states = {i.name: zeros(i) for i in opened.get_inputs() if i.name.startswith("past")}
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), **states}
    return np.asarray(opened.run(["logits"], feeds)[0])


def zeros(value: Any) -> np.ndarray:
    """An empty state: one row of no tokens."""
    sizes = [d if isinstance(d, int) else int(d == "batch_size") for d in value.shape]
    return np.zeros(sizes, np.float32)


def test_the_folder(packages: Path) -> None:
    """Files are named by their weights, and states by their layers."""
    config = json.loads((packages / "quantised" / "config.json").read_text())
    assert config["transformers.js_config"] == {"dtype": "q4"}
    assert (packages / "quantised" / "onnx" / "model_q4.onnx").is_file()
    found = onnx.load(packages / "qwen3_5_text" / "onnx" / "model.onnx", load_external_data=False)
    config = json.loads((packages / "qwen3_5_text" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    states = {i.name for i in found.graph.input} - {"input_ids", "attention_mask"}
    kinds = {"linear_attention": ("past_conv.{}", "past_recurrent.{}")}
    kinds["full_attention"] = ("past_key_values.{}.key", "past_key_values.{}.value")
    types = enumerate(config["layer_types"])
    assert states == {name.format(i) for i, kind in types for name in kinds[kind]}
