"""The times of kernels that TensorRT measures while it builds, kept in a file for later builds.

TensorRT itself starts with an empty cache where a file is damaged or of another version or GPU, and
says so in its log. TensorRT-RTX times nothing: it compiles for the GPU where the engine is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linexport.errors import UsageError


@contextmanager
def timing_cache(config: Any, file: Path | None) -> Iterator[None]:
    """Builds of ``config`` take times from ``file``, if it is there, and leave theirs in it.

    Args:
        config: TensorRT's IBuilderConfig.
        file: None: no cache is read or written.

    Raises:
        UsageError: the file cannot be read or written, or is not of this TensorRT and GPU.
    """
    if file is None:
        yield
        return
    try:
        kept = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from None
    cache = config.create_timing_cache(kept)
    if cache is None or not config.set_timing_cache(cache, False):
        raise UsageError(
            f"{file} is not a timing cache of this TensorRT and GPU. Name another --timing-cache."
        )
    yield
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_bytes(bytes(config.get_timing_cache().serialize()))
        partial.replace(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}.") from None
