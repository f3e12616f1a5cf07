"""A few hundred mutated files of fixed seeds; ``tools/fuzz.py`` makes any number."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from linexport.artifact.state import StreamState
from linexport.errors import UsageError
from tests.support.fuzzing import archives, campaign, values
from tests.support.fuzzing.kinds import ARTIFACTS, KINDS, save_state

COUNTS = {"pt": 60, "pt2": 40, "onnx": 40, "config": 30, "safetensors": 40} | {
    "manifest": 60,
    "state": 60,
    "graphs": 10,
    "modules": 1,
}
OF_TRANSFORMERS = ("config", "safetensors")


@pytest.fixture(scope="module")
def worker(
    tmp_path_factory: pytest.TempPathFactory, converted: Callable[..., Path]
) -> Iterator[campaign.Worker]:
    """One process for all kinds, given the artifacts that other tests have made."""
    started = campaign.Worker(tmp_path_factory.mktemp("fuzzing"))
    place = KINDS["manifest"].samples(started.folder)
    for name in ARTIFACTS:
        shutil.copytree(converted(name), place / "valid" / name)
        save_state(place / "valid" / name)
    (place / "complete").touch()
    yield started
    started.stop()


@pytest.mark.services
@pytest.mark.parametrize("kind", COUNTS)
def test_no_mutation_ends_in_anything_but_a_result_or_a_refusal(
    kind: str, worker: campaign.Worker
) -> None:
    if kind in OF_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the hf extra")
    report = campaign.run(kind, 0, range(COUNTS[kind]), worker)
    assert not report.findings
    assert sum(report.counts.values()) == COUNTS[kind]
    if KINDS[kind].mutations:
        assert report.counts["refused"] and report.counts["loaded"]


@pytest.mark.parametrize(
    "header", [b"(" * 54, b"{'descr': ',<f4', 'fortran_order': False, 'shape': ()}"]
)
def test_a_state_whose_header_is_not_one_is_refused(tmp_path: Path, header: bytes) -> None:
    array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "state.npz").write_bytes(archives.written([("model_sha256.npy", array)]))
    with pytest.raises(UsageError, match="is not a saved stream: an array has a header"):
        StreamState.load(tmp_path / "state.npz")


@pytest.mark.services
def test_a_crash_is_counted_and_the_next_case_goes_on(worker: campaign.Worker) -> None:
    before = worker.ask("pt", 0, 0)
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait()
    crash = worker.ask("pt", 0, 0)
    assert crash["outcome"] == "abort" and str(-signal.SIGKILL) in crash["where"]
    assert worker.ask("pt", 0, 0) == before


def test_the_same_seed_makes_the_same_case() -> None:
    document = b'{"a": [1, 2, {"b": "text"}], "c": null}'
    made = [values.json_bytes(Random(seed), document) for seed in (*range(50), *range(50))]
    assert made[:50] == made[50:] and len(set(made)) > 30
