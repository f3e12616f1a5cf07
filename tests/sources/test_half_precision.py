"""Modules that use bfloat16: converted in float32, and compared with the module in float32."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.errors import UnsupportedModelError
from linexport.sources.bfloat16 import widened
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.independent import Independent, check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Inside(nn.Module):
    """Attention in bfloat16 between projections in float32."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, k, v = self.project(x).to(self.low).chunk(3, -1)
        q, k = q.relu() + 0.1, k.relu() + 0.1
        scores = torch.einsum("btd,bsd->bts", q, k).tril()
        return (scores @ v / scores.sum(-1, keepdim=True)).to(x.dtype)


class Methods(Inside):
    """The same by methods, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        q, k, v = (part.bfloat16() for part in self.project(x).chunk(3, -1))
        return (torch.einsum("btd,bsd->bts", q * self.scale, k).tril() @ v).float()


def example() -> tuple[Tensor]:
    return (torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.slow
def test_attention_in_bfloat16_is_fused_and_streams_in_float32(tmp_path: Path) -> None:
    model = load_module((Inside(), example()), "bfloat16:inside")
    manifest = linexport.convert(model, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused["LinearAttention"] == 1 and manifest.streaming.passed
    assert "computes in bfloat16" in manifest.warnings[0]
    assert all(t.dtype == "float32" for t in (*manifest.inputs, *manifest.outputs))
    check_independently(tmp_path / "a", Inside(torch.float32), WIDTH)
    x = np.random.default_rng(0).standard_normal((2, 99, WIDTH)).astype(np.float32)
    with torch.no_grad():
        as_written = Inside()(torch.from_numpy(x)).numpy()
    distance = np.abs(Independent(tmp_path / "a").pieces(x, [99]) - as_written).max()
    assert 1e-4 < distance / np.abs(as_written).max() < 2e-2  # 8 bits


def test_weights_buffers_inputs_and_methods_are_widened_and_copies_keep_their_weights() -> None:
    for module, args in ((Methods(), example()), (Inside().bfloat16(), (example()[0].bfloat16(),))):
        plain = copy.deepcopy(module).float()
        args, _, warnings = widened(module.eval(), args, {})
        assert "ONNX Runtime has no CPU kernels" in warnings[0]
        assert {x.dtype for x in (*module.state_dict().values(), *args)} == {torch.float32}
        other = copy.deepcopy(module).double()
        with torch.no_grad():
            other.project.weight.zero_()
            assert not torch.equal(other(args[0].double()).float(), module(args[0]))
        assert type(module).__name__ == type(plain).__name__
        assert widened(module, args, {}) == (args, {}, ())


class Automatic(Inside):
    """The same by contexts, one of them around a method, and with one that ends the others."""

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def projected(self, x: Tensor) -> Tensor:
        return self.project(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = self.projected(x).chunk(3, -1)
            scores = torch.einsum("btd,bsd->bts", q, k).tril()
            with torch.autocast("cpu", enabled=False):
                return scores.float() @ v.float()


def test_automatic_casts_to_bfloat16_do_nothing() -> None:
    module, (x,) = Automatic().eval(), example()
    q, k, v = module.project(x).chunk(3, -1)
    expected = torch.einsum("btd,bsd->bts", q, k).tril() @ v
    assert (module(x) - expected).abs().max() > 1e-3
    _, _, warnings = widened(module, (), {"x": x})
    assert "ONNX Runtime has no CPU kernels" in warnings[0]
    torch.testing.assert_close(module(x), expected)
    traced = trace(load_module((Automatic(), (x,)), "bfloat16:automatic"))
    assert onnx.TensorProto.BFLOAT16 not in {
        v.type.tensor_type.elem_type for v in traced.graph.graph.value_info
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):  # of others, it does what it did
        assert (x @ x.mT).dtype == torch.bfloat16


def test_a_module_in_float32_is_left_as_it_is() -> None:
    module, args = nn.Linear(2, 2), (torch.ones(1, 2),)
    assert widened(module, args, {}) == (args, {}, ()) and type(module) is nn.Linear


def test_an_exported_program_in_bfloat16_is_refused(tmp_path: Path) -> None:
    program = torch.export.export(
        Inside(), example(), dynamic_shapes=({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    )
    torch.export.save(program, tmp_path / "a.pt2")
    with pytest.raises(UnsupportedModelError, match=r"bfloat16.*Export it in float32"):
        linexport.convert(tmp_path / "a.pt2", tmp_path / "out", bench=False, threads=1)
