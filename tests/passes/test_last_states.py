"""Last states are read from all states, so that no loop stays beside the fused operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import linexport
from linexport.sources.factory import load_module
from tests.loops.test_loops import DYNAMIC, Gates, Recurrence
from tests.support.loops import operators, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")


class WithLast(Recurrence):
    def forward(self, x):
        return self.states(x)


@pytest.mark.parametrize(("kind", "expected"), [(WithLast, "LinearAttention"), (Gates, "Scan")])
def test_a_last_state_that_is_read(kind: type[Recurrence], expected: str) -> None:
    assert operators(rewritten(kind())) == [expected]


class WithMean(WithLast):
    def forward(self, x):
        y, _ = self.states(x)
        return y, y.mean(1)


@pytest.mark.parametrize(("kind", "streams"), [(WithLast, True), (WithMean, False)])
def test_a_stream_gives_what_is_of_the_last_token(
    kind: type[Recurrence], streams: bool, tmp_path: Path
) -> None:
    source = load_module((kind().eval(), (torch.randn(2, 16, 8),), DYNAMIC), "a:loop")
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert bool(manifest.streaming.passed) is streams
    if not streams:
        assert "reduces over all tokens of a call" in str(manifest.streaming.reason)
        return
    x = np.random.default_rng(0).standard_normal((2, 9, 8)).astype(np.float32)
    artifact = linexport.load(tmp_path / "artifact", threads=1)
    whole, stream = artifact.run(x), artifact.stream()
    *_, last = (stream.step(piece) for piece in np.split(x, [4, 5], axis=1))
    np.testing.assert_allclose(last["output_1"], whole["output_1"], rtol=1e-5, atol=1e-6)
