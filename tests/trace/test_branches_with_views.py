"""Branches of ``torch.cond`` that give or take views, or that torch cannot export."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from linexport.errors import BuildError
from linexport.sources.factory import load_module
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

Function = Callable[[Tensor], Tensor]


class Branches(nn.Module):
    def __init__(self, yes: Function, no: Function) -> None:
        super().__init__()
        self.yes, self.no = yes, no

    def forward(self, x: Tensor) -> Tensor:
        yes, no = self.yes, self.no
        return torch.cond(x[0, 0, 0] > 0, yes, no, (x,)) + 1


def session(module: nn.Module) -> onnxruntime.InferenceSession:
    traced = trace(load_module((module, (torch.randn(2, 9, 4),)), "tests:branches"))
    return onnxruntime.InferenceSession(traced.model.SerializeToString())


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        (lambda x: x.mT.contiguous(), lambda x: (x * 2).mT.contiguous()),
        (lambda x: x.transpose(1, 2), lambda x: x.mT),
    ],
    ids=["a property", "views"],
)
def test_a_branch_may_give_a_view(yes: Function, no: Function) -> None:
    """torch takes ``.mT`` out of the branch, and refuses it as an alias of the other operand."""
    run = session(Branches(yes, no))
    for sign in (1.0, -1.0):
        x = torch.randn(3, 5, 4)
        x[0, 0, 0] = sign
        (got,) = run.run(None, {"x": x.numpy()})
        np.testing.assert_array_equal(got, ((yes if sign > 0 else no)(x) + 1).numpy())


@pytest.mark.parametrize(
    ("yes", "no", "advice"),
    [
        (lambda x: x[..., :2], lambda x: x[..., 2:], "end both with .contiguous()"),
        (lambda x: x + 1, lambda x: x.add_(1), "must not change a tensor in place"),
    ],
    ids=["another layout", "in place"],
)
def test_what_torch_refuses_has_advice_and_the_users_line(
    yes: Function, no: Function, advice: str
) -> None:
    with pytest.raises(BuildError) as error:
        session(Branches(yes, no))
    text = str(error.value)
    assert advice in text and f"{__file__}:" in text and "torch.cond(x[0, 0, 0] > 0" in text
    for internal in ("Original traceback", "While executing", "eval_with_key", "FakeTensor"):
        assert internal not in text
