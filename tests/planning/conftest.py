"""A language model's artifact in float32 and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import linexport


@pytest.fixture(scope="session")
def exact(converted: Callable[..., Path]) -> Path:
    return converted("language_model")


@pytest.fixture(scope="session")
def quantised(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``quantised(weights)``: made once."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(choice: str) -> Path:
        if not (folder / choice).exists():
            linexport.quantize(exact, folder / choice, weights=choice, threads=1)
        return folder / choice

    return make
