"""Prompts to tokens by a ``tokenizer.json``, in a process with limits.

    tokenizer.json, then prompts --process of its own--> token ids

The process is started with the tokenizer, ends with it, and is started again for the next prompt
after one that it did not survive.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from linexport.errors import UsageError
from linexport.system.json_object import JsonObject

PROCESS = str(Path(__file__).with_name("tokenizer_process.py"))

MEMORY = 3 * 2**30
"""Bytes that encoding may take; a prompt of 4 million tokens takes 1.3 GB."""

SECONDS = 5
"""Processor time that encoding a short prompt may take, and reading a small file."""


class TooManyTokensError(UsageError):
    """A prompt has more tokens than are taken.

    Attributes:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"The prompt has {count} tokens.")
        self.count = count


class Encoder:
    """Encodes prompts one after another; may be called by several threads.

    Args:
        path: of the tokenizer, for errors.
        content: of that file.
        memory: bytes that the process may hold.
        seconds: processor time for a short prompt; a long one is given more.

    Raises:
        UsageError: it is not a tokenizer, or reading it takes more than the limits.
    """

    def __init__(
        self, path: Path, content: bytes, *, memory: int = MEMORY, seconds: int = SECONDS
    ) -> None:
        self._limits = memory, seconds
        self._path, self._content = path, content
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        with self._lock:
            self._start()

    def encode(
        self, text: str, *, special: bool, most: int | None = None, cut: int | None = None
    ) -> list[int]:
        """Return the tokens of a prompt.

        Args:
            text: of any length.
            special: begin and end it as the tokenizer says.
            most: tokens that are returned; None for any number.
            cut: tokens that are kept of a longer text; None for all.

        Raises:
            TooManyTokensError: there are more.
            UsageError: the tokenizer fails, or takes more than the limits.
        """
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None
            request = {"text": text, "special": special, "most": most, "cut": cut}
            line = json.dumps(request).encode() + b"\n"
            answer = self._ask(self._process, line)
        if "error" in answer:
            raise UsageError(f"{self._path.name} cannot encode the prompt: {answer['error']}.")
        if "count" in answer:
            raise TooManyTokensError(answer["count"])
        ids: list[int] = answer["ids"]
        return ids

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            # Nothing of linexport is imported, and -P keeps modules of the file's folder out.
            [sys.executable, "-P", PROCESS, *map(str, self._limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _end, process)
        answer = self._ask(process, f"{len(self._content)}\n".encode() + self._content)
        if "error" in answer:
            _end(process)
            raise UsageError(
                f"{self._path} cannot be read: {answer['error']}. Convert the model again."
            )

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> JsonObject:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:  # it has ended, and its exit code says how
            answer = b""
        except BaseException:  # interrupted in mid-answer: the next prompt must not read the rest
            self._process = None
            _end(process)
            raise
        if answer.endswith(b"\n"):
            found: dict[str, object] = json.loads(answer)
            return found
        self._process, code = None, process.wait()
        memory, seconds = self._limits
        ends = {
            -signal.SIGXCPU: f"takes more than {seconds} s of processor time",
            -signal.SIGABRT: f"takes more than {memory / 2**30:g} GiB of memory",
        }
        raise UsageError(
            f"{self._path} {ends.get(code, f'ends its process with exit code {code}')} on "
            f"{len(request)} bytes. Use another tokenizer."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
