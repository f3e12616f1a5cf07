"""Loops over tokens of models that take a dictionary of observations, as policies do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from linexport.passes.rewriting import rewrite
from linexport.plugins.ops.registry import attach_functions
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.runtimes import session

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE, STATE = "observation.image", "observation.state"
WIDTH, STATES = 6, 4


class Policy(nn.Module):
    """Pixels and joints of each step, u_t, into h_t = a_t h_{t-1} + u_t b_t^T, y_t = h_t c_t."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.eyes = nn.Conv2d(3, WIDTH, 3, 2)
        self.joints = nn.Linear(5, WIDTH)
        self.gates = nn.Linear(WIDTH, 1 + 2 * STATES)

    def forward(self, batch: dict[str, Tensor], scale: tuple[Tensor, Tensor]) -> Tensor:
        """Observations (B, T, ...) -> (B, T, WIDTH)."""
        image = batch[IMAGE]
        seen = self.eyes(image.flatten(0, 1)).mean((-2, -1)).unflatten(0, image.shape[:2])
        u = seen * scale[0] + self.joints(batch[STATE]) * scale[1]
        a, b, c = self.gates(u).split([1, STATES, STATES], -1)
        h, outputs = u.new_zeros(u.shape[0], WIDTH, STATES), []
        for t in range(u.shape[1]):
            h = a[:, t, :, None].sigmoid() * h + u[:, t, :, None] * b[:, t, None]
            outputs.append((h * c[:, t, None]).sum(-1))
        return torch.stack(outputs, 1)


def given(batch: int, time: int) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(time)
    image = torch.randn(batch, time, 3, 8, 8, generator=generator)
    state = torch.randn(batch, time, 5, generator=generator)
    scale = torch.rand(batch, time, 1, generator=generator)
    return {IMAGE: image, STATE: state}, (scale, 1 - scale)


def oracle(batch: dict[str, Tensor], scale: tuple[Tensor, Tensor]) -> np.ndarray:
    """The recurrence as a loop in float64."""
    module = Policy().double()
    with torch.no_grad():
        image = batch[IMAGE].double()
        seen = module.eyes(image.flatten(0, 1)).mean((-2, -1)).unflatten(0, image.shape[:2])
        u = seen * scale[0].double() + module.joints(batch[STATE].double()) * scale[1].double()
        a, b, c = (x.numpy() for x in module.gates(u).split([1, STATES, STATES], -1))
    values, found = u.numpy(), np.zeros(u.shape)
    for row in range(len(values)):
        h = np.zeros((WIDTH, STATES))
        for t in range(values.shape[1]):
            h = h / (1 + np.exp(-a[row, t, 0])) + np.outer(values[row, t], b[row, t])
            found[row, t] = h @ c[row, t]
    return found


def test_a_loop_over_steps_of_a_dictionary_is_one_operator() -> None:
    traced = trace(load_module((Policy().eval(), given(2, 6)), "nested:policy"))
    assert list(traced.dims) == ["batch", "seq"]
    rewritten = rewrite(traced.model)
    assert "LinearAttention" in [n.op_type for n in rewritten.model.graph.node]
    attach_functions(rewritten.model)
    opened = session(rewritten.model)
    *names, state = (one.name for one in opened.get_inputs())
    for batch, time in ((1, 1), (3, 5), (2, 70)):
        observed, scale = given(batch, time)
        values = [x.numpy() for x in (*observed.values(), *scale)]
        feeds = dict(zip(names, values, strict=True))
        got, _ = opened.run(None, feeds | {state: np.zeros((batch, 1, STATES, WIDTH), np.float32)})
        expected = oracle(observed, scale)
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())
