"""The bearer token of a server, from a file or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from linexport.errors import UsageError

TOKEN = "LINEXPORT_TOKEN"
SHORTEST = 16


def read_token(path: Path | None) -> str | None:
    """Return the token that clients must send.

    Raises:
        UsageError: the file cannot be read, or has no token that is fit for a header.
    """
    if path is None:
        found, where = os.environ.get(TOKEN), TOKEN
        if found is None:
            return None
    else:
        where = str(path)
        try:
            found = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read as a token: {error}.") from None
    if len(found) < SHORTEST or not found.isascii() or not found.isprintable() or " " in found:
        raise UsageError(
            f"{where} has no usable token; expected {SHORTEST} or more ASCII characters without "
            "spaces, such as `openssl rand -hex 32` writes."
        )
    return found
