"""OpenAI's protocol, spoken by OpenAI's client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import linexport
from linexport.artifact import Artifact
from linexport.artifact.text.sampling import log_probabilities
from tests.support.serving import Served, alone, served

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
PROMPT = "def f(x): return "


@pytest.fixture(scope="module")
def model(converted: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The byte-level language model, with a chat template and a context."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(converted("language_model"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 400}))
    return linexport.load(folder, threads=1, verify=False)  # the template came later


@pytest.fixture(scope="module")
def server(model: Artifact) -> Iterator[Served]:
    with served(model, slots=4) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: Any, prompt: Any = PROMPT, **more: Any) -> Any:
    settings = {"max_tokens": 20, "temperature": 0, **more}
    return client.completions.create(model="tiny", prompt=prompt, **settings)


def test_the_model_is_listed(client: Any) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "linexport"


def test_a_text_is_that_of_generate(client: Any, model: Artifact) -> None:
    found = complete(client)
    assert found.choices[0].text == alone(model, PROMPT.encode(), max_tokens=20)
    assert (found.object, found.choices[0].finish_reason) == ("text_completion", "length")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (17, 20)
    ids = list(PROMPT.encode())
    assert complete(client, ids).choices[0].text == found.choices[0].text
    assert complete(client, [PROMPT]).choices[0].text == found.choices[0].text


SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 3}


def test_sampled_texts_depend_on_the_seed_alone(client: Any, model: Artifact) -> None:
    more = {"top_k": 40, "min_p": 0.01}
    found = complete(client, **SAMPLED, extra_body=more)
    expected = alone(model, PROMPT.encode(), max_tokens=20, **SAMPLED, **more)
    assert found.choices[0].text == expected
    assert complete(client, **{**SAMPLED, "seed": 4}).choices[0].text != expected


def test_a_penalty_on_repetition_is_that_of_generate(client: Any, model: Artifact) -> None:
    more = {"repetition_penalty": 1.4}
    found = complete(client, extra_body=more).choices[0].text
    assert found == alone(model, PROMPT.encode(), max_tokens=20, **more)
    assert found != complete(client).choices[0].text


def test_what_a_request_leaves_out_is_as_the_model_says(model: Artifact, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model.path, tmp_path / "tiny"))
    own: dict[str, Any] = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **own}))
    prompt = PROMPT.encode()
    whole = alone(model, prompt, max_tokens=40, seed=3, top_k=50, **own)
    stop = whole[10:12]
    content = {"do_sample": True, **own, "stop_strings": [stop]}
    (folder / "generation_config.json").write_text(json.dumps(content))
    with served(linexport.load(folder, threads=1, verify=False)) as found:
        client: Any = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 3}
        text = client.completions.create(**asked).choices[0].text
        assert text == whole[: whole.index(stop)]
        greedy = client.completions.create(
            **asked, temperature=0, stop="@@", extra_body={"repetition_penalty": 1}
        )
        assert greedy.choices[0].text == alone(model, prompt, max_tokens=40)


def test_several_texts_share_a_prompt(client: Any, server: Served, model: Artifact) -> None:
    before = server.service.metrics.prompt_tokens._value.get()
    found = complete(client, n=3, **SAMPLED)
    texts = [c.text for c in found.choices]
    assert texts == [
        alone(model, PROMPT.encode(), max_tokens=20, **{**SAMPLED, "seed": 3 + i}) for i in range(3)
    ]
    assert [c.index for c in found.choices] == [0, 1, 2]
    assert found.usage.completion_tokens == 60
    assert server.service.metrics.prompt_tokens._value.get() == before + len(PROMPT)


def test_a_stream_has_the_same_text(client: Any) -> None:
    whole = complete(client, n=2, **SAMPLED)
    pieces = list(
        complete(client, n=2, **SAMPLED, stream=True, stream_options={"include_usage": True})
    )
    texts = ["", ""]
    for piece in pieces[:-1]:
        (choice,) = piece.choices
        texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]
    assert len(pieces) > 20
    assert pieces[-1].choices == [] and pieces[-1].usage == whole.usage
    assert len({piece.id for piece in pieces}) == 1


def test_a_stop_string_ends_a_text_before_it(client: Any) -> None:
    whole = complete(client, max_tokens=60, **SAMPLED).choices[0].text
    stop = whole[20:23]
    end = whole.index(stop)
    for stream in (False, True):
        found = complete(client, max_tokens=60, **SAMPLED, stop=["nowhere", stop], stream=stream)
        choices = [piece.choices[0] for piece in found] if stream else found.choices
        assert "".join(c.text for c in choices) == whole[:end]
        assert choices[-1].finish_reason == "stop"


def test_a_conversation_is_put_through_the_template(client: Any, model: Artifact) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    asked = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 12}
    found = client.chat.completions.create(**asked)
    expected = alone(model, b"s:brief\nu:hi\na:", max_tokens=12)
    assert found.choices[0].message.content == expected
    assert found.choices[0].message.role == "assistant"
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "length"


def test_log_probabilities_are_those_of_the_model(client: Any, model: Artifact) -> None:
    ids = list(PROMPT.encode())
    tokens = list(model.generate(ids, max_tokens=5))
    logits = model.run(np.array([[*ids, *tokens]]))["output"][0, len(ids) - 1 : -1]
    expected = np.stack([log_probabilities(row) for row in logits])
    found = complete(client, max_tokens=5, logprobs=3).choices[0].logprobs
    chosen = expected[np.arange(5), tokens]
    np.testing.assert_allclose(found.token_logprobs, chosen, atol=1e-4)
    assert found.text_offset[0] == 0
    best = np.sort(expected, 1)[:, ::-1][:, 0]
    np.testing.assert_allclose([max(t.values()) for t in found.top_logprobs], best, atol=1e-4)
    messages = [{"role": "user", "content": "x"}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=2, max_tokens=4, temperature=0
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    assert all(t.logprob == t.top_logprobs[0].logprob for t in content)
    assert all(t.bytes is None or bytes(t.bytes).decode() == t.token for t in content)
    assert "".join(t.token for t in content if t.bytes) in chat.choices[0].message.content


def test_many_clients_get_what_each_would_get_alone(client: Any, model: Artifact) -> None:
    """More requests than slots, of all lengths, together."""

    def settings(i: int) -> dict[str, Any]:
        return {"max_tokens": 5 + 7 * (i % 5), "temperature": float(i % 2), "seed": i}

    prompts = [f"{i} " * (1 + 9 * (i % 4)) for i in range(12)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(
            threads.map(lambda i: complete(client, prompts[i], **settings(i)), range(12))
        )
    expected = [alone(model, p.encode(), **settings(i)) for i, p in enumerate(prompts)]
    assert [a.choices[0].text for a in answers] == expected


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"model": "other"}, 404, "model_not_found", "'other' does not exist"),
        ({"prompt": ""}, 400, None, "no tokens"),
        ({"prompt": [256]}, 400, None, "vocabulary is 0 to 255"),
        ({"prompt": [-1]}, 400, None, "vocabulary is 0 to 255"),
        ({"prompt": ["a", "b"]}, 400, None, "2 prompts"),
        ({"prompt": 3}, 400, "invalid_value", "prompt: expected a text or token ids"),
        ({"prompt": [[3.5]]}, 400, "invalid_value", "prompt: "),
        ({"prompt": "x" * 400}, 400, "context_length_exceeded", "made for 400"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens: .*greater than or equal to 1"),
        ({"max_tokens": 5000}, 400, None, "at most 4096"),
        ({"max_tokens": "9"}, 400, "invalid_value", "max_tokens: .*valid integer"),
        ({"temperature": -1}, 400, "invalid_value", "temperature"),
        ({"top_p": 0}, 400, "invalid_value", "top_p"),
        ({"n": 5}, 400, None, "4 slots"),
        ({"stop": [""]}, 400, "invalid_value", "stop"),
        ({"logprobs": 99}, 400, "invalid_value", "logprobs"),
        ({"echo": True}, 400, "invalid_value", "echo"),
        ({"frequency_penalty": 1}, 400, "invalid_value", "frequency_penalty"),
        ({"extra_body": {"colour": 1}}, 400, "unknown_parameter", "colour"),
        ({"extra_body": {"park": True}}, 400, None, "--park"),
        ({"extra_body": {"resume": "cmpl-0"}}, 400, None, "--park"),
    ],
)
def test_wrong_requests_are_refused_in_openais_form(
    client: Any, change: dict[str, Any], status: int, code: str | None, words: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "x", **change})
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.type == "invalid_request_error"


def test_a_message_without_content_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=r"messages\.0: .*role user needs content"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user"}], max_tokens=1)


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "http://127.0.0.1:9/a.png"])
def test_an_image_is_refused_and_not_fetched(client: Any, url: str) -> None:
    """By a model of text alone; tests/serving/test_images.py has one that takes images."""
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(
        openai.BadRequestError, match=r"No images here: .*takes text alone"
    ) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=1
        )
    assert (caught.value.param, caught.value.code) == ("messages", "no_images")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {}}, "input_audio; this server reads text and"),
        ({"type": "image_url", "image_url": {"url": 5}}, "content"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}, "content"),
    ],
)
def test_other_parts_of_a_message_are_refused(client: Any, part: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": [part]}], max_tokens=1
        )


def test_neutral_fields_of_openai_are_taken(client: Any) -> None:
    complete(client, frequency_penalty=0.0, presence_penalty=0, logit_bias={}, user="me", suffix="")
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=1,
        response_format={"type": "text"},
        tool_choice="none",
    )


def test_a_text_ends_where_the_context_is_full(client: Any) -> None:
    found = complete(client, "x" * 390, max_tokens=50)
    assert found.usage.completion_tokens == 10
    assert found.choices[0].finish_reason == "length"


def test_a_known_beginning_is_not_computed_again(
    client: Any, server: Served, model: Artifact
) -> None:
    said, counted = (
        "a beginning that nobody has sent before; ",
        server.service.metrics.cached_tokens,
    )
    before = counted._value.get()
    first = complete(client, said, max_tokens=8)
    text = first.choices[0].text
    again = complete(client, said, max_tokens=8)
    longer = complete(client, f"{said}{text}?", max_tokens=8)
    other = complete(client, said[1:], max_tokens=8)
    cached = [f.usage.prompt_tokens_details.cached_tokens for f in (first, again, longer, other)]
    # A text of 8 bytes: 7 of its tokens were fed back.
    assert cached == [0, len(said) - 1, len(said) + 7, 0]
    assert again.choices[0].text == text
    assert longer.choices[0].text == alone(model, f"{said}{text}?".encode(), max_tokens=8)
    assert counted._value.get() - before == sum(cached)


def test_a_server_without_a_cache_computes_every_prompt(model: Artifact) -> None:
    with served(model, cache_mb=0) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        found = [complete(client, max_tokens=3) for _ in range(2)]
    assert [f.usage.prompt_tokens_details.cached_tokens for f in found] == [0, 0]
    assert found[0].choices[0].text == found[1].choices[0].text
