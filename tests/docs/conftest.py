"""Files that pages of the documentation begin with, made once a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def _model(folder: Path) -> None:
    """``model.pt``: the example language model, untrained."""
    from linexport import models

    models.save(
        models.build("language_model", {"dim": 32, "num_heads": 2, "layers": 2}),
        folder / "model.pt",
    )


def _artifact(folder: Path) -> None:
    """``artifact``: that model, converted without measurement."""
    import linexport

    _model(folder)
    linexport.convert(folder / "model.pt", folder / "artifact", bench=False)


MAKERS: dict[str, Callable[[Path], None]] = {"model.pt": _model, "artifact": _artifact}


@pytest.fixture(scope="session")
def provide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """``provide(name, folder)``: put the file or folder of that name there."""
    made: dict[str, Path] = {}

    def copy(name: str, folder: Path) -> None:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("given")
            MAKERS[name](made[name])
        source, target = made[name] / name, folder / name
        if target.exists():
            return
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)

    return copy
