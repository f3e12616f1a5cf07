"""What is refused before an engine is opened, and the profile that a call falls into."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from linexport.errors import EnvironmentProblemError, UsageError
from linexport.graph.dims import DimRange
from linexport.manifest.engines import EngineRecord
from linexport.plugins.tensorrt.flavour import RTX, Flavour
from linexport.targets.trt import session
from linexport.targets.trt.profiles import DECODE, PREFILL, Profile, bound, profiles

BATCH = DimRange(1, 2, 4, batch=True)


class Here(Flavour):
    """A library of version 1.7 that is installed."""

    def version(self) -> str:
        return "1.7"


HERE = Here("here", "TensorRT-X", (), "", 1, "")


def made(folder: Path, **changes: Any) -> EngineRecord:
    (folder / "e.engine").write_bytes(b"engine")
    digest = hashlib.sha256(b"engine").hexdigest()
    record = EngineRecord(
        "e.engine", digest, "x", "1.7", 89, "fp32", (), (), 0, {}, 0, (), False, ()
    )
    return replace(record, **changes)


def test_an_engine_is_what_its_record_says(tmp_path: Path) -> None:
    assert session.read_engine(tmp_path, made(tmp_path), HERE) == b"engine"


def test_half_an_engine_is_refused(tmp_path: Path) -> None:
    record = made(tmp_path)
    (tmp_path / "e.engine").write_bytes(b"eng")
    with pytest.raises(UsageError, match=r"only half of it was written \(3 bytes"):
        session.read_engine(tmp_path, record, HERE)
    (tmp_path / "e.engine").unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        session.read_engine(tmp_path, record, HERE)


def test_an_engine_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentProblemError, match=r"built by TensorRT-X 1\.6; installed is 1\.7"
    ):
        session.read_engine(tmp_path, made(tmp_path, version="1.6"), HERE)


def test_an_engine_for_another_gpu_is_refused(tmp_path: Path) -> None:
    records = [made(tmp_path), made(tmp_path, sm=120)]
    assert session.choose(records, 120, tmp_path, RTX).sm == 120
    with pytest.raises(
        EnvironmentProblemError, match=r"8\.9, 12\.0; this GPU has 8\.6.*sms=\[86\]"
    ):
        session.choose(records, 86, tmp_path, RTX)
    with pytest.raises(
        EnvironmentProblemError, match=r"has 9\.0\. TensorRT-RTX has none.*ort-cuda"
    ):
        session.choose(records, 90, tmp_path, RTX)


SHAPES = {"x": ["batch", "seq", 3], "s": ["batch", 2]}


def feeds(batch: int, seq: int, width: int = 3, other: int | None = None) -> dict[str, np.ndarray]:
    rows = batch if other is None else other
    return {"x": np.ones((batch, seq, width), np.float32), "s": np.ones((rows, 2), np.float32)}


def test_shapes_of_a_call_are_checked() -> None:
    assert session.sizes_of(SHAPES, feeds(2, 5)) == {"batch": 2, "seq": 5}
    with pytest.raises(UsageError, match=r"x has shape \(2, 5, 4\)"):
        session.sizes_of(SHAPES, feeds(2, 5, 4))
    with pytest.raises(UsageError, match=r"s has shape \(3, 2\)"):
        session.sizes_of(SHAPES, feeds(2, 5, other=3))
    with pytest.raises(UsageError, match="expected"):
        session.sizes_of(SHAPES, {"x": feeds(1, 1)["x"]})


def test_one_token_falls_into_the_decode_profile_and_too_many_into_none() -> None:
    known = profiles({"batch": BATCH, "seq": DimRange(1, 64, 100)}, stateful=True)
    assert [p.name for p in known] == [PREFILL, DECODE]
    assert session.profile_for(known, {"batch": 4, "seq": 1}) == 1
    assert session.profile_for(known, {"batch": 4, "seq": 2}) == 0
    with pytest.raises(UsageError, match=r"'seq': 101.*seq 1 to 100.*dims"):
        session.profile_for(known, {"batch": 4, "seq": 101})
    with pytest.raises(UsageError, match=r"'batch': 5"):
        session.profile_for(known, {"batch": 5, "seq": 1})


def test_a_cache_grows_from_nothing_to_the_longest_sequence() -> None:
    dims = {"batch": BATCH, "seq": DimRange(1, 64, 100)}
    prefill, decode = profiles(dims, stateful=True, grown=["past"])
    assert prefill.shapes(["past", "seq"]) == ([0, 1], [0, 64], [100, 100])
    assert decode.shapes(["past", "seq"]) == ([0, 1], [64, 1], [100, 1])
    assert session.profile_for([prefill, decode], {"batch": 1, "seq": 1, "past": 7}) == 1
    with pytest.raises(UsageError, match=r"'past': 101.*past 0 to 100"):
        session.profile_for([prefill, decode], {"batch": 1, "seq": 1, "past": 101})


def test_a_cache_may_be_longer_than_a_call() -> None:
    """Both profiles take a past of the range asked for: a prompt is fed in pieces."""
    dims, asked = {"batch": BATCH, "seq": DimRange(1, 64, 100)}, DimRange(0, 500, 4000)
    prefill, decode = profiles(dims, stateful=True, grown=["past"], past=asked)
    assert prefill.shapes(["past", "seq"]) == ([0, 1], [500, 64], [4000, 100])
    assert decode.shapes(["past", "seq"]) == ([0, 1], [500, 1], [4000, 1])
    known = [prefill, decode]
    assert session.profile_for(known, {"batch": 1, "seq": 100, "past": 3900}) == 0
    with pytest.raises(UsageError, match=r"'past': 4001.*past 0 to 4000"):
        session.profile_for(known, {"batch": 1, "seq": 1, "past": 4001})


def test_profiles_survive_the_manifest_and_give_shapes() -> None:
    profile = profiles({"batch": BATCH, "seq": DimRange(3, 64, 100)}, stateful=True)
    assert [p.name for p in profile] == [PREFILL]  # no single token allowed
    assert Profile(**vars(profile[0].record())) == profile[0]
    assert profile[0].shapes(["batch", 7, "seq"]) == ([1, 7, 3], [2, 7, 64], [4, 7, 100])


def test_ranges_without_bounds_are_bounded_and_others_kept() -> None:
    found = bound(
        {
            "b": DimRange(batch=True),
            "s": DimRange(),
            "t": DimRange(2, None, 10),
            "u": DimRange(9000),
        }
    )
    assert found["b"] == DimRange(1, 1, 8, batch=True)
    assert found["s"] == DimRange(1, 1024, 4096)
    assert found["t"] == DimRange(2, 10, 10)
    assert found["u"] == DimRange(9000, 9000, 9000)
