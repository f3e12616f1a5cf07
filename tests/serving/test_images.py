"""Images in conversations: the text is that of ``generate --image``, and others are served."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

import linexport
from linexport.artifact import Artifact
from linexport.artifact.text.image_processor import with_pictures
from linexport.artifact.text.language_interface import language_interface
from linexport.artifact.text.sampling import Sampling
from linexport.artifact.text.tokenizer import find_tokenizer
from linexport.serving.computing import LocalComputing
from linexport.serving.limits import Limits
from linexport.serving.service import Service
from linexport.serving.text import End, Order, TextSettings
from tests.hugging_face.test_pictures import add_language, add_tiles, torchvision_works
from tests.support.families import save_model
from tests.support.serving import Served, eventually, served
from tests.support.towers import WITH_PICTURES

image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

CHUNK = 8
"""Tokens of a prompt in one call: images are cut into several."""


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_5",
        pytest.param(
            "lfm2_vl",
            marks=pytest.mark.skipif(not torchvision_works(), reason="needs torchvision"),
        ),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model whose images matter."""
    kind, folder = request.param, tmp_path_factory.mktemp("images")
    save_model(WITH_PICTURES[kind], kind, folder / kind, "AutoModelForImageTextToText")
    made = transformers.AutoModelForImageTextToText.from_pretrained(folder / kind)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim > 1 and "language_model" not in name and "lm_head" not in name:
                weight *= 5
    made.save_pretrained(folder / kind)
    (add_tiles if kind == "lfm2_vl" else add_language)(folder / kind)
    linexport.convert(folder / kind, folder / "out", bench=False, threads=1)
    return linexport.load(folder / "out", threads=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of several sizes, of which two differ in their last rows alone."""
    folder, random = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    pixels = [random.integers(0, 255, s, dtype=np.uint8) for s in ((64, 100, 3), (20, 30, 4))]
    other = pixels[0].copy()
    other[40:] = 255 - other[40:]
    made = [folder / f"{i}.png" for i in range(3)]
    for path, values in zip(made, [*pixels, other], strict=True):
        image.fromarray(values).save(path)
    return made


@pytest.fixture(scope="module")
def server(model: Artifact) -> Iterator[Served]:
    with served(model, slots=4, chunk=CHUNK) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return opened(server)


def opened(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def ask(client: Any, files: Sequence[Path], text: str = "w5 w6", **more: Any) -> Any:
    parts = [*(part(data(f.read_bytes())) for f in files), {"type": "text", "text": text}]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 12, **more}
    messages = [{"role": "user", "content": parts}]
    return client.chat.completions.create(model="tiny", messages=messages, **settings)


def alone(model: Artifact, files: Sequence[Path], text: str = "w5 w6") -> tuple[str, int]:
    """The text that ``linexport generate --chat --image`` writes, and the tokens of its prompt."""
    parts = [*({"type": "image"} for _ in files), {"type": "text", "text": text}]
    content: Any = parts if files else text
    ids, given = model.encode_chat([{"role": "user", "content": content}]), None
    if files:
        ids, given = with_pictures(model, ids, files)
    vocabulary = language_interface(model.manifest).vocabulary
    decode = find_tokenizer(model.path, vocabulary, model.verified).decoder()
    pieces = [decode(token) for token in model.generate(ids, images=given, max_tokens=12)]
    return "".join([*pieces, decode.end()]), len(ids)


def written(answer: Any) -> tuple[str, int]:
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def test_the_text_is_that_of_generate(client: Any, model: Artifact, files: list[Path]) -> None:
    texts = set()
    for chosen in ([files[0]], [files[1]], files, []):
        found = written(ask(client, chosen))
        assert found == alone(model, chosen)
        texts.add(found[0])
    assert len(texts) == 4  # the images matter
    assert alone(model, files[:1])[1] > 3 * CHUNK


def test_a_stream_and_several_texts_have_the_same(client: Any, files: list[Path]) -> None:
    whole = ask(client, files[:2], n=2, seed=3, temperature=1.0)
    texts = ["", ""]
    more = {"n": 2, "seed": 3, "temperature": 1.0, "stream": True}
    pieces = list(ask(client, files[:2], **more, stream_options={"include_usage": True}))
    for piece in pieces[:-1]:
        texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_state_is_reused_for_the_same_image_alone(model: Artifact, files: list[Path]) -> None:
    """The first rows of two images are equal; what is known of one ends in the other."""
    with served(model, slots=2, chunk=CHUNK) as server:
        client, cached = opened(server), []
        for chosen in ([files[0]], [files[2]], [files[0]], [files[0], files[1]]):
            found = ask(client, chosen)
            assert written(found) == alone(model, chosen)
            cached.append(found.usage.prompt_tokens_details.cached_tokens)
        whole = alone(model, files[:1])[1]
        assert cached == [0, 0, whole - 1, 0]
        longer = ask(client, files[:1], "w5 w6 w7")
        assert longer.usage.prompt_tokens_details.cached_tokens == whole - 1
        assert written(longer) == alone(model, files[:1], "w5 w6 w7")


def test_others_are_served_while_images_are_computed(
    client: Any, model: Artifact, files: list[Path]
) -> None:
    prompts: list[tuple[list[Path], str]] = [
        *((files, f"w{i}") for i in range(4)),
        *(([], f"w{i} w9") for i in range(4)),
    ]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda p: written(ask(client, *p)), prompts))
    assert found == [alone(model, *prompt) for prompt in prompts]


def large_png(side: int) -> bytes:
    content = io.BytesIO()
    image.new("1", (side, side)).save(content, "PNG")
    return content.getvalue()


REFUSED: list[tuple[str, str]] = [
    ("http://127.0.0.1:9/a.png", "found 'http://127.0.0.1:9/a.png'; expected .* fetches nothing"),
    ("file:///etc/passwd", "fetches nothing"),
    ("data:image/png,AAAA", "expected an image in base64"),
    ("data:image/png;base64,A A=", "not base64"),
    (data(b""), "Image 1 cannot be read as an image: its format is not known"),
    (data(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "Image 1 cannot be read as an image"),
    (data(large_png(5_000)), r"25,000,000 pixels together; this server reads at most 16,777,216"),
    (data(large_png(9_000)), r"Image 1 has 9000 x 9000 pixels; at most 33,554,432"),
    (data(large_png(64)[:-30]), "Image 1 cannot be read as an image"),
]


@pytest.mark.parametrize(("url", "message"), REFUSED)
def test_what_is_no_image_is_a_sentence(
    server: Served, client: Any, files: list[Path], url: str, message: str
) -> None:
    messages = [{"role": "user", "content": [part(url)]}]
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert ask(client, files[:1], max_tokens=1).usage.prompt_tokens > 3 * CHUNK
    eventually(server.idle)


def test_images_have_their_places_and_numbers(
    client: Any, model: Artifact, files: list[Path]
) -> None:
    vision = model.manifest.vision
    assert vision is not None
    tokenizer = find_tokenizer(model.path, language_interface(model.manifest).vocabulary)
    word = tokenizer.token_text(vision.image_token)
    with pytest.raises(openai.BadRequestError, match="has 2 image tokens for 1 images"):
        ask(client, files[:1], f"w5 {word}")
    with pytest.raises(openai.BadRequestError, match="Found 17 images; this server takes at most"):
        ask(client, [files[1]] * 17)
    with pytest.raises(openai.BadRequestError, match="input_audio; this server reads text and im"):
        parts = [{"type": "input_audio", "input_audio": {}}]
        messages = [{"role": "user", "content": parts}]
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)


def test_what_images_take_is_counted(model: Artifact, files: list[Path]) -> None:
    content = io.BytesIO()
    image.new("RGB", (1000, 1000)).save(content, "PNG")
    messages: Any = [{"role": "user", "content": [part(data(content.getvalue()))]}]
    with served(model, memory_mib=8, max_prompt=20) as server:
        with pytest.raises(openai.APIStatusError, match=r"16,\d{3},\d{3} bytes for the pixels"):
            opened(server).chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert ask(opened(server), files[1:2], max_tokens=1).usage.prompt_tokens < 20
        with pytest.raises(openai.BadRequestError, match="this server takes at most 20"):
            ask(opened(server), files[:1], max_tokens=1)
        assert not server.engine.sessions


def process_of(service: Service) -> Any:
    assert service.images is not None
    return service.images._reader._process


def test_a_process_that_ends_is_started_again(
    server: Served, client: Any, files: list[Path]
) -> None:
    before = written(ask(client, files[:1]))
    process = process_of(server.service)
    process.kill()
    with pytest.raises(openai.BadRequestError, match="Preparing the images took too much memory"):
        ask(client, files[:1])
    assert written(ask(client, files[:1])) == before
    assert process_of(server.service).pid != process.pid


def test_a_text_goes_on_elsewhere_with_its_images(model: Artifact, files: list[Path]) -> None:
    """As where a machine of a cluster ends: order and tokens so far are sent to another."""
    limits = Limits(slots=2, chunk=CHUNK, cache_mb=0)

    async def tokens(service: Service, order: Order) -> list[int]:
        texts, found = service.write(order, lambda: None), []
        while not isinstance(event := await texts.next(), End):
            found += [] if event.token is None else [event.token]
        return found

    async def both() -> tuple[list[int], list[int]]:
        service = Service(model, LocalComputing(model, limits), "tiny", limits)
        service.start()
        assert service.language is not None and service.language.template is not None
        content = [{"type": "image"}, {"type": "text", "text": "w5 w6"}]
        prompt = await service.language.template.render([{"role": "user", "content": content}])
        image = files[0].read_bytes()
        plain = service.encode(prompt, None, special=False)
        beginning = await service.with_images(plain, [image], lambda size, what: None)
        order = Order(TextSettings(Sampling(), 12), {0: beginning})
        whole = await tokens(service, order)
        sent: Order = pickle.loads(pickle.dumps(order))
        rest = await tokens(service, sent.after({0: tuple(whole[:5])}))
        await service.close()
        return whole, rest

    whole, rest = asyncio.run(both())
    assert len(whole) > 6 and rest == whole[5:]


def test_a_prompt_with_images_is_not_parked_before_it_is_computed(
    model: Artifact, files: list[Path], tmp_path: Path
) -> None:
    """Afterwards it is: the state has the images."""
    slow = linexport.load(model.path, threads=1)
    inner, going = slow.call, threading.Event()

    def call(feeds: Any, *rest: Any, **options: Any) -> Any:
        going.wait(5)
        return inner(feeds, *rest, **options)

    slow.call = call  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads, served(slow, park=tmp_path, chunk=CHUNK) as server:
        answer = threads.submit(ask, opened(server), files)
        eventually(lambda: server.engine.sessions)
        stopping = threading.Thread(target=server.engine.stop, kwargs={"park": True})
        stopping.start()
        going.set()
        stopping.join()
        with pytest.raises(openai.InternalServerError, match="send the images to the next one"):
            answer.result()
    assert not list(tmp_path.iterdir())
