"""Files written by torch of which a bit was lost: the CRC32 of every member is compared."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from linexport import models
from linexport.errors import UnsupportedModelError
from linexport.sources import load_model


@pytest.fixture
def file(tmp_path: Path, pt2: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / f"model{request.param}"
    if request.param == ".pt2":
        path.write_bytes(pt2.read_bytes())
    else:
        models.save(models.build("linear_attention_layer", {"num_heads": 2, "head_dim": 4}), path)
    return path


def members(path: Path) -> Iterator[tuple[str, int]]:
    """Name of each member that has content, and the place of its last byte in the file."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as zipped:
        for entry in zipped.infolist():
            lengths = content[entry.header_offset + 26 : entry.header_offset + 30]
            name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
            start = entry.header_offset + 30 + name + extra
            if entry.file_size:
                yield entry.filename, start + entry.file_size - 1


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", [".pt", ".pt2"], indirect=True)
def test_a_flipped_bit_in_any_member_is_found(file: Path) -> None:
    load_model(file)
    found = list(members(file))
    assert any("data/" in name for name, _ in found)
    for name, place in found:
        flip(file, place)
        with pytest.raises(UnsupportedModelError, match=r"damaged|not a|archive_") as caught:
            load_model(file)
        if "/data/" in name:
            inner = name.partition("/")[2]
            assert f"its member {inner} is damaged: it differs from its CRC32" in str(caught.value)
        flip(file, place)
    load_model(file)


def test_a_file_that_torch_wrote_without_checksums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        model = models.build("linear_attention_layer", {"num_heads": 2, "head_dim": 4})
        models.save(model, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert load_model(tmp_path / "model.pt").source.kind == "checkpoint"
