"""Pictures of many requests, prepared in a process with limits, one request after another.

    bytes of pictures  --process of its own-->  pixel values, grids and tokens of each picture

The process is started with the first pictures, and again after those that it did not survive.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np

from linexport.artifact.opened_folder import OpenedFolder
from linexport.artifact.text.image_processor import (
    TILED,
    Prepared,
    check_pictures,
    processor_folder,
)
from linexport.artifact.text.picture import EXTRA
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.system.child_process import end, python_module
from linexport.system.json_object import JsonObject

DECODED = 16
"""Bytes that a pixel takes at most while its picture is decoded: those of WEBP."""

SECONDS = 120.0
"""Longest time for the pictures of one request, the start of the process included."""

LARGEST = 2**24
"""Bytes of the longest line that the process may write."""

Admit = Callable[[int, str], None]
"""Takes bytes, and what needs them in words; raises where there are not so many."""


class PictureReader:
    """Prepares pictures one request after another; belongs to one event loop.

    Args:
        model: that takes them.
        most: pixels of one request.

    Raises:
        UsageError: the model takes no pictures, or lacks the files of its image processor.
        EnvironmentProblemError: a library is not installed.
    """

    def __init__(self, model: OpenedFolder, most: int) -> None:
        self._model, self._most = model, most
        self._family = check_pictures(model)
        libraries = ("PIL", "transformers", *(["torchvision"] if self._family in TILED else []))
        missing = [name for name in libraries if find_spec(name) is None]
        if missing:
            raise EnvironmentProblemError(
                f"Preparing images needs {', '.join(missing)}, not installed here: {EXTRA}"
                + (", and torchvision for this model." if self._family in TILED else ".")
            )
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def prepare(self, pictures: Sequence[bytes], admit: Admit) -> Prepared:
        """Return the pictures of a request as the model takes them.

        Args:
            pictures: contents of files.
            admit: is called before pixels are decoded, and before arrays are taken over.

        Raises:
            UsageError: a picture cannot be read, they have too many pixels, or preparing them takes
                more than the limits.
            Exception: what ``admit`` raises.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(SECONDS):
                    return await self._prepared(pictures, admit)
            except TimeoutError:
                await self._end()
                raise UsageError(f"Preparing the images took more than {SECONDS:g} s.") from None
            except ValueError as error:  # a line that is not JSON: the rest is not either
                await self._end()
                raise UsageError(f"The answer of the image processor is damaged: {error}") from None
            except (ConnectionError, asyncio.IncompleteReadError):
                raise UsageError(await self._post_mortem()) from None
            except asyncio.CancelledError:  # the next request must not read the rest
                await self._end()
                raise

    async def close(self) -> None:
        """End the process."""
        async with self._turn:
            await self._end()

    async def _prepared(self, pictures: Sequence[bytes], admit: Admit) -> Prepared:
        process = self._process or await self._start()
        request = {"sizes": [len(content) for content in pictures], "most": self._most}
        content = b"".join([json.dumps(request).encode(), b"\n", *pictures])
        found = await _ask(process, content)
        decoded = DECODED * found["pixels"]
        await _admitted(process, admit, decoded, "the pixels of the images")
        answer = await _ask(process, b"go\n")
        shapes = {name: (np.dtype(kind), shape) for name, kind, shape in answer["arrays"]}
        sizes = {n: kind.itemsize * int(np.prod(shape)) for n, (kind, shape) in shapes.items()}
        both = 2 * sum(sizes.values())  # here and there, where what was decoded is gone by now
        await _admitted(process, admit, max(0, both - decoded), "the images as the model has them")
        await _write(process, b"go\n")
        assert process.stdout is not None
        images = {
            name: np.frombuffer(await process.stdout.readexactly(sizes[name]), kind).reshape(shape)
            for name, (kind, shape) in shapes.items()
        }
        return Prepared(images, answer["tokens"])

    async def _start(self) -> asyncio.subprocess.Process:
        """Return a new process that has opened the processor.

        Raises:
            UsageError: it cannot be opened.
        """
        with processor_folder(self._model, self._family) as folder:
            arguments = str(folder), self._family, str(self._model.path)
            process = await asyncio.create_subprocess_exec(
                *python_module("linexport.artifact.text.picture_process", *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # libtiff and others speak there
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                limit=LARGEST,
            )
            self._process = process
            try:
                await _ask(process, b"")
            except UsageError:
                await self._end()
                raise
        return process

    async def _post_mortem(self) -> str:
        """Return in words how the process has ended."""
        process, self._process = self._process, None
        code = None if process is None else await process.wait()
        how = {
            -signal.SIGXCPU: "took too much processor time",
            -signal.SIGKILL: "took too much memory, or was ended",
        }.get(code or 0, f"ended its process with exit code {code}")
        return f"Preparing the images {how}. Send other images."

    async def _end(self) -> None:
        process, self._process = self._process, None
        await end(process)


async def _ask(process: asyncio.subprocess.Process, content: bytes) -> JsonObject:
    """Return the next answer of the process.

    Raises:
        UsageError: it is an error.
        ConnectionError: the process has ended.
    """
    await _write(process, content)
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError
    answer: JsonObject = json.loads(line)
    if "error" in answer:
        raise UsageError(str(answer["error"]))
    return answer


async def _write(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(content)
    await process.stdin.drain()


async def _admitted(
    process: asyncio.subprocess.Process, admit: Admit, size: int, what: str
) -> None:
    """Let the caller admit bytes; of a request that it refuses, the process forgets the rest."""
    try:
        admit(size, what)
    except Exception:
        await _write(process, b"no\n")
        raise
