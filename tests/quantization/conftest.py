"""A float32 language model, and what becomes of it in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import linexport
from tests.hugging_face.conftest import model_folder

__all__ = ["model_folder"]


@pytest.fixture(scope="session")
def exact(converted: Callable[..., Path]) -> Path:
    return converted("language_model")


@pytest.fixture(scope="session")
def quantised(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``quantised(weights)``: made once."""
    folder = tmp_path_factory.mktemp("quantised")

    def make(choice: str) -> Path:
        if not (folder / choice).exists():
            limit = 1.0 if choice == "auto" else None
            linexport.quantize(exact, folder / choice, weights=choice, max_kld=limit, threads=1)
        return folder / choice

    return make
