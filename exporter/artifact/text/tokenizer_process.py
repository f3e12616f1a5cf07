"""The process that encodes prompts: a tokenizer in, lines of JSON in, lines of JSON out.

    size in bytes, and tokenizer.json       once -> {}, or {"error": ...}
    {"text": ..., "special": true, "most": 9, "cut": null}
                                            {"ids": [...]}, {"count": ...} of more, or error

What a file may ask for has no bound (replacements that double a text forty times, a regular
expression that tries every way to divide a word), and an allocation that fails inside the library
ends its process. So this one runs alone, with limits on memory and processor time, its arguments;
it is started as a file and imports nothing of linexport but ``linexport.system``.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from tokenizers import Tokenizer

from linexport.system.json_object import JsonObject
from linexport.system.process_limits import allow, limit

CHARACTERS = 20_000
"""Characters of a prompt, or bytes of a file, that allow a second more of processor time."""


def main() -> None:
    """Answer until the standard input ends."""
    memory, seconds = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    limit(resource.RLIMIT_DATA, memory)
    limit(resource.RLIMIT_CORE, 0)
    content = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
    allow(seconds + len(content) / CHARACTERS)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_padding()  # to whatever length the file says
    except BaseException as error:  # a panic of the library is not an Exception
        write({"error": reason(error)})
        return
    write({})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        allow(seconds + len(request["text"]) / CHARACTERS)
        write(encoded(tokenizer, request))


def encoded(tokenizer: Any, request: JsonObject) -> dict[str, object]:
    """Return the tokens of a prompt, or the error."""
    try:
        # Not to the length that the file says.
        if request["cut"] is None:
            tokenizer.no_truncation()
        else:
            tokenizer.enable_truncation(request["cut"])
        found = tokenizer.encode(request["text"], add_special_tokens=request["special"])
        most = request["most"]
        return {"ids": found.ids} if most is None or len(found) <= most else {"count": len(found)}
    except BaseException as error:
        return {"error": reason(error)}


def reason(error: BaseException) -> str:
    """Return what an exception says, or its name where it says nothing."""
    return (str(error) or type(error).__name__)[:1000]


def write(answer: dict[str, object]) -> None:
    """Write a line to the standard output."""
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
