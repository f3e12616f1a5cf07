"""Last states are read from all states, so that no loop stays beside the fused operator."""

from __future__ import annotations

import pytest
import torch

from tests.support.loops import operators, rewritten
from tests.test_loops import Gates, Recurrence

pytestmark = pytest.mark.usefixtures("one_thread")


class WithLast(Recurrence):
    def forward(self, x):
        a, b = self.project(x).chunk(2, -1)
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(a[:, t]) * h + b[:, t]
            out.append(h)
        return torch.stack(out, 1), h


@pytest.mark.parametrize(("kind", "expected"), [(WithLast, "LinearAttention"), (Gates, "Scan")])
def test_a_last_state_that_is_read(kind: type[Recurrence], expected: str) -> None:
    assert operators(rewritten(kind())) == [expected]
