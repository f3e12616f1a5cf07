"""The file of kernels' times, on TensorRT-RTX's objects, which are TensorRT's without any times."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linexport.errors import UsageError
from linexport.targets.trt.timing_cache import timing_cache

pytestmark = pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops")


@pytest.fixture
def config(rtx: Any) -> Any:
    logger = rtx.Logger(rtx.Logger.INTERNAL_ERROR)
    builder = rtx.Builder(logger)
    yield builder.create_builder_config()


def test_a_file_is_made_then_used_and_kept(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "times.cache"
    with timing_cache(config, file):
        assert not file.exists()
    first = file.read_bytes()
    assert first and list(tmp_path.iterdir()) == [file]
    with timing_cache(config, file):
        assert config.get_timing_cache() is not None
    assert file.stat().st_size == len(first)


def test_without_a_file_the_builder_is_left_alone() -> None:
    with timing_cache(None, None):
        pass


def test_a_build_that_fails_leaves_the_file_as_it_was(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "times.cache"
    file.write_bytes(b"old")
    with pytest.raises(RuntimeError), timing_cache(config, file):
        raise RuntimeError
    assert file.read_bytes() == b"old"


def test_a_folder_and_a_place_that_is_not_there_are_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"), timing_cache(config, tmp_path):
        pass
    place = tmp_path / "nowhere" / "times.cache"
    with pytest.raises(UsageError, match="cannot be written"), timing_cache(config, place):
        pass


def test_a_cache_of_another_gpu_is_refused(tmp_path: Path) -> None:
    """As TensorRT says it: the cache is read and not accepted."""
    other = SimpleNamespace(
        create_timing_cache=lambda kept: kept, set_timing_cache=lambda cache, ignore: False
    )
    refused = pytest.raises(UsageError, match="not a timing cache of this TensorRT and GPU")
    with refused, timing_cache(other, tmp_path / "x"):
        pass


def test_tensorrt_rtx_says_itself_that_it_keeps_no_times(config: Any, tmp_path: Path) -> None:
    """Why its target refuses the option. Should this fail, it may be taken."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with timing_cache(config, tmp_path / "x"):
            pass
    assert any("no-ops in TensorRT-RTX" in str(w.message) for w in found)
