"""A file that is written beside another and takes its place in one step, or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of ``path`` where the block ends well.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
