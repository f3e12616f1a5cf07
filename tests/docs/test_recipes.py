"""Recipes that a page cannot run itself: a server, and what its clients are told to send."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from pages import blocks

import linexport
from linexport.package import find_destination, package
from tests.support import ROOT
from tests.support.serving import alone, served

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the page's module."""
    (code,) = [block.text for block in blocks.tested_blocks(PAGE) if block.file]
    names: dict[str, Any] = {"__name__": "my_model"}
    exec(compile(code, "recipes.md", "exec"), names)
    folder = tmp_path_factory.mktemp("recipes") / "mine"
    linexport.convert(names["build"](), folder, bench=False, threads=1)
    return folder


def test_the_request_of_the_page_is_answered(mine: Path) -> None:
    (command,) = re.findall(r"^curl .*?'$", PAGE, re.MULTILINE | re.DOTALL)
    model = linexport.load(mine, threads=1)
    with served(model, name="mine") as server:
        sent = command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        done = subprocess.run(sent, shell=True, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["text"] == alone(model, b"import ", max_tokens=20)


def test_a_server_that_carries_the_states_gives_the_whole_sequence(
    mine: Path, tmp_path: Path
) -> None:
    """Triton's part: it feeds each state's output to its input, as config.pbtxt pairs them."""
    package(mine, find_destination("triton"), tmp_path / "repository")
    text = (tmp_path / "repository" / "mine" / "config.pbtxt").read_text()
    pairs = dict(re.findall(r'input_name: "(\w+)" output_name: "(\w+)"', text))
    session = onnxruntime.InferenceSession(
        str(tmp_path / "repository" / "mine" / "1" / "model.onnx")
    )
    shapes = {i.name: i.shape for i in session.get_inputs()}
    assert pairs and set(shapes) == {"tokens", *pairs}
    state = {name: np.zeros([1, *shapes[name][1:]], np.float32) for name in pairs}
    tokens = np.random.default_rng(0).integers(0, 256, (1, 9))
    names, rows = [o.name for o in session.get_outputs()], []
    for part in np.split(tokens, [4, 5], axis=1):
        found = dict(zip(names, session.run(names, {"tokens": part, **state}), strict=True))
        state = {past: found[present] for past, present in pairs.items()}
        rows.append(found["output"])
    whole = linexport.load(mine, threads=1).run(tokens)["output"]
    np.testing.assert_allclose(np.concatenate(rows, 1), whole, atol=1e-5 * np.abs(whole).max())
