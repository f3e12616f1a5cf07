"""Functions that ``torch.vmap`` runs for each row of a batch, or for each head."""

from __future__ import annotations

import math

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.factory import load_module
from linexport.system.torch_internals import vmaps
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")


class Loop(nn.Module):
    """A gated recurrence of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def row(self, u: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        decay, value = self.gate(u).sigmoid(), self.value(u)
        state, states = torch.zeros_like(value[0]), []
        for t in range(u.shape[0]):
            state = decay[t] * state + value[t]
            states.append(state)
        return torch.stack(states)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        return torch.vmap(self.row)(x)


class Heads(nn.Module):
    """Attention of one head, below two nested vmaps, one of them of dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""

        def head(query: Tensor, key: Tensor) -> Tensor:
            return torch.tril(query @ key.mT) @ key

        query, key = x.unflatten(-1, (2, 2, 1)).unbind(2)
        return torch.vmap(torch.vmap(head, 1, 1))(query, key).flatten(2)


class Diagonal(nn.Module):
    """S5: a diagonal state of complex numbers, its input and its output below vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([[-0.4, math.pi], [-0.3, 0.5], [-0.2, 2.0]]))
        self.b, self.c = (nn.Parameter(torch.randn(3, 4, 2)) for _ in range(2))

    def row(self, u: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        rate, b, c = map(torch.view_as_complex, (self.rate, self.b, self.c))
        added = torch.vmap(lambda x: b @ x.to(b.dtype))(u)
        decay = torch.exp(rate * 0.1).tile(u.shape[0], 1)
        state, states = torch.zeros_like(added[0]), []
        for t in range(u.shape[0]):
            state = decay[t] * state + added[t]
            states.append(state)
        return torch.vmap(lambda s: (s @ c).real)(torch.stack(states))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        return torch.vmap(lambda u: self.row(u))(x)


@pytest.mark.parametrize("module", [Loop(), Heads(), Diagonal()], ids=lambda m: type(m).__name__)
def test_functions_of_rows_are_traced_for_every_batch_and_length(module: nn.Module) -> None:
    shapes = ({0: Dim("batch"), 1: Dim("seq")},)
    given = (module.eval(), (torch.randn(2, 9, 4),), {}, shapes)
    graph = trace(load_module(given, "tests:vmap")).model
    run = onnxruntime.InferenceSession(graph.SerializeToString())
    for batch, length in ((1, 3), (3, 25)):
        x = torch.randn(batch, length, 4)
        (got,) = run.run(None, {"x": x.numpy()})
        expected = module.double()(x.double()).float()
        torch.testing.assert_close(torch.from_numpy(got), expected, atol=2e-5, rtol=2e-5)
        module.float()


def test_vmap_is_as_it_was_behind_a_trace_and_within_one_that_cannot_write_it_out() -> None:
    x = torch.randn(3, 5)
    with vmaps.written_out():
        found = torch.vmap(lambda u: u + torch.randn(5), randomness="same")(x)
        assert (found - x).std(0).abs().max() < 1e-6
        sizes = torch.vmap(lambda u, n: u * n, (0, None))(x, 2)
    torch.testing.assert_close(sizes, 2 * x)
    torch.testing.assert_close(torch.vmap(torch.sin)(x), torch.sin(x))
