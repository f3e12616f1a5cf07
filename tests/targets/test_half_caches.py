"""Keys and values of softmax layers as states in half precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import linexport
from linexport import manifest
from linexport.artifact.state import StreamState
from linexport.manifest.records import KEY_VALUES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_streams_with_keys_and_values_in_half_precision(
    converted: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    """bfloat16, which NumPy has not, is kept as float32."""
    folder = converted("beside_softmax", target="ort-cuda", precision=precision)
    states = manifest.read(folder).states
    grown = {s.past: s.dtype for s in states if s.grows is not None and s.op == KEY_VALUES}
    assert len(grown) == 2 and {*grown.values()} == {
        "float16" if precision == "fp16" else "float32"
    }
    model = linexport.load(folder, threads=1)
    shape = model.manifest.inputs[0].shape
    x = np.random.default_rng(0).normal(size=(2, 50, shape[-1])).astype(np.float32)
    whole, stream = model.run(x)["output"], model.stream(history=8)
    parts = [stream.step(x[:, a:b])["output"] for a, b in ((0, 1), (1, 20), (20, 21), (21, 40))]
    limit = 1e-2 * np.abs(whole).max()
    np.testing.assert_allclose(np.concatenate(parts, 1), whole[:, :40], rtol=0, atol=limit)
    kept = stream.state()
    assert {n: kept.arrays[n].dtype.name for n in grown} == grown
    kept.save(tmp_path / "state.npz")
    assert StreamState.load(tmp_path / "state.npz") == kept
    assert max(kept.error_at_rest("int8").values()) < 1e-2
    other = model.stream()
    other.restore(tmp_path / "state.npz")
    stream.rewind(3)
    stream.step(x[:, 37:40])
    for live in (stream, other):
        found = live.step(x[:, 40:])["output"]
        np.testing.assert_allclose(found, whole[:, 40:], rtol=0, atol=limit)
    with model.pool(slots=2) as pool:
        sessions = [pool.open() for _ in range(2)]
        for session, length in zip(sessions, (30, 17), strict=True):
            session.push(x[:1, :length])
        while any(s.queued for s in sessions):
            pool.advance()
        assert sessions[0].state().arrays.keys() == kept.arrays.keys()
