"""The environment of other runtimes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import environments


@pytest.fixture(scope="session")
def environment() -> Path:
    """The other runtimes."""
    return environments.made("runtimes")
