"""Parked sequences: they go on, and files that are not theirs are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import linexport
from linexport.artifact import Artifact
from linexport.artifact.text.sampling import Sampling
from linexport.errors import UsageError
from linexport.serving.parking import ParkedText, Parking, new_id
from linexport.serving.text import Beginning, TextSettings
from tests.support.serving import Served, alone, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parked")


@pytest.fixture(scope="module")
def server(model: Artifact, folder: Path) -> Iterator[Served]:
    with served(model, park=folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: Any, prompt: str | None = "import ", **extra: Any) -> Any:
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=10, temperature=0, extra_body=extra
    )


def test_a_parked_text_is_the_beginning_of_others(client: Any, model: Artifact) -> None:
    first = complete(client, park=True)
    text = first.choices[0].text
    whole = [*b"import ", *model.generate(b"import ", max_tokens=10)]
    for prompt in (None, " and ", " or "):
        found = complete(client, prompt, resume=first.parked)
        expected = alone(model, whole + list((prompt or "").encode()), max_tokens=10)
        assert found.choices[0].text == expected
    assert found.usage.prompt_tokens == 7 + 10 + 4
    assert text == alone(model, b"import ", max_tokens=10)


def test_a_penalty_reaches_tokens_from_before_it_was_parked(client: Any, model: Artifact) -> None:
    first = complete(client, park=True)
    whole = [*b"import ", *model.generate(b"import ", max_tokens=10), *b" and "]
    found = complete(client, " and ", resume=first.parked, repetition_penalty=1.5)
    expected = alone(model, whole, max_tokens=10, repetition_penalty=1.5)
    assert found.choices[0].text == expected
    assert expected != alone(model, whole, max_tokens=10)


def test_a_stream_names_what_it_parked(client: Any) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=3, stream=True, extra_body={"park": True}
    )
    events = list(stream)
    assert events[-1].parked == events[0].id
    assert complete(client, "b", resume=events[-1].parked).choices[0].text


@pytest.fixture
def parked(client: Any) -> str:
    return str(complete(client, park=True).parked)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f, n: (f / f"{n}.json").write_text("{"), "is damaged"),
        (lambda f, n: (f / f"{n}.npz").unlink(), "is damaged"),
        (lambda f, n: pipe(f / f"{n}.npz"), "is damaged"),
        (lambda f, n: (f / f"{n}.npz").write_bytes(b"PK\x03\x04"), "is damaged"),
        (lambda f, n: flip(f / f"{n}.npz"), "is damaged"),
        (lambda f, n: edit(f / f"{n}.json", unfed=[99999]), "vocabulary"),
        (lambda f, n: edit(f / f"{n}.json", written=[256]), "vocabulary"),
        (lambda f, n: edit(f / f"{n}.json", seen=[256]), "vocabulary"),
        (lambda f, n: edit(f / f"{n}.json", max_tokens=4097), "takes at most 32768 and 4096"),
        (lambda f, n: edit(f / f"{n}.json", unfed=[1] * 32769), "has 32769 tokens of a prompt"),
        (lambda f, n: edit(f / f"{n}.json", prompt_tokens=-1), "is damaged"),
        (lambda f, n: edit(f / f"{n}.json", stops=["a"] * 17), "is damaged"),
        (lambda f, n: edit(f / f"{n}.json", logprobs=-1), "is damaged"),
        (lambda f, n: edit(f / f"{n}.json", temperature=-1.0), "temperature is -1"),
        (lambda f, n: edit(f / f"{n}.json", written="abc"), "is damaged"),
        (lambda f, n: edit(f / f"{n}.json", format=2), "is damaged"),
        (lambda f, n: edit(f / f"{n}.json", model_sha256="0" * 64), "of another model"),
        (lambda f, n: edit(f / f"{n}.json", chat=True), "other kind of request"),
    ],
)
def test_files_that_are_not_a_parked_sequence_are_refused(
    client: Any, folder: Path, parked: str, spoil: Callable[[Path, str], Any], words: str
) -> None:
    spoil(folder, parked)
    with pytest.raises(openai.BadRequestError, match=words):
        complete(client, "x", resume=parked)


def test_the_state_of_another_model_is_refused(
    client: Any, folder: Path, parked: str, converted: Callable[..., Path]
) -> None:
    """The state's own digest is checked too, not only that of the text beside it."""
    other = linexport.load(converted("another_language_model"), threads=1).stream()
    other.step(next(iter([[[1, 2]]])))
    other.save(folder / f"{parked}.npz")
    edit(folder / f"{parked}.json", state_sha256=other.state().digest)
    with pytest.raises(openai.BadRequestError, match="of another model"):
        complete(client, "x", resume=parked)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "cmpl-0", "", "cmpl-" + "0" * 32, "CMPL-" + "0" * 32, "a\x00b"]
)
def test_ids_that_name_nothing(client: Any, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="No sequence"):
        complete(client, "x", resume=name)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_oldest_make_room(tmp_path: Path, model: Artifact) -> None:
    stream = model.stream()
    stream.step([[1, 2, 3]])
    settings = TextSettings(Sampling(), 5)
    start = Beginning((4,), 4, stream.state())
    text = ParkedText.of(model.model_sha256, start, settings, finished=False, chat=False)
    names = [new_id("cmpl") for _ in range(4)]
    size = len(stream.state().to_bytes()) + len(text.model_dump_json())
    parking = Parking(tmp_path / "made", 2 * size + 10)
    (tmp_path / "made" / "foreign.txt").write_text("stays")
    for name in names:
        parking.save(name, text, start.state)
    for name in names[:2]:
        with pytest.raises(UsageError, match="No sequence"):
            parking.load(name, model.model_sha256)
    for name in names[2:]:
        found, state = parking.load(name, model.model_sha256)
        assert (found, state) == (text, start.state)
    assert len(list((tmp_path / "made").iterdir())) == 5
    assert (tmp_path / "made").stat().st_mode & 0o77 == 0


def test_only_the_owner_reads_what_is_parked(folder: Path, parked: str) -> None:
    assert (folder / f"{parked}.npz").stat().st_mode & 0o77 == 0
