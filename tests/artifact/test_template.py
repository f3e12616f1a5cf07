"""Chat templates: what Hugging Face's need, and what hostile ones try."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from linexport.artifact.text.template import (
    ChatTemplate,
    TemplateError,
    find_template,
    special_tokens,
)
from linexport.artifact.text.template_process import answer
from linexport.errors import UsageError
from linexport.manifest.records import FileRecord

MESSAGES = [{"role": "user", "content": "Grüß «Gott»"}, {"role": "assistant", "content": "a\n"}]

CHATML = """\
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}
        {{- '<|im_start|>system\nBe brief.<|im_end|>\n' -}}
    {%- endif -%}
    {{- bos_token + message['role'] + '\n' + (message.content | trim) + '<|im_end|>' + '\n' -}}
    {%- if message.role == 'tool' %}{% continue %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def render(template: str, *, seconds: float = 5.0) -> str:
    async def run() -> str:
        chat = ChatTemplate(template, {"bos_token": "<s>"}, seconds)
        try:
            return await chat.render(MESSAGES)
        finally:
            await chat.close()

    return asyncio.run(run())


def test_a_template_as_folders_have_them() -> None:
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<s>user\nGrüß «Gott»<|im_end|>\n"
        "<s>assistant\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML) == expected
    for template, expected in (
        ("{{ messages | tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("{{ messages | tojson(indent=1) }}", json.dumps(MESSAGES, ensure_ascii=False, indent=1)),
        ("{{ strftime_now('%Y-%m-%d') | length }}", "10"),
    ):
        assert answer({"template": template, "words": {}}, MESSAGES) == {"prompt": expected}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for x in", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "UndefinedError|SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update({'role': 'x'}) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError|TemplateNotFound|no loader"),
        ("{{ range(10**9) | list }}", "OverflowError|Range too big"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_an_error(template: str, words: str) -> None:
    found = answer({"template": template, "words": {}}, MESSAGES)
    assert re.search(words, found["error"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{% set n = namespace(x='a' * 1000) %}{% for i in range(99) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
    ],
)
def test_a_template_without_bounds_runs_out_of_memory(template: str) -> None:
    with pytest.raises(TemplateError, match="out of memory"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",  # a line of 100 MB
    ],
)
def test_a_template_without_end_is_ended_and_the_next_prompt_is_served(template: str) -> None:
    async def run() -> None:
        trap = "{% if messages[0].content == 'trap' %}" + template + "{% endif %}fine"
        chat = ChatTemplate(trap, {}, 0.7)
        with pytest.raises(TemplateError, match=r"more than 0\.7 s, or wrote too much"):
            await chat.render([{"role": "user", "content": "trap"}])
        chat._seconds = 5.0
        assert await chat.render(MESSAGES) == "fine"
        await chat.close()

    asyncio.run(run())


def test_a_prompt_that_nobody_waits_for_does_not_answer_the_next() -> None:
    async def run() -> None:
        chat = ChatTemplate("{{ messages[0].content }}", {})
        first = asyncio.ensure_future(chat.render([{"role": "user", "content": "one"}]))
        await asyncio.sleep(0)
        first.cancel()
        assert await chat.render([{"role": "user", "content": "two"}]) == "two"
        await chat.close()

    asyncio.run(run())


def test_where_templates_are_found(tmp_path: Path) -> None:
    def config(content: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))

    assert find_template(tmp_path, {}) is None
    config({"chat_template": "one", "bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    assert find_template(tmp_path, {}) == "one"
    assert special_tokens(tmp_path, {}) == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    config({"chat_template": named})
    assert find_template(tmp_path, {}) == "b"
    (tmp_path / "chat_template.jinja").write_text("two")
    assert find_template(tmp_path, {}) == "two"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"chat_template.jinja cannot be read"):
        find_template(tmp_path, {})


def test_templates_are_those_that_were_verified(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text("one")
    known = {path.name: FileRecord(3, hashlib.sha256(b"one").hexdigest())}
    assert find_template(tmp_path, known) == "one"
    path.write_text("two")
    with pytest.raises(UsageError, match="not the file that was there when the artifact was open"):
        find_template(tmp_path, known)
    with pytest.raises(UsageError, match="is not among the files of the artifact"):
        find_template(tmp_path, {"model.onnx": known[path.name]})
    path.unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for read in (find_template, special_tokens):
        with pytest.raises(UsageError, match="is not among the files of the artifact"):
            read(tmp_path, known)
