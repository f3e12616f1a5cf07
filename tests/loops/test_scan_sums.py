"""A state that a step has several times is written once: the same values, by one decay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from tests.loops.test_loops import Recurrence
from tests.passes.test_hoist_from_scans import hoisted, inside, model, values
from tests.support.loops import check_streams, operators
from tests.support.loops import rewritten as rewritten_loop

pytestmark = pytest.mark.usefixtures("one_thread")

GATE = "z = Sigmoid (t) "
CHOICE = "z = Greater (t, c) "


@pytest.mark.parametrize(
    "step",
    [
        GATE + "d = Sub (t, h) m = Mul (z, d) next = Add (h, m)",
        GATE + "a = Mul (h, z) b = Sub (h, a) next = Sub (b, t)",
        GATE + "a = Mul (h, z) b = Neg (h) d = Sub (t, b) next = Sub (d, a)",
        GATE + "a = Add (t, h) next = Mul (a, z)",
        GATE + "a = Add (h, h) b = Mul (a, c) d = Add (b, t) next = Mul (z, d)",
        GATE + "a = Mul (h, z) b = Add (a, t) next = Sub (b, z)",
        CHOICE + "a = Add (h, t) b = Mul (h, c) next = Where (z, a, b)",
        CHOICE + "a = Add (h, t) next = Where (z, c, a)",
    ],
)
def test_a_state_is_written_once(step: str) -> None:
    original = model(step)
    rewritten = hoisted(original)
    onnx.checker.check_model(rewritten, full_check=True)
    assert inside(rewritten) == ["Add", "Mul"]
    for length in (1, 7):
        for a, b in zip(values(original, length), values(rewritten, length), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "step",
    [
        # A matrix mixes the entries of the state.
        "a = MatMul (h, w) b = Sub (h, a) next = Add (b, t)",
        # It is no longer of the state's shape.
        "e = Unsqueeze (h, end) d = Unsqueeze (t, one) a = Mul (e, d) s = ReduceSum (a, one)"
        " b = Squeeze (s, one) next = Add (h, b)",
        "a = Mul (h, h) next = Sub (t, a)",
    ],
)
def test_what_stays(step: str) -> None:
    original = model(step)
    assert inside(hoisted(original)) == inside(original)


class Lerp(Recurrence):
    """A moving average as torch has it: its export computes it in one of two ways."""

    def forward(self, x):
        a, b = self.project(x).chunk(2, -1)
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.lerp(h, b[:, t], torch.sigmoid(a[:, t]))
            out.append(h)
        return torch.stack(out, 1)


def test_moving_averages_are_fused_and_stream() -> None:
    module = Lerp()
    found = rewritten_loop(module)
    assert operators(found) == ["LinearAttention"]
    check_streams(found, module)


class TwoInputs(Recurrence):
    """What is added is a sum of three, added to the state one by one."""

    def forward(self, x):
        a, b = self.project(x).chunk(2, -1)
        h, out = torch.zeros_like(b[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.sigmoid(a[:, t]) * h + b[:, t] + x[:, t] - 0.5
            out.append(h)
        return torch.stack(out, 1)


class TwoProducts(Recurrence):
    """Two outer products are added, which are no sum of tokens in front of the loop."""

    def forward(self, x):
        a, b = self.project(x).chunk(2, -1)
        h, out = x.new_zeros(x.shape[0], 8, 8), []
        for t in range(x.shape[1]):
            h = 0.9 * h + a[:, t, :, None] * b[:, t, None] + b[:, t, :, None] * x[:, t, None]
            out.append((x[:, t, None] @ h)[:, 0])
        return torch.stack(out, 1)


def test_sums_that_are_added_to_a_state_are_fused_and_stream() -> None:
    module = TwoInputs()
    found = rewritten_loop(module)
    assert operators(found) == ["LinearAttention"]
    check_streams(found, module)


class Cascade(Recurrence):
    """A recurrence over what another one gives, times something."""

    def forward(self, x):
        a, b = self.project(x).chunk(2, -1)
        h, first, second = torch.zeros_like(b[:, 0]), [], []
        for t in range(x.shape[1]):
            h = torch.sigmoid(a[:, t]) * h + b[:, t]
            first.append(h)
        given, h = torch.stack(first, 1), torch.zeros_like(b[:, 0])
        for t in range(x.shape[1]):
            h = 0.9 * h + given[:, t] * x[:, t]
            second.append(h)
        return torch.stack(second, 1)


def test_a_loop_over_what_a_loop_gives_is_fused_with_it() -> None:
    module = Cascade()
    found = rewritten_loop(module)
    assert operators(found) == ["LinearAttention", "LinearAttention"]
    check_streams(found, module)


def test_outer_products_stay_in_the_step() -> None:
    found = rewritten_loop(TwoProducts())
    shapes = [d.type.tensor_type.shape.dim for d in found.model.graph.value_info]
    assert operators(found) == ["Scan"]
    assert not any(
        [d.dim_value for d in shape[-2:]] == [8, 8] for shape in shapes if len(shape) > 3
    )
