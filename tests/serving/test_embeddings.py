"""/v1/embeddings beside the artifact itself."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import linexport
from linexport.artifact import Artifact
from tests.support.sentence_folder import NORMALIZE, dense, pooling, save_sentence_model
from tests.support.serving import Served, served

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.services]

TEXTS = ["a cat", "the bonds and stocks of the day", "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    place = tmp_path_factory.mktemp("embedder")
    modules = [pooling(32, "pooling_mode_mean_tokens"), dense(32, 24), NORMALIZE]
    save_sentence_model("mamba2", place / "model", modules)
    linexport.convert(place / "model", place / "out", bench=False, threads=1)
    shutil.rmtree(place / "model")
    return linexport.load(place / "out", threads=1)


@pytest.fixture(scope="module")
def server(model: Artifact) -> Iterator[Served]:
    with served(model) as found:
        yield found


def asked(server: Served, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/embeddings", json={"model": "tiny", **fields})


def vectors(response: httpx2.Response) -> np.ndarray:
    content = response.json()
    assert response.status_code == 200, content
    assert [item["index"] for item in content["data"]] == list(range(len(content["data"])))
    return np.array([item["embedding"] for item in content["data"]], np.float32)


def test_a_prompt_that_is_not_pooled_is_left_out(tmp_path: Path) -> None:
    kind, config, weights = pooling(32, "pooling_mode_mean_tokens")
    assert config is not None
    behind = (kind, {**config, "include_prompt": False}, weights)
    save_sentence_model("mamba2", tmp_path / "model", [behind])
    linexport.convert(tmp_path / "model", tmp_path / "out", bench=False, threads=1)
    model = linexport.load(tmp_path / "out", threads=1)
    with served(model) as server:
        found = vectors(asked(server, input=TEXTS, prompt_name="query"))
        rows = [[*model.vectors.tokens(text, "query")] for text in TEXTS]
        whole = vectors(asked(server, input=rows))
    np.testing.assert_allclose(found, model.embed(TEXTS, prompt="query"), atol=1e-6)
    assert np.abs(found - whole).max() > 1e-3  # of which token ids nothing is known


def test_vectors_are_those_of_the_artifact(server: Served, model: Artifact) -> None:
    expected = model.embed(TEXTS, prompt="query")
    found = asked(server, input=TEXTS, prompt_name="query")
    np.testing.assert_allclose(vectors(found), expected, atol=1e-6)
    rows = [model.vectors.tokens(text, "query") for text in TEXTS]
    assert found.json()["usage"]["prompt_tokens"] == sum(map(len, rows))
    np.testing.assert_allclose(vectors(asked(server, input=rows)), expected, atol=1e-6)
    one = asked(server, input=rows[1], dimensions=7)
    np.testing.assert_allclose(vectors(one)[0], expected[1, :7], atol=1e-6)


def test_vectors_are_sent_as_base64(server: Served, model: Artifact) -> None:
    found = asked(server, input="a cat", encoding_format="base64").json()
    content = base64.b64decode(found["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(content, "<f4"), model.embed("a cat"), atol=1e-6)


def test_the_client_of_openai_takes_them(server: Served, model: Artifact) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-")
    found = client.embeddings.create(model="tiny", input=TEXTS, dimensions=5)
    got = np.array([item.embedding for item in found.data], np.float32)
    np.testing.assert_allclose(got, model.embed(TEXTS, size=5), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"input": []}, 400, "found 0 texts"),
        ({"input": ["x"] * 2049}, 400, "at most 2048 texts"),
        ({"input": [[]]}, 400, "no tokens"),
        ({"input": [{}]}, 400, "input"),
        ({"input": [["x"]]}, 400, "input.0"),
        ({"input": [[1] * 21]}, 400, "21 tokens; this server takes at most 20"),
        ({"input": [[300]]}, 400, "300"),
        ({"input": "x", "dimensions": 25}, 400, "24 numbers"),
        ({"input": "x", "prompt_name": "no"}, 400, "query, document"),
        ({"input": "x", "model": "other"}, 404, "does not exist"),
        ({"input": "x", "truncate": True}, 400, "truncate"),
    ],
)
def test_a_wrong_request_is_refused(
    server: Served, fields: dict[str, Any], status: int, words: str
) -> None:
    found = asked(server, **fields)
    assert found.status_code == status and words in found.text, found.text


def test_memory_and_answers_are_limited(model: Artifact) -> None:
    with served(model, max_answer=2000) as small:
        found = asked(small, input=TEXTS)
        assert found.status_code == 413 and "--max-answer" in found.text
    with served(model, max_prompt=6) as short:
        for text in ("a long text of cats and bonds", [1] * 7):
            found = asked(short, input=text)
            assert found.status_code == 400 and "takes at most 6" in found.text
        assert asked(short, input="x", prompt_name="").status_code == 200


def test_a_model_of_texts_gives_no_vectors(tmp_path: Path, converted: Any) -> None:
    with served(linexport.load(converted("language_model"), threads=1)) as texts:
        found = asked(texts, input="x")
        assert found.status_code == 404 and "not an embedding model" in found.text
