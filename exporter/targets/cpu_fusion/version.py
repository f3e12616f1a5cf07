"""Version of what is compared with the CPU library: its C++ and what writes graphs for it."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from linexport.plugins.cpu.library import sources_digest


@cache
def native_version() -> str:
    """Return a digest of the library's sources and of the modules of this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(sources_digest().encode() + content).hexdigest()[:16]
