"""Rows as users have them: for modules without examples, of other types, long ones, wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.linearization import search_candidates
from linexport.linearization.calibration import as_taken, at_once
from linexport.linearization.find_softmax import find_sites
from linexport.linearization.search_candidates import find_candidates, measure_costs
from linexport.linearization.search_record import SearchFile
from linexport.linearization.task_loss import TaskRows
from linexport.sources import load_model
from tests.linearization.test_linearize_search import given_cost

pytestmark = pytest.mark.usefixtures("one_thread")

Cli = Callable[..., Any]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))

def make():
    return Net().eval()
"""


class Decoder(nn.Module):
    """One layer of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.packed, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.packed(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize("wide", [False, True])
def test_a_module_without_examples_is_searched_with_labels(
    wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Rows stand for its example inputs, also in the type that numpy makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search_candidates, "measure", given_cost)
    Path("net.py").write_text(NET)
    x = np.random.default_rng(0).standard_normal((160, 6, 16)).astype(np.float32)
    module = load_model("net.py:make", examples=(torch.from_numpy(x[:2]),)).module
    with torch.no_grad():
        labels = module(torch.from_numpy(x)).argmax(-1).numpy()
    np.savez("x.npz", x=x.astype(np.float64) if wide else x)
    np.savez("y.npz", y=labels)
    done = cli(
        *("linearize", "net.py:make", "-o", "net.pt2", "--data", "x.npz", "--labels", "y.npz"),
        *("--auto", "--max-drop", 0.5, "--map", "elu1", "--time-budget", 0.1, "--no-bench"),
        *("--lengths", 64, "--json"),
    )
    found = done.json()
    assert done.code == 0, done.err
    assert found["metric"]["name"] == "accuracy" and found["metric"]["before"] == 1.0
    assert load_model("net.pt2").module(torch.from_numpy(x[:3])).shape == (3, 3)


def test_numbers_are_taken_in_the_types_of_the_model() -> None:
    ids, images = torch.arange(6).reshape(2, 3), torch.rand(2, 3)
    rows = (ids.to(torch.uint16), images.double())
    found = as_taken(rows, (ids, images), {0: (0, 6)})
    assert [x.dtype for x in found] == [torch.int64, torch.float32]
    assert torch.equal(found[0], ids)
    flags = torch.ones(2, 3, dtype=torch.bool)
    assert as_taken((flags,), (ids,), {})[0].dtype == torch.bool
    masks = torch.tensor([[0, 1], [1, 1]])
    assert torch.equal(as_taken((masks,), (masks,), {0: (1, 2)})[0], masks)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    ids = torch.tensor([[0, 64]])
    with pytest.raises(UsageError, match="values from 0 to 64; the model takes 0 to 63"):
        as_taken((ids,), (ids,), {0: (0, 64)})


def test_long_rows_run_few_at_once() -> None:
    """All of 32 rows at once would need eight times the memory."""
    module, data = Decoder(), torch.randn(12, 1024, 8)
    assert at_once((data,)) == 4
    with pytest.MonkeyPatch.context() as patch:
        seen = list[int]()
        patch.setattr(Decoder, "forward", _noted(Decoder.forward, seen))
        linexport.linearize(module, data, map="elu1", distil=1, bench=False, force=True)
    assert seen and max(seen) <= 4096
    assert at_once((torch.zeros(9, 9000, dtype=torch.int64),)) == 2
    assert at_once((torch.zeros(90, 16, 4),)) == 32


def _noted(
    forward: Callable[[Decoder, Tensor], Tensor], seen: list[int]
) -> Callable[[Decoder, Tensor], Tensor]:
    def run(module: Decoder, x: Tensor) -> Tensor:
        seen.append(x.shape[0] * x.shape[1])
        return forward(module, x)

    return run


def test_rows_of_one_token_have_nothing_to_attend_to() -> None:
    with pytest.raises(UnsupportedModelError, match="rows have one key"):
        linexport.linearize(Decoder(), torch.randn(8, 1, 8), map="window4+elu1", bench=False)


def test_one_form_is_measured_however_short_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_candidates, "measure", given_cost)
    module, data = Decoder().eval(), torch.randn(40, 24, 8)
    sites = find_sites(module, [(data,)])
    forms = find_candidates(module, sites, TaskRows((data,)), ["elu1", "taylor2"], {}, 0)
    found = measure_costs(sites, forms, [24], 1, SearchFile(None, {}), lambda: 0.0)
    assert list(found.forms[sites[0].index]) == ["elu1"] and found.skipped == 1
