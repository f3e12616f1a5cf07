"""Tiny models, and exported programs rewritten member by member."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.export.pt2_archive import PT2ArchiveReader, PT2ArchiveWriter

WRITTEN_BY_TORCH = {".data/version", ".data/serialization_id", "byteorder"}


class Tiny(torch.nn.Module):
    """Two matrices and padding to a multiple of four, so that guards and symbols appear."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"first-layer": torch.nn.Linear(4, 4)})
        self.register_buffer("mask", torch.full((4,), float("-inf")))
        self.offset = torch.ones(4)

    def forward(self, x: torch.Tensor, flags: torch.Tensor) -> dict[str, torch.Tensor]:
        length = x.shape[1]
        x = torch.nn.functional.pad(self.inner["first-layer"](x), (0, 0, 0, -length % 4))
        chunks = x.reshape(x.shape[0], -1, 4, 4) + self.offset + self.mask.exp()
        return {"sums": torch.einsum("bnti->bi", chunks), "count": flags.sum(1)}


@pytest.fixture(scope="session")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    examples = (torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.bool))
    dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    return torch.export.export(Tiny().eval(), examples, dynamic_shapes=(dims, dims))


@pytest.fixture(scope="session")
def pt2(program: torch.export.ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pt2") / "tiny.pt2"
    torch.export.save(program, path)
    return path


@pytest.fixture
def rewrite(pt2: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return ``rewrite(members=..., edit=...)``, which changes the tiny program.

    Members are replaced or added (None removes one), and its JSON is edited in place.
    """
    reader = PT2ArchiveReader(str(pt2))
    original = {n: reader.read_bytes(n) for n in reader.get_file_names()}

    def rewritten(
        members: dict[str, bytes | None] | None = None,
        edit: Callable[[Any], None] | None = None,
        name: str = "edited.pt2",
    ) -> Path:
        content: dict[str, bytes | None] = dict(original)
        if edit:
            document = json.loads(original["models/model.json"])
            edit(document)
            content["models/model.json"] = json.dumps(document).encode()
        content |= members or {}
        path = tmp_path / name
        with PT2ArchiveWriter(str(path)) as writer:
            for member, data in content.items():
                if data is not None and member not in WRITTEN_BY_TORCH:
                    writer.write_bytes(member, data)
        return path

    return rewritten
