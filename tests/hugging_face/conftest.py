"""Tiny models of every family, with random weights, in folders as the hub has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import TINY, save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_folder(model_type, **changes)``: such a folder, made once; change copies only."""
    made: dict[str, Path] = {}

    def folder(model_type: str, **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(model_type)
            save_model({**TINY[model_type], **changes}, model_type, made[key])
        return made[key]

    return folder


@pytest.fixture(scope="session")
def converted_family(
    model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    """``converted_family(model_type)``: its artifact, made once, and the manifest of it."""
    import linexport

    made: dict[str, tuple[Path, Any]] = {}

    def convert(model_type: str) -> tuple[Path, Any]:
        if model_type not in made:
            place = tmp_path_factory.mktemp("artifacts") / model_type
            source = model_folder(model_type)
            made[model_type] = place, linexport.convert(source, place, bench=False, threads=1)
        return made[model_type]

    return convert


@pytest.fixture(scope="session")
def families() -> dict[str, dict[str, Any]]:
    """Configuration of every family, by model type."""
    return TINY
