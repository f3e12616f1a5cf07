"""Recurrences that are not attention: what plain exports make of them, and whole conversions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport import passes
from linexport.plugins.ops.registry import attach_functions
from linexport.sources.factory import load_module
from linexport.trace.graph import plain_onnx, to_onnx
from tests.support.formulations.recurrences import in_log_space, logarithm_of_positive
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """What the function says."""
        return self.function(x)


def run(model: onnx.ModelProto | Path, x: Tensor) -> np.ndarray:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def rewritten(program: torch.export.ExportedProgram) -> onnx.ModelProto:
    model = passes.run(to_onnx(program, {}), passes.STATELESS)
    attach_functions(model)
    return model


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (F.logsigmoid, 200.0),
        (lambda x: x.logcumsumexp(1), 300.0),
        (lambda x: torch.logaddexp(x, x.roll(7, 1) - 1), 300.0),
        (lambda x: torch.logaddexp(torch.tensor(0.0), x - 4), 300.0),
        (lambda x: torch.logaddexp(x, torch.tensor([-2.0, 3.0])), 300.0),
    ],
    ids=["logsigmoid", "logcumsumexp", "logaddexp", "logaddexp of 0", "logaddexp of numbers"],
)
def test_logarithms_are_right_where_plain_exports_are_infinite(
    function: object, scale: float, tmp_path: Path
) -> None:
    x = torch.linspace(-1, 1, 40).reshape(1, 20, 2) * scale
    module = Function(function)
    sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = torch.export.export(module, (x.repeat(2, 1, 1),), dynamic_shapes=sizes)
    expected = module(x.double()).numpy()
    plain_onnx(program, tmp_path / "plain.onnx")
    assert not np.isfinite(run(tmp_path / "plain.onnx", x)).all()
    np.testing.assert_allclose(run(rewritten(program), x), expected, rtol=1e-6, atol=1e-6)


def test_sums_of_infinities_in_log_space_are_those_of_torch() -> None:
    infinite = torch.tensor([-torch.inf, -torch.inf, torch.inf, torch.inf, -torch.inf, 1.0, 90.0])
    other = torch.tensor([-torch.inf, 2.0, torch.inf, -torch.inf, torch.inf, -200.0, 90.0])
    x = torch.stack([infinite, other], -1)[None]
    module = Function(lambda x: torch.logaddexp(x[..., 0], x[..., 1]))
    program = torch.export.export(module, (x,))
    np.testing.assert_allclose(run(rewritten(program), x), module(x).numpy(), rtol=1e-6)


def test_logarithms_of_running_sums_stream() -> None:
    """Sums of exponentials that leave float32 on both sides, in pieces and single tokens."""
    module = Function(lambda x: x.logcumsumexp(1) - 1)
    sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = torch.export.export(module, (torch.randn(2, 9, WIDTH),), dynamic_shapes=sizes)
    model = passes.run(to_onnx(program, {}))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    data, *past = session.get_inputs()
    x = torch.linspace(-300, 300, 3 * 23 * WIDTH).reshape(3, 23, WIDTH)
    expected = module(x.double()).numpy()
    for pieces in ([23], [1] * 23, [4, 1, 18]):
        kept = [np.zeros([3 if isinstance(d, str) else d for d in p.shape], "f") for p in past]
        found = []
        for piece in np.split(x.numpy(), np.cumsum(pieces)[:-1], 1):
            fed = {data.name: piece, **{p.name: k for p, k in zip(past, kept, strict=True)}}
            y, *kept = session.run(None, fed)
            found.append(y)
        np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=1e-6, atol=1e-5)


def test_roots_of_closed_gates_are_right_where_plain_exports_are_not(tmp_path: Path) -> None:
    x = torch.linspace(-100, 100, 40).reshape(1, 20, 2)
    module = Function(lambda x: x.sigmoid() ** (1 / 16))
    program = torch.export.export(module, (x,))
    expected = module(x.double()).numpy()
    plain_onnx(program, tmp_path / "plain.onnx")
    assert np.abs(run(tmp_path / "plain.onnx", x) - expected).max() > 0.2
    np.testing.assert_allclose(run(rewritten(program), x), expected, rtol=1e-5, atol=1e-30)


def test_a_sum_of_integers_or_along_a_fixed_axis_stays_as_it_is() -> None:
    def positions(x: Tensor) -> Tensor:
        mask = x[..., :4] > 0
        return mask.long().cumsum(1) + x[..., :4].cumsum(2).long()

    sizes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    program = torch.export.export(
        Function(positions), (torch.randn(2, 6, WIDTH),), dynamic_shapes=sizes
    )
    found = passes.rewrite(to_onnx(program, {}), ("canonicalise", "fuse"))
    assert not found.findings.matches
    assert sum(n.op_type == "CumSum" for n in found.model.graph.node) == 2


class Recurrent(nn.Module):
    """A layer of minGRU between projections, then a running mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        gate, hidden = self.inside(x).chunk(2, -1)
        h = in_log_space(-F.softplus(gate), -F.softplus(-gate) + logarithm_of_positive(hidden))
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.out(x + h) + torch.tanh(h).cumsum(1) / count


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnx", "ort"])
def test_recurrences_and_running_means_stream(tmp_path: Path, target: str) -> None:
    model = load_module((Recurrent().eval(), (torch.randn(2, 12, WIDTH),)), "recurrent:layer")
    manifest = linexport.convert(model, tmp_path / "a", target=target, bench=False, threads=1)
    assert manifest.fused == {"LinearAttention": 2} and manifest.streaming.passed
    if target == "onnx":
        check_independently(tmp_path / "a", Recurrent(), WIDTH)
