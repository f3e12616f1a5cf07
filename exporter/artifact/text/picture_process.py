"""The process that prepares pictures: their bytes in, arrays of the model's image processor out.

    {"sizes": [bytes of each], "most": pixels}, and these bytes  -> {"pixels": all of them}
    "go", or "no", which ends the request                        -> {"tokens": .., "arrays": ..}
    "go" or "no"                                                 -> the bytes of the arrays

``{"error": ...}`` in the place of an answer ends the request as well. Sizes are those of headers:
nothing is decoded before the first "go". Pictures are data that anybody may have sent, and their
formats are read by code in C: so this process runs alone, with limits of memory and processor time.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from linexport.artifact.text.image_processor import ImageProcessor, Prepared
from linexport.artifact.text.picture import in_rgb, opened_picture
from linexport.errors import LinexportError, UsageError
from linexport.system.process_limits import allow, limit

MEMORY = 3 * 2**30
"""Bytes that preparing the pictures of one request may take."""

SECONDS, PIXELS = 10, 2**20
"""Processor time for small pictures, and pixels that allow a second more."""

GO = b"go\n"


class DroppedError(Exception):
    """A request goes no further: its answer is not to be computed."""


def main() -> None:
    """Answer until the standard input ends."""
    folder, family, name = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to answer
    limit(resource.RLIMIT_CORE, 0)
    wire = Wire(sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    try:
        processor = ImageProcessor(Path(folder), family, name)
    except LinexportError as error:
        wire.write({"error": str(error)})
        return
    wire.write({})
    limit(resource.RLIMIT_DATA, data_in_use() + MEMORY)
    for line in wire.given:
        request = json.loads(line)
        contents = [wire.given.read(size) for size in request["sizes"]]
        try:
            answer(wire, processor, contents, request["most"])
        except DroppedError:
            continue
        except MemoryError:
            wire.write({"error": f"The images take more than {MEMORY / 2**30:g} GiB to prepare."})
        except LinexportError as error:
            wire.write({"error": str(error)})
        except Exception as error:  # of Pillow or of transformers, on what anybody has sent
            what = f"{type(error).__name__}: {error}"
            wire.write({"error": f"The images cannot be prepared: {what}."})


@dataclass(frozen=True)
class Wire:
    """Both directions of the connection to the parent."""

    given: BinaryIO
    answers: BinaryIO

    def write(self, line: dict[str, object]) -> None:
        """Write an answer."""
        self.answers.write(json.dumps(line).encode() + b"\n")
        self.answers.flush()

    def send(self, contents: Iterable[memoryview]) -> None:
        """Write bytes."""
        for content in contents:
            self.answers.write(content)
        self.answers.flush()

    def check_admitted(self) -> None:
        """Wait for the parent's word.

        Raises:
            DroppedError: it is not "go".
        """
        if self.given.readline() != GO:
            raise DroppedError


def answer(wire: Wire, processor: ImageProcessor, contents: Sequence[bytes], most: int) -> None:
    """Write what pictures are for the model, as far as the parent admits it.

    Args:
        wire: to the parent.
        processor: of the model.
        contents: of the pictures.
        most: pixels that they may have together.

    Raises:
        DroppedError: the parent does not admit it.
        UsageError: a picture cannot be read, they have more pixels, or the processor refuses them.
    """
    allow(SECONDS)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(opened_picture(io.BytesIO(content), f"Image {number}"))
            for number, content in enumerate(contents, 1)
        ]
        pixels = sum(count for _, count in opened)
        if pixels > most:
            raise UsageError(
                f"The images have {pixels:,} pixels together; this server reads at most {most:,} "
                "(--max-pixels). Scale them down."
            )
        wire.write({"pixels": pixels})
        wire.check_admitted()
        allow(SECONDS + pixels / PIXELS)
        prepared = processor.prepared([in_rgb(picture) for picture, _ in opened])
    send(wire, prepared)


def send(wire: Wire, prepared: Prepared) -> None:
    """Write the arrays, once the parent has room for them.

    Raises:
        DroppedError: it has none.
    """
    arrays = {name: np.ascontiguousarray(values) for name, values in prepared.images.items()}
    described = [[name, values.dtype.str, values.shape] for name, values in arrays.items()]
    wire.write({"tokens": prepared.tokens, "arrays": described})
    wire.check_admitted()
    wire.send(values.data for values in arrays.values())


def data_in_use() -> int:
    """Return the bytes of this process that ``RLIMIT_DATA`` counts, at most."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
