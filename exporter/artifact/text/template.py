"""Chat templates: messages to a prompt, by the template of the model's folder.

    template + messages --process of its own--> prompt

A template is a program of the model's author. jinja2's sandbox keeps it from Python; its time and
memory are bounded by the process that renders it, which is ended when it takes too long and
started again for the next prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from linexport.artifact.text.tokenizer import TOKENIZER_CONFIG, Files, read_file, read_json
from linexport.errors import LinexportError, UsageError
from linexport.system.child_process import end, python_module
from linexport.system.json_object import JsonObject

CHAT_TEMPLATE = "chat_template.jinja"
SECONDS = 5.0
"""Longest time for one prompt."""

LARGEST = 2**24
"""Bytes of the longest line that the process may write."""


class TemplateError(LinexportError):
    """A chat template that refuses the messages, or does not end."""

    exit_code = 2


def find_template(folder: Path, files: Files) -> str | None:
    """Return the chat template of an artifact; None where it has none.

    Args:
        folder: of the artifact.
        files: of the artifact, as they were verified; empty to take files as they are.

    Raises:
        UsageError: a file is damaged, or not the one that was verified.
    """
    path = folder / CHAT_TEMPLATE
    if path.is_file():
        try:
            return read_file(path, files).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{path} cannot be read: {error}.") from None
    found = read_json(folder / TOKENIZER_CONFIG, files).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def special_tokens(folder: Path, files: Files) -> dict[str, str]:
    """Return the texts of special tokens that templates name, such as ``bos_token``.

    Args:
        folder: of the artifact.
        files: of the artifact, as they were verified; empty to take files as they are.

    Raises:
        UsageError: a file is damaged, or not the one that was verified.
    """
    config = read_json(folder / TOKENIZER_CONFIG, files)
    words = {}
    for name, word in config.items():
        text = word.get("content") if isinstance(word, dict) else word
        if name.endswith("_token") and isinstance(text, str):
            words[name] = text
    return words


def chat_prompt(folder: Path, files: Files, messages: Sequence[Mapping[str, object]]) -> str:
    """Return the prompt of one conversation; ``ChatTemplate`` renders many.

    Args:
        folder: of the artifact.
        files: of the artifact, as they were verified; empty to take files as they are.
        messages: each with ``role`` and ``content``.

    Raises:
        UsageError: the folder has no template, or a file is damaged.
        TemplateError: see ``ChatTemplate.render``.
    """
    found = find_template(folder, files)
    if found is None:
        raise UsageError(
            f"{folder} has no chat template: expected {CHAT_TEMPLATE}, or chat_template in "
            f"{TOKENIZER_CONFIG}. Write the prompt as the model expects it, or convert a model "
            "folder that holds one."
        )

    async def render() -> str:
        template = ChatTemplate(found, special_tokens(folder, files))
        try:
            return await template.render(messages)
        finally:
            await template.close()

    with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop already
        return thread.submit(asyncio.run, render()).result()


class ChatTemplate:
    """Renders prompts one after another; belongs to one event loop."""

    def __init__(self, template: str, words: Mapping[str, str], seconds: float = SECONDS) -> None:
        self._setup = json.dumps({"template": template, "words": dict(words)}).encode() + b"\n"
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """Return the prompt of a conversation, up to where the assistant's answer begins.

        Raises:
            TemplateError: the template refuses the messages, is not valid, or takes too long.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await self._ask(json.dumps(list(messages)).encode() + b"\n")
            except (TimeoutError, ValueError, OSError):
                await self._end()
                raise TemplateError(
                    f"The chat template of this model took more than {self._seconds:g} s, or "
                    "wrote too much."
                ) from None
            except BaseException:  # cancelled in mid-answer: the next one must not read the rest
                await self._end()
                raise
        if "error" in answer:
            raise TemplateError(f"The chat template of this model says: {answer['error']}")
        return str(answer["prompt"])

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _ask(self, line: bytes) -> JsonObject:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *python_module("linexport.artifact.text.template_process"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LARGEST,
            )
            line = self._setup + line
        reader, writer = self._process.stdout, self._process.stdin
        assert reader is not None and writer is not None
        writer.write(line)
        await writer.drain()
        answer = await reader.readline()
        if not answer.endswith(b"\n"):
            raise ValueError("the process has ended")
        found: dict[str, object] = json.loads(answer)
        return found

    async def _end(self) -> None:
        process, self._process = self._process, None
        await end(process)
