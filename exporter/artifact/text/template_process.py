"""The process that renders chat templates: lines of JSON in, lines of JSON out.

    {"template": ..., "words": {...}}     once
    [{"role": ..., "content": ...}, ...]  -> {"prompt": ...} or {"error": ...}

The environment is that of transformers: loop controls, blocks trimmed, ``raise_exception``,
``strftime_now`` and ``tojson``.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from linexport.system.json_object import JsonObject

MEMORY = 2**29
"""Bytes of data this process may hold."""


def main() -> None:
    """Answer until the standard input ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to answer
    setup = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        print(json.dumps(answer(setup, json.loads(line))), flush=True)


def answer(setup: JsonObject, messages: list[Any]) -> dict[str, str]:
    """Return the prompt of a conversation, or the error of its template."""
    try:
        template = environment().from_string(setup["template"])
        words = {**setup["words"], "messages": messages, "add_generation_prompt": True}
        return {"prompt": template.render(words)}
    except MemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # a template may raise whatever Python's operators raise
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def environment() -> ImmutableSandboxedEnvironment:
    """Return what templates of Hugging Face folders are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    main()
